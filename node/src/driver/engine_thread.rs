//! The one thread that computes.
//!
//! libtorch wants its calls from one thread, and a pass takes long: tasks go in over a bounded
//! channel, are carried out in order, and their results come back over another.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use shoal_engine::{AllReduce, Engine, EngineError, ForwardOutput, Samples};
use shoal_protocol::codec::{Codec, SumCodec};
use shoal_protocol::frame::Element;
use shoal_protocol::ids::{ClaimKey, Stage, Step};
use shoal_protocol::message::{FixedLoss, RoundId};
use shoal_scheduler::action::{Payload, Task, TaskResult};
use tokio::sync::mpsc;

use super::checkpoint_writer::{CheckpointWriter, Shelf};
use super::payload::{Held, Payloads, Tensor, Tensors};
use super::text::Text;

/// Tasks given and not yet begun. The scheduler gives one pass at a time and a handful of short
/// tasks with it; a round has one task for each piece.
const QUEUE: usize = 1 << 16;

/// What a peer that cannot read its output log says: others do its work again.
pub(crate) const LOG_LOST: &str = "the output log cannot be read back from the disk";

/// A task with the tensors that it reads.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) task: Task,
    pub(crate) inputs: Vec<Held>,
}

/// How a job ended, and how long it took.
#[derive(Debug)]
pub(crate) struct JobDone {
    pub(crate) result: anyhow::Result<TaskResult>,
    pub(crate) busy: Duration,
}

/// What the thread works with.
#[derive(Debug)]
pub(crate) struct Workshop {
    /// The hosted stages.
    pub(crate) engine: Engine,
    /// The text, once the first stage is hosted, which is the only one that needs it.
    pub(crate) samples: Option<Samples>,
    /// Where the text is.
    pub(crate) text: Text,
    /// Where outputs are kept.
    pub(crate) payloads: Payloads,
    /// Where parts of checkpoints are written.
    pub(crate) shelf: Shelf,
    /// Where they are fetched to.
    pub(crate) fetched: PathBuf,
    /// Waited in each pass, to model a slow peer.
    pub(crate) slow_down: Duration,
}

impl Workshop {
    /// `[samples, tokens]`.
    fn token_shape(&self) -> Vec<u32> {
        vec![self.shelf.manifest.training.microbatch_size, self.shelf.manifest.model.context]
    }

    /// What crosses a stage boundary.
    fn boundary_tensor(&self, codec: Codec, bytes: Bytes) -> Tensor {
        let shape = self.shelf.manifest.boundary_shape().to_vec();
        Tensor { element: codec.into(), shape, bytes }
    }
}

/// The thread's two ends.
#[derive(Debug)]
pub(crate) struct EngineThread {
    jobs: mpsc::Sender<Job>,
    done: mpsc::Receiver<JobDone>,
}

impl EngineThread {
    /// Makes the engine on a new thread, which ends when this handle is dropped.
    pub(crate) fn start(
        make: impl FnOnce() -> anyhow::Result<Workshop> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, mut queue) = mpsc::channel::<Job>(QUEUE);
        let (results, done) = mpsc::channel(QUEUE);
        std::thread::Builder::new().name("engine".into()).spawn(move || {
            let mut bench = match make().and_then(|workshop| Bench::new(workshop, &results)) {
                Ok(bench) => bench,
                Err(error) => {
                    let failed = JobDone { result: Err(error), busy: Duration::ZERO };
                    // Nobody listens any more when the process is about to end.
                    let _ = results.blocking_send(failed);
                    return;
                }
            };
            while let Some(job) = queue.blocking_recv() {
                let start = Instant::now();
                let Some(result) = bench.carry_out(job).transpose() else { continue };
                if results.blocking_send(JobDone { result, busy: start.elapsed() }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs, done })
    }

    /// Queues a job.
    ///
    /// # Panics
    /// When the scheduler gives more tasks than it ever may, or the thread is gone, which ends only
    /// after this handle.
    pub(crate) fn give(&self, job: Job) {
        self.jobs.try_send(job).expect("the engine's thread takes every task");
    }

    /// The next result; `None` after the thread failed to start or panicked.
    pub(crate) async fn done(&mut self) -> Option<JobDone> {
        self.done.recv().await
    }
}

/// One stage's rounds, one after the other.
#[derive(Debug)]
struct Reduction {
    round: RoundId,
    stage: AllReduce,
}

struct Bench {
    workshop: Workshop,
    rounds: BTreeMap<Stage, Reduction>,
    writer: CheckpointWriter,
}

impl Bench {
    fn new(workshop: Workshop, results: &mpsc::Sender<JobDone>) -> anyhow::Result<Self> {
        // A copy of every hosted stage may wait, and of one that it moves to, so that none of one
        // version waits for another's.
        let waiting = workshop.engine.hosted() + 1;
        let writer = CheckpointWriter::start(workshop.shelf.clone(), results.clone(), waiting)
            .context("no thread for checkpoints")?;
        Ok(Self { workshop, rounds: BTreeMap::new(), writer })
    }

