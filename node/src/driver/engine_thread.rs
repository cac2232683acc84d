//! The thread that computes.
//!
//! A pass takes long, so it is not the event loop's. Tasks arrive over a bounded channel and run in order; their
//! results return over another. Where there are several devices, passes go on to their threads.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use shoal_engine::{AllReduce, EngineError, Island, Origin, Projected, SwapStats, Update};
use shoal_protocol::codec::SumCodec;
use shoal_protocol::frame::Element;
use shoal_protocol::ids::{ClaimKey, ContentHash, Exchange, Stage, Step, WeightGroup};
use shoal_protocol::message::{Challenge, FixedLoss, RoundCheck, RoundId, SumsPrint};
use shoal_scheduler::action::{DeviceIndex, Owned, Task, TaskResult};
use tokio::sync::mpsc;

use super::checkpoint_writer::{CheckpointWriter, PartWriter};
use super::engine_waits::EngineWaits;
use super::job_report::{JobDone, Report};
use super::passes::Passes;
use super::payload::{Held, Tensor, Tensors};
use super::run_files::RunFiles;
use super::samples::Samples;
use super::swap_watch::SwapWatch;
use crate::fault_point::FaultPoint;

/// Tasks that wait at most. The scheduler gives a few passes and short tasks at a time, and one task
/// for each piece of a round.
const QUEUE: usize = 1 << 16;

/// Why a peer ends that cannot read its output log. Other peers repeat its work.
pub(crate) const LOG_LOST: &str = "the output log cannot be read back from the disk of the data directory; check \
     that disk, and start this peer again there or with --data-dir on another one";

/// A task with the tensors that it reads.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) task: Task,
    pub(crate) inputs: Vec<Held>,
}

/// Everything that the thread owns.
#[derive(Debug)]
pub(crate) struct EngineResources {
    /// The devices, with the hosted stages.
    pub(crate) engine: Island,
    /// The samples; `Some` once the first stage, which alone reads them, is hosted.
    pub(crate) samples: Option<Samples>,
    /// The files that the manifest names.
    pub(crate) run_files: RunFiles,
    /// For fetching them.
    pub(crate) waits: EngineWaits,
    /// The passes on one device, with the tensors outside the engine.
    pub(crate) passes: Passes,
    /// The writer of checkpoints' parts.
    pub(crate) parts: PartWriter,
    /// The folder of fetched parts.
    pub(crate) fetched: PathBuf,
}

impl EngineResources {
    /// Reads a microbatch's tokens and labels, for the first stage.
    ///
    /// # Errors
    /// When the data cannot be had.
    fn read_samples(&mut self, key: ClaimKey, exchange: Exchange) -> anyhow::Result<Tensors> {
        let samples = self.samples.as_mut().expect("the first stage has the data");
        let manifest = &self.parts.manifest;
        let passes = manifest.passes_of_exchange(key.microbatch, exchange);
        if passes.is_empty() {
            // The last exchange of a virtual worker, which has no pass.
            return Ok([].into());
        }
        let size = u64::from(manifest.training.microbatch_size);
        let rows = u64::from(passes.start) * size..u64::from(passes.end) * size;
        let batch = samples.batch(key.step, key.microbatch, rows)?;
        let passes = passes.end - passes.start;
        let shape = [passes * manifest.training.microbatch_size, manifest.model.context];
        let [rows, tokens] = manifest.label_shape();
        let labels = manifest.with_tokens(&batch.inputs, batch.labels);
        let words = |shape: [u32; 2], bytes| {
            let shape = shape.to_vec();
            Tensor { element: Element::U32, shape, bytes }
        };
        let inputs = words(shape, batch.inputs);
        Ok([inputs, words([passes * rows, tokens], labels)].into_iter().collect())
    }
}

/// The handle of the thread: jobs in, results out.
#[derive(Debug)]
pub(crate) struct EngineThread {
    jobs: mpsc::Sender<Job>,
    done: mpsc::Receiver<JobDone>,
    waits: EngineWaits,
}

impl EngineThread {
    /// Makes the engine on a new thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    ///
    /// # Panics
    /// Outside a runtime.
    pub(crate) fn start(
        make: impl FnOnce(EngineWaits) -> anyhow::Result<EngineResources> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        let (results, done) = mpsc::channel(QUEUE);
        let waits = EngineWaits::here();
        let given = waits.clone();
        std::thread::Builder::new().name("engine".into()).spawn(move || {
            let worker = make(given).and_then(|resources| EngineWorker::new(resources, &results));
            if let Err(error) = worker.and_then(|worker| work(worker, &mut queue, &results)) {
                // The receiver is gone only while the process ends.
                let _ = results.blocking_send(JobDone::of(Err(error), Duration::ZERO));
                // Jobs are given until the failure is known.
                while queue.blocking_recv().is_some() {}
            }
        })?;
        Ok(Self { jobs, done, waits })
    }

    /// Queues a job.
    ///
    /// # Panics
    /// When the scheduler gives more tasks than it ever may, or the thread has panicked.
    pub(crate) fn give(&self, job: Job) {
        self.jobs.try_send(job).expect("the engine's thread takes every task");
    }

    /// Waits for the next result; `None` after the thread panicked. Safe to cancel.
    pub(crate) async fn done(&mut self) -> Option<JobDone> {
        self.done.recv().await
    }

    /// Ends the thread and waits until it has: it gives up what it waits for, carries out no further
    /// job, and writes the checkpoints that it has copied.
    pub(crate) async fn close(mut self) {
        self.waits.close();
        drop(self.jobs);
        while self.done.recv().await.is_some() {}
    }
}