    /// Does a task. There is no result yet of one that goes on in the background.
    fn carry_out(&mut self, Job { task, inputs }: Job) -> anyhow::Result<Option<TaskResult>> {
        let inputs: io::Result<Vec<Tensors>> = inputs.iter().map(Held::load).collect();
        Ok(self.compute(task, &inputs.context(LOG_LOST)?)?)
    }

    fn compute(
        &mut self,
        task: Task,
        inputs: &[Tensors],
    ) -> Result<Option<TaskResult>, EngineError> {
        let result = match task {
            Task::Forward { key, .. } => self.forward(key, inputs.first()),
            Task::Backward { key, .. } => self.backward(key, inputs.first()),
            Task::Accumulate { key } => match self.workshop.engine.accumulate(key) {
                Ok(()) => Ok(TaskResult::Accumulated { key }),
                Err(error @ EngineError::BadGradient { .. }) => {
                    Ok(TaskResult::Diverged { key, reason: error.to_string() })
                }
                Err(error) => Err(error),
            },
            Task::Discard { key } => {
                self.workshop.engine.discard(key);
                Ok(TaskResult::Discarded { key })
            }
            Task::Export { round, to, piece, range } => {
                let count = range.len();
                let (engine, reduction) = self.reduction(round)?;
                let place = range.clone();
                let part = engine.read_sums(round.stage, round.step, place, |sums| {
                    reduction.part(range, sums)
                })??;
                let part = Tensor::flat(self.sum_codec().part(), count, part);
                let payload = self.workshop.payloads.keep([part]);
                Ok(TaskResult::Exported { round, to, piece, payload })
            }
            Task::Reduce { round, piece, range, .. } => self.reduce(round, piece, range, inputs),
            Task::Install { round, range, .. } => {
                self.reduction(round)?.1.install(range.clone(), &inputs[0][0].bytes)?;
                Ok(TaskResult::Installed { round, range })
            }
            Task::Summarise { round } => {
                let (hash, square_norm) = newest(&mut self.rounds, round).outcome();
                Ok(TaskResult::Summarised { round, hash, square_norm })
            }
            Task::Apply { round, gradient_norm } => self.apply(round, gradient_norm),
            Task::Restore { version, stage } => match self.restore(version, stage) {
                Err(EngineError::Checkpoint(error)) => {
                    tracing::warn!(%version, %stage, %error, "what was fetched cannot be used");
                    Ok(TaskResult::NotRestored { version, stage })
                }
                restored => restored,
            },
            Task::Leave { stage } => {
                self.rounds.remove(&stage);
                self.workshop.engine.leave(stage);
                Ok(TaskResult::Left { stage })
            }
            Task::Store { version, stage } => {
                let state = self.workshop.engine.state(stage)?;
                self.writer.give(version, stage, state);
                return Ok(None);
            }
        };
        result.map(Some)
    }