/// Carries out jobs until the handle is closed.
///
/// # Errors
/// When a job fails. What the engine holds is of no use after that.
fn work(
    mut worker: EngineWorker,
    queue: &mut mpsc::Receiver<Job>,
    results: &mpsc::Sender<JobDone>,
) -> anyhow::Result<()> {
    let (mut watch, mut before) = (SwapWatch::default(), SwapStats::default());
    while let Some(job) = queue.blocking_recv() {
        let start = Instant::now();
        if worker.resources.waits.is_closed() {
            return Ok(());
        }
        let Some(result) = worker.carry_out(job)? else { continue };
        let busy = start.elapsed();
        let all = worker.resources.engine.swap_stats().unwrap_or_default();
        let swapped = all.since(std::mem::replace(&mut before, all));
        // The time of passes on threads of their own is not known here.
        let is_known = worker.resources.engine.only().is_some();
        if let (true, Some(share)) = (is_known, watch.computed(busy, all.waited)) {
            warn_of_slow_disk(share);
        }
        let footprints = match result {
            TaskResult::Applied { .. } | TaskResult::Restored { .. } | TaskResult::Left { .. } => {
                Some(worker.resources.engine.footprints())
            }
            _ => None,
        };
        let routing = match result {
            TaskResult::Applied { stage, .. } => {
                Some((stage, worker.resources.engine.take_routing(stage)?))
            }
            _ => None,
        };
        let done = JobDone { swapped, footprints, routing, ..JobDone::of(Ok(result), busy) };
        if results.blocking_send(done).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

fn warn_of_slow_disk(share: f64) {
    tracing::warn!(
        "the engine waits for swapped stages in {:.0} % of its time: more microbatches in a step, more memory \
         or a faster disk would help",
        100.0 * share
    );
}

/// The all-reduce of one weight group, for one round after the other.
#[derive(Debug)]
struct Reduction {
    round: RoundId,
    state: AllReduce,
}

struct EngineWorker {
    resources: EngineResources,
    /// For results that other threads report.
    results: mpsc::Sender<JobDone>,
    rounds: BTreeMap<WeightGroup, Reduction>,
    writer: CheckpointWriter,
}

impl EngineWorker {
    fn new(resources: EngineResources, results: &mpsc::Sender<JobDone>) -> anyhow::Result<Self> {
        // A copy of every hosted stage may wait, and one of the stage that the peer moves to, so that
        // no copy of one version waits for another version's.
        let waiting = resources.engine.hosted() + 1;
        let writer = CheckpointWriter::start(resources.parts.clone(), results.clone(), waiting)
            .context("no thread for checkpoints")?;
        Ok(Self { resources, results: results.clone(), rounds: BTreeMap::new(), writer })
    }

    /// Runs a task. Returns `None` for a task that goes on in the background or on another thread.
    ///
    /// # Errors
    /// When the output log cannot be read, or the engine fails.
    fn carry_out(&mut self, Job { task, inputs }: Job) -> anyhow::Result<Option<TaskResult>> {
        let inputs: io::Result<Vec<Tensors>> = inputs.iter().map(Held::load).collect();
        let mut inputs = inputs.context(LOG_LOST)?;
        if let Task::Forward { key, exchange, activation: None, .. } = task {
            let samples = self.resources.read_samples(key, exchange);
            inputs.push(samples.context("the data cannot be read")?);
        }
        match task.device() {
            Some(device) => self.compute_on(device, task, inputs),
            None => Ok(self.compute(task, &inputs)?),
        }
    }

    /// Runs a task that concerns one device, on the thread of the device if there are several, or on those of all
    /// that compute it together.
    fn compute_on(
        &mut self,
        device: DeviceIndex,
        task: Task,
        inputs: Vec<Tensors>,
    ) -> anyhow::Result<Option<TaskResult>> {
        let EngineResources { engine, passes, .. } = &mut self.resources;
        if let Some(engine) = engine.only() {
            return Ok(Some(passes.carry_out(engine, &task, &inputs)?));
        }
        let counts = match task {
            Task::Accumulate { key, .. } => Some(key),
            _ => None,
        };
        let task = Arc::new((task, inputs));
        for (place, number) in engine.devices_of_pass(device.index()).enumerate() {
            let device = DeviceIndex(u16::try_from(number).expect("few devices"));
            let (passes, task) = (passes.clone(), task.clone());
            let report = Report::new(self.results.clone(), device);
            engine.run(number, counts, move |engine| {
                let (start, (task, inputs)) = (Instant::now(), &*task);
                let result = match place {
                    0 => passes.carry_out(engine, task, inputs).map(Some),
                    _ => passes.assist(engine, task, inputs),
                };
                let has_failed = result.is_err();
                match result.map_err(Into::into).transpose() {
                    Some(result) => report.send(start, result),
                    None => report.keep(),
                }
                if has_failed {
                    engine.end_together();
                }
            })?;
        }
        Ok(None)
    }

    fn compute(
        &mut self,
        task: Task,
        inputs: &[Tensors],
    ) -> Result<Option<TaskResult>, EngineError> {
        let result = match task {
            Task::Forward { .. }
            | Task::Backward { .. }
            | Task::Accumulate { .. }
            | Task::Discard { .. } => unreachable!("{task:?} concerns one device"),
            Task::FetchAhead { stage, sums } => {
                self.resources.engine.fetch_ahead(stage, sums)?;
                FaultPoint::Swapping.pass();
                return Ok(None);
            }
            Task::Export { round, to, piece, range, .. } => {
                let (count, others) = (range.len(), parts_of(inputs));
                let (engine, reduction) = self.reduction(round)?;
                let place = range.clone();
                let part = engine.read_sums(round.weights, round.step, place, |sums| {
                    reduction.part(range, sums, &others)
                })??;
                let part = Tensor::flat(self.sum_codec().part(), count, part);
                let payload = self.resources.passes.payloads.keep([part]);
                Ok(TaskResult::Exported { round, to, piece, payload })
            }
            Task::Reduce { round, piece, range, .. } => self.reduce(round, piece, range, inputs),
            Task::Install { round, range, .. } => {
                let (engine, reduction) = self.reduction(round)?;
                engine.need_mean(round.weights)?;
                reduction.install(range.clone(), &inputs[0][0].bytes)?;
                Ok(TaskResult::Installed { round, range })
            }
            Task::Summarise { round, owned } => {
                let (hash, square_norm) = newest(&self.rounds, round).outcome();
                let checks = self.check_sums(round, hash, &owned)?;
                let sums = self.print_own_sums(round, hash)?;
                Ok(TaskResult::Summarised { round, hash, square_norm, checks, sums })
            }
            Task::SetSumsAside { .. } | Task::PrintSums { .. } | Task::PutSumsBack { .. } => {
                self.audit(task)
            }
            Task::Apply { step, stage, rounds, gradient_norm, loss } => {
                self.apply((step, stage), &rounds, gradient_norm, loss)
            }
            Task::Restore { version, stage } => match self.restore(version, stage) {
                Err(EngineError::Checkpoint(error)) => {
                    tracing::warn!(%version, %stage, %error, "what was fetched cannot be used");
                    Ok(TaskResult::NotRestored { version, stage })
                }
                restored => restored,
            },
            Task::Leave { stage } => {
                self.resources.engine.leave(stage)?;
                self.forget_rounds(stage);
                Ok(TaskResult::Left { stage })
            }
            Task::Store { version, stage } => {
                let EngineResources { engine, parts, .. } = &self.resources;
                let state = engine.state(stage)?;
                if engine.swaps() {
                    // There is no memory for copies that wait.
                    return Ok(Some(parts.write(version, stage, &state)));
                }
                self.writer.give(version, stage, state);
                return Ok(None);
            }
        };
        result.map(Some)
    }

    fn reduce(
        &mut self,
        round: RoundId,
        piece: u32,
        range: Range<usize>,
        others: &[Tensors],
    ) -> Result<TaskResult, EngineError> {
        let others = parts_of(others);
        let (count, place) = (range.len(), range.clone());
        let (engine, reduction) = self.reduction(round)?;
        let reduce = |sums: &[u8]| reduction.reduce(range, sums, &others);
        let result = engine.read_sums(round.weights, round.step, place, reduce)??;
        let result = Tensor::flat(self.sum_codec().result(), count, result);
        let payload = self.resources.passes.payloads.keep([result]);
        Ok(TaskResult::Reduced { round, piece, payload })
    }

    fn sum_codec(&self) -> SumCodec {
        self.resources.parts.manifest.codec.all_reduce
    }

    /// A task about sums that are set aside for an audit.
    fn audit(&mut self, task: Task) -> Result<TaskResult, EngineError> {
        match task {
            Task::SetSumsAside { step, stage } => {
                self.resources.engine.set_sums_aside(stage, step)?;
                Ok(TaskResult::SumsMoved { stage })
            }
            Task::PrintSums { step, stage, rounds } => {
                let mut print = |of| self.print_sums(of, stage);
                let sums = rounds.into_iter().map(&mut print).collect::<Result<_, _>>()?;
                self.resources.engine.put_sums_back(stage, step)?;
                Ok(TaskResult::SumsPrinted { step, stage, sums })
            }
            Task::PutSumsBack { step, stage } => {
                self.resources.engine.put_sums_back(stage, step)?;
                Ok(TaskResult::SumsMoved { stage })
            }
            other => unreachable!("{other:?} is of no audit"),
        }
    }

    /// The prints of this member's sums of a round at each of its stages, in a run with audits.
    fn print_own_sums(
        &mut self,
        round: RoundId,
        result: ContentHash,
    ) -> Result<Vec<(Stage, SumsPrint)>, EngineError> {
        let manifest = &self.resources.parts.manifest;
        if !manifest.audit.is_on() {
            return Ok(Vec::new());
        }
        let stages: Vec<Stage> = manifest.stages_of(round.weights).collect();
        let hosted = stages.into_iter().filter(|stage| self.resources.engine.hosts(*stage));
        let hosted: Vec<Stage> = hosted.collect();
        let print = |stage| Ok((stage, self.print_sums((round, result), stage)?));
        hosted.into_iter().map(print).collect()
    }

    /// The print of a stage's sums of a round.
    fn print_sums(
        &mut self,
        (round, result): (RoundId, ContentHash),
        stage: Stage,
    ) -> Result<SumsPrint, EngineError> {
        let challenge = Challenge::of(round, result);
        self.resources.engine.print_sums(stage, round.weights, round.step, &challenge)
    }

    /// What a result's challenge makes of this member's sums and of the result.
    fn check_sums(
        &mut self,
        round: RoundId,
        result: ContentHash,
        owned: &[Owned],
    ) -> Result<Vec<RoundCheck>, EngineError> {
        if owned.is_empty() {
            return Ok(Vec::new());
        }
        let challenge = Challenge::of(round, result);
        let (engine, reduction) = self.reduction(round)?;
        let groups = owned.iter().map(|owned| usize::from(owned.group) + 1).max();
        let mut groups = vec![Projected::default(); groups.unwrap_or(0)];
        for Owned { range, group, by_me } in owned {
            let group = &mut groups[usize::from(*group)];
            engine.read_sums(round.weights, round.step, range.clone(), |sums| {
                reduction.project(&challenge, (range.clone(), *by_me), sums, group)
            })??;
        }
        Ok(groups.iter().map(|group| reduction.check(group)).collect())
    }

    /// Returns the engine with the sums of a round, and the state of its all-reduce, which begins
    /// empty.
    fn reduction(&mut self, round: RoundId) -> Result<(&mut Island, &mut AllReduce), EngineError> {
        let EngineResources { engine, .. } = &mut self.resources;
        let reduction = match self.rounds.entry(round.weights) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(none) => {
                none.insert(Reduction { round, state: engine.all_reduce(round.weights)? })
            }
        };
        if reduction.round != round {
            reduction.round = round;
            engine.forget_mean(round.weights)?;
            reduction.state.begin();
        }
        Ok((engine, &mut reduction.state))
    }

    fn apply(
        &mut self,
        (step, stage): (Step, Stage),
        rounds: &[RoundId],
        gradient_norm: f64,
        loss: FixedLoss,
    ) -> Result<TaskResult, EngineError> {
        self.resources.engine.need_update(stage)?;
        let means = rounds.iter().map(|round| newest(&self.rounds, *round).mean());
        let gradients: Vec<&[u8]> = means.collect();
        let update = Update { step, count: step.0 + 1, gradients: &gradients, gradient_norm, loss };
        let verdict = self.resources.engine.apply(stage, &update)?;
        for round in rounds {
            // Twice for weights that two hosted stages share, which changes nothing.
            if let Some(reduction) = self.rounds.get_mut(&round.weights) {
                match verdict.is_skipped() {
                    true => reduction.state.forgo(),
                    false => reduction.state.commit(),
                }
            }
        }
        Ok(TaskResult::Applied { step, stage, verdict })
    }

    /// Forgets the all-reduces of a stage's weights, with the errors that their codec left.
    fn forget_rounds(&mut self, stage: Stage) {
        for weights in self.resources.parts.manifest.groups_of(stage) {
            self.rounds.remove(&weights);
        }
    }

    fn restore(&mut self, version: Step, stage: Stage) -> Result<TaskResult, EngineError> {
        // Gradients kept since then do not belong to this version.
        self.forget_rounds(stage);
        self.resources.engine.host(stage)?;
        for (weights, reduction) in &self.rounds {
            self.resources.engine.take_over(*weights, &reduction.state)?;
        }
        if stage == Stage(0) && self.resources.samples.is_none() {
            // The token file was fetched with the weights.
            match self.resources.run_files.open_samples(&self.resources.waits) {
                Ok(samples) => self.resources.samples = Some(samples),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(%version, error, "the text cannot be read");
                    return Ok(TaskResult::NotRestored { version, stage });
                }
            }
        }
        let origin = match self.obtain_origin(version, stage) {
            Ok(origin) => origin,
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(%stage, error, "the files to begin with cannot be read");
                return Ok(TaskResult::NotRestored { version, stage });
            }
        };
        let engine = &mut self.resources.engine;
        if self.resources.parts.manifest.is_initial(version) {
            engine.restart(stage, &origin)?;
        } else {
            let folder = self.resources.fetched.join(version.to_string());
            engine.load(stage, &origin)?;
            let read = engine.read_stage(stage, version, &folder);
            if read.is_err() {
                // The part is fetched again.
                self.resources.parts.files.withdraw(&folder);
            }
            read?;
        }
        Ok(TaskResult::Restored { version, stage })
    }
}

impl EngineWorker {
    /// Fetches the files that a stage's weights at a version come from. Frozen weights that the stage has
    /// already stay.
    fn obtain_origin(&self, version: Step, stage: Stage) -> anyhow::Result<Origin> {
        let EngineResources { engine, run_files, waits, parts, .. } = &self.resources;
        let lacks_base = parts.manifest.lora.is_none() || engine.needs_base(stage)?;
        waits.wait(run_files.obtain_origin(stage, version, lacks_base))?
    }
}

/// The integers of other members.
fn parts_of(inputs: &[Tensors]) -> Vec<Bytes> {
    inputs.iter().map(|tensors| tensors[0].bytes.clone()).collect()
}

/// Returns the state of a weight group's newest all-reduce.
///
/// # Panics
/// When the scheduler asks for another round than the newest.
fn newest(rounds: &BTreeMap<WeightGroup, Reduction>, round: RoundId) -> &AllReduce {
    let reduction = rounds.get(&round.weights).filter(|kept| kept.round == round);
    &reduction.expect("the newest round is asked for").state
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A life may end while its engine waits for a file that nobody has.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_closed_thread_gives_up_what_it_waits_for() {
        let (begun, waiting) = tokio::sync::oneshot::channel();
        let thread = EngineThread::start(|waits| {
            begun.send(()).expect("the test listens");
            waits.wait(std::future::pending::<()>())?;
            unreachable!("what it waits for never comes");
        });
        let thread = thread.expect("a thread");
        waiting.await.expect("the thread begins");
        thread.close().await;
    }
}