    fn forward(
        &mut self,
        key: ClaimKey,
        activation: Option<&Tensors>,
    ) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.workshop.slow_down);
        let (input, labels) = match activation {
            Some(tensors) => (tensors[0].clone(), tensors.get(1).cloned()),
            None => {
                let samples = self.workshop.samples.as_ref().expect("the first stage has the text");
                let batch = samples.batch(key.step, key.microbatch);
                let shape = self.workshop.token_shape();
                let tokens =
                    |bytes: Bytes| Tensor { element: Element::U32, shape: shape.clone(), bytes };
                (tokens(batch.inputs), Some(tokens(batch.labels)))
            }
        };
        let engine = &mut self.workshop.engine;
        let label_bytes = labels.as_ref().map(|labels| &labels.bytes);
        match engine.forward(key, &input.bytes, label_bytes)? {
            // Its backward pass may be given already, and finds what it needs.
            ForwardOutput::Loss(loss) if !loss.is_finite() => {
                Ok(TaskResult::Diverged { key, reason: format!("its loss is {loss}") })
            }
            ForwardOutput::Loss(loss) => Ok(TaskResult::Forwarded {
                key,
                output: None,
                loss: Some(FixedLoss::from_nats(loss.into())),
            }),
            ForwardOutput::Activation(bytes) => {
                let codec = self.workshop.shelf.manifest.codec.activations;
                let mut tensors = vec![self.workshop.boundary_tensor(codec, bytes)];
                tensors.extend(labels);
                let output = self.workshop.payloads.log(tensors);
                Ok(TaskResult::Forwarded { key, output: Some(output), loss: None })
            }
        }
    }

    fn backward(
        &mut self,
        key: ClaimKey,
        gradient: Option<&Tensors>,
    ) -> Result<TaskResult, EngineError> {
        std::thread::sleep(self.workshop.slow_down);
        let engine = &mut self.workshop.engine;
        let input_gradient = engine.backward(key, gradient.map(|tensors| &tensors[0].bytes))?;
        let codec = self.workshop.shelf.manifest.codec.activation_gradients;
        let keep = |bytes| -> Payload {
            self.workshop.payloads.log([self.workshop.boundary_tensor(codec, bytes)])
        };
        let gradient = input_gradient.map(keep);
        Ok(TaskResult::Returned { key, gradient })
    }

    fn reduce(
        &mut self,
        round: RoundId,
        piece: u32,
        range: Range<usize>,
        others: &[Tensors],
    ) -> Result<TaskResult, EngineError> {
        let others: Vec<Bytes> = others.iter().map(|tensors| tensors[0].bytes.clone()).collect();
        let (count, place) = (range.len(), range.clone());
        let (engine, reduction) = self.reduction(round)?;
        let reduce = |sums: &[u8]| reduction.reduce(range, sums, &others);
        let result = engine.read_sums(round.stage, round.step, place, reduce)??;
        let result = Tensor::flat(self.sum_codec().result(), count, result);
        let payload = self.workshop.payloads.keep([result]);
        Ok(TaskResult::Reduced { round, piece, payload })
    }

    fn sum_codec(&self) -> SumCodec {
        self.workshop.shelf.manifest.codec.all_reduce
    }

    /// What has come together of a round; nothing, where it is new. And who has the sums for it.
    fn reduction(&mut self, round: RoundId) -> Result<(&Engine, &mut AllReduce), EngineError> {
        let manifest = &self.workshop.shelf.manifest;
        let reduction = match self.rounds.entry(round.stage) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(none) => {
                let elements = self.workshop.engine.parameters(round.stage)?;
                none.insert(Reduction { round, stage: AllReduce::new(manifest, elements) })
            }
        };
        if reduction.round != round {
            reduction.round = round;
            reduction.stage.begin();
        }
        Ok((&self.workshop.engine, &mut reduction.stage))
    }

    fn apply(&mut self, round: RoundId, gradient_norm: f64) -> Result<TaskResult, EngineError> {
        let reduction = newest(&mut self.rounds, round);
        self.workshop.engine.apply(round.stage, round.step, reduction.mean(), gradient_norm)?;
        reduction.commit();
        Ok(TaskResult::Applied { round })
    }

    fn restore(&mut self, version: Step, stage: Stage) -> Result<TaskResult, EngineError> {
        // What was kept of gradients since is none of this version's.
        self.rounds.remove(&stage);
        self.workshop.engine.host(stage)?;
        if stage == Stage(0) && self.workshop.samples.is_none() {
            // It was fetched with the weights.
            match self.workshop.text.open() {
                Ok(samples) => self.workshop.samples = Some(samples),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(%version, error, "the text cannot be read");
                    return Ok(TaskResult::NotRestored { version, stage });
                }
            }
        }
        if version == Step(0) {
            self.workshop.engine.restart(stage)?;
        } else {
            let folder = self.workshop.fetched.join(version.to_string());
            let read = self.workshop.engine.read_stage(stage, version, &folder);
            if read.is_err() {
                // It is fetched anew.
                self.workshop.shelf.files.withdraw(&folder);
            }
            read?;
        }
        Ok(TaskResult::Restored { version, stage })
    }
}

/// What has come together of a round.
///
/// # Panics
/// When the scheduler asks for another round than its stage's newest.
fn newest(rounds: &mut BTreeMap<Stage, Reduction>, round: RoundId) -> &mut AllReduce {
    let reduction = rounds.get_mut(&round.stage).filter(|kept| kept.round == round);
    &mut reduction.expect("the newest round is asked for").stage
}
