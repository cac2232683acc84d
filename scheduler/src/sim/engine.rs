//! A peer's engine, with integers for tensors: each device runs one task at a time, in the order given.

mod audit;
mod lanes;
mod rounds;
mod swapping;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{ClaimKey, Exchange, Stage, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{FixedLoss, RoundId, StoredFile};
use shoal_protocol::units::{Bytes, Moment};

use self::lanes::Lanes;
use self::rounds::RoundResult;
use super::corruption::{ComputeError, SumLie, lies_about};
use super::integer_model::{self, Weights, Worker};
use super::omitted_rules::Omit;
use super::payloads::{Content, Payloads};
use super::peer_scenario::ComputeScenario;
use super::scenario::Scenario;
use super::tiers::Tiers;
use crate::action::{DeviceIndex, PayloadId, Task, TaskResult};
use crate::rng::Rng;

/// A peer's engine.
#[derive(Debug)]
pub(super) struct Engine {
    manifest: Arc<Manifest>,
    compute: ComputeScenario,
    rng: Rng,
    sizes: Sizes,
    stages: BTreeMap<Stage, StageState>,
    /// Where the stages are, if they are swapped.
    pub(super) tiers: Option<Tiers>,
    /// The result of each weight group's newest round, so far.
    results: BTreeMap<WeightGroup, RoundResult>,
    /// Files on the disk: weights that were written or fetched.
    pub(super) disk: BTreeMap<(Step, Stage), Weights>,
    lanes: Lanes,
    /// The number of devices, if they divide the stages.
    divided: Option<usize>,
    /// Until when every task takes this many times as long.
    pub(super) slow: (Moment, u32),
    /// Until when all disk accesses fail.
    pub(super) disk_fails_until: Moment,
    /// Total time of passes.
    pub(super) busy: Duration,
    /// What it lies about sums, as an injected error.
    pub(super) sum_lie: Option<SumLie>,
    /// What it computes wrongly in one of so many passes, as an injected error.
    pub(super) errs: Option<(ComputeError, u64)>,
    /// Whether some peer computes wrongly: a piece that comes again after its death may have other sums.
    pub(super) others_err: bool,
}

/// Sizes of tensors.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    activation: Bytes,
    gradient: Bytes,
    snapshot: Bytes,
    sums: SumCodec,
}

/// One stage's weights and accumulators.
#[derive(Debug)]
struct StageState {
    version: Step,
    weights: Weights,
    /// The accumulator of each step.
    sums: BTreeMap<Step, Vec<i64>>,
    /// That of the step whose work of others is computed again.
    aside: Option<(Step, Vec<i64>)>,
    /// Inputs of microbatches between forward and backward.
    graphs: BTreeMap<(ClaimKey, Exchange), u64>,
    /// Virtual workers that are being trained here with other stages.
    workers: BTreeMap<ClaimKey, Worker>,
    /// Weight gradients that wait for `Accumulate` or `Discard`.
    waiting: BTreeMap<ClaimKey, Vec<i64>>,
    /// The elements of each weight group, one after the other.
    groups: BTreeMap<WeightGroup, Range<usize>>,
}

/// An effect of a task that an oracle checks.
#[derive(Debug)]
pub(super) enum Observed {
    Nothing,
    Accumulated(ClaimKey),
    Restored(Stage),
    Applied {
        step: Step,
        stage: Stage,
        sums: Vec<i64>,
        weights: Weights,
    },
    /// A copy was made and is being written to the disk.
    Copied {
        version: Step,
        stage: Stage,
        weights: Weights,
    },
}

impl Engine {
    pub(super) fn new(scenario: &Scenario, index: usize) -> Self {
        let manifest = &scenario.manifest;
        let state = |stage: Stage| {
            let mut start = 0;
            let range = |weights| {
                let range = start..start + scenario.parameters[&weights];
                start = range.end;
                (weights, range)
            };
            let state = StageState {
                version: manifest.first_version(),
                weights: Weights::initial(manifest, stage),
                sums: BTreeMap::new(),
                aside: None,
                graphs: BTreeMap::new(),
                workers: BTreeMap::new(),
                waiting: BTreeMap::new(),
                groups: manifest.groups_of(stage).map(range).collect(),
            };
            (stage, state)
        };
        let stages: BTreeMap<Stage, StageState> = manifest.stages().map(state).collect();
        let empty =
            |(weights, elements): (&WeightGroup, &usize)| (*weights, RoundResult::new(*elements));
        Self {
            manifest: Arc::clone(manifest),
            compute: scenario.peers[index].compute.clone(),
            rng: Rng::new(scenario.seed ^ (index as u64 + 1) << 32),
            sizes: Sizes {
                activation: manifest.activation_bytes(),
                gradient: manifest.gradient_bytes(),
                snapshot: scenario.snapshot.size,
                sums: manifest.codec.all_reduce,
            },
            tiers: swapping::tiers(scenario, index, &stages),
            stages,
            results: scenario.parameters.iter().map(empty).collect(),
            disk: BTreeMap::new(),
            lanes: Lanes::default(),
            divided: scenario.peers[index]
                .divides_stages
                .then(|| scenario.peers[index].devices.get().into()),
            slow: (Moment::default(), 1),
            disk_fails_until: Moment::default(),
            busy: Duration::ZERO,
            sum_lie: None,
            errs: None,
            others_err: false,
        }
    }

    /// Queues a task.
    pub(super) fn give(&mut self, task: Task) {
        if let (
            Some(devices),
            Task::Forward { key, device, .. }
            | Task::Backward { key, device, .. }
            | Task::Accumulate { key, device }
            | Task::Discard { key, device },
        ) = (self.divided, &task)
        {
            assert_eq!(
                device.index(),
                key.stage.device_in_turn(devices),
                "a device has its stages"
            );
        }
        self.lanes.push(task);
    }

    /// Begins a task that can begin. Returns its device and its end.
    pub(super) fn begin(&mut self, now: Moment, omit: Omit) -> Option<(DeviceIndex, Moment)> {
        let task = self.lanes.take_able()?;
        let waits = self.bring(now, &task, omit).since(now);
        let time = match &task {
            Task::Forward { .. } => self.compute.forward,
            Task::Backward { key, .. } => self.compute.backward - self.left_to_addition(*key),
            Task::Accumulate { key, .. } => self.compute.other + self.left_to_addition(*key),
            _ => self.compute.other,
        };
        let longer = self.rng.within(0..=self.compute.jitter_per_mille) as u32;
        let factor = if now < self.slow.0 { self.slow.1 } else { 1 };
        let time = (time + time * longer / 1000) * factor;
        if self.computes(&task).is_some() {
            self.busy += time;
        }
        let measured = if omit == Omit::LoadTimes { time } else { waits + time };
        Some((self.lanes.begin(task, measured), now + waits + time))
    }

    /// The part of a backward pass that comes with the addition of its weight gradients.
    fn left_to_addition(&self, key: ClaimKey) -> Duration {
        let is_once = self.manifest.exchanges_of(key.microbatch) == 1;
        let splits = self.compute.splits && is_once && self.tiers.is_none();
        if splits && key.stage > Stage(0) { self.compute.backward / 2 } else { Duration::ZERO }
    }

    /// The work item of which a task computes something.
    pub(super) fn computes(&self, task: &Task) -> Option<ClaimKey> {
        match task {
            Task::Forward { key, .. } | Task::Backward { key, .. } => Some(*key),
            Task::Accumulate { key, .. } => {
                Some(*key).filter(|key| self.left_to_addition(*key) > Duration::ZERO)
            }
            _ => None,
        }
    }

    /// The task that a device runs.
    pub(super) fn running(&self, device: DeviceIndex) -> Option<&Task> {
        self.lanes.running(device)
    }

    /// Drops the weight gradient that a device's task is about to add.
    pub(super) fn forget_gradient(&mut self, device: DeviceIndex) {
        if let Some(Task::Accumulate { key, .. }) = self.lanes.running(device).cloned() {
            let part = self.stage(key.stage).waiting.get_mut(&key);
            part.into_iter().flatten().for_each(|value| *value = 0);
        }
    }

    /// Lets the virtual worker of a device's task go on from the weights that it has, whatever it is to join.
    pub(super) fn forget_meeting(&mut self, device: DeviceIndex) {
        if let Some(Task::Forward { key, .. }) = self.lanes.running(device).cloned() {
            let worker = self.stage(key.stage).workers.get_mut(&key);
            worker.into_iter().for_each(|worker| worker.stays = true);
        }
    }

    /// Removes the files of older versions, except those that are about to be read.
    pub(super) fn forget_before(&mut self, oldest: Step) {
        let reads = |task: &Task| match task {
            Task::Restore { version, stage } => Some((*version, *stage)),
            _ => None,
        };
        let read: BTreeSet<(Step, Stage)> = self.lanes.tasks().filter_map(reads).collect();
        self.disk.retain(|part, _| part.0 >= oldest || read.contains(part));
    }

    /// Whether no task runs or waits, and nothing is kept for microbatches.
    pub(super) fn is_empty(&self) -> bool {
        let clean = |state: &StageState| state.is_idle();
        self.lanes.tasks().next().is_none() && self.stages.values().all(clean)
    }

    /// Executes the task that a device runs. A task that continues in the background has no result yet.
    pub(super) fn finish(
        &mut self,
        device: DeviceIndex,
        payloads: &mut Payloads,
    ) -> Result<(Option<TaskResult>, Duration, Observed), String> {
        let ended = self.lanes.end(device);
        let (task, busy) = ended.ok_or("the engine ended a task that did not run")?;
        self.note_reads(&task);
        let (result, observed) = self.execute(task.clone(), payloads)?;
        self.note_changes(&task);
        Ok((result, busy, observed))
    }

    fn execute(
        &mut self,
        task: Task,
        payloads: &mut Payloads,
    ) -> Result<(Option<TaskResult>, Observed), String> {
        let mut observed = Observed::Nothing;
        let result = match task {
            Task::Forward { key, exchange, activation, held_out, .. } => {
                self.forward((key, exchange), activation, held_out, payloads)?
            }
            Task::Backward { key, exchange, gradient, .. } => {
                self.backward((key, exchange), gradient, payloads)?
            }
            Task::Accumulate { key, .. } => {
                let skips = self.manifest.skips_not_finite();
                let state = self.stage(key.stage);
                let part = state.waiting.remove(&key).ok_or("there is no gradient to add")?;
                let broken = skips && integer_model::is_broken(&part);
                if !broken {
                    integer_model::add(state.sums(key.step), 0..part.len(), &part);
                }
                // What is computed again for an audit counts nowhere.
                let audits = state.aside.as_ref().is_some_and(|(step, _)| *step == key.step);
                if !audits {
                    observed = Observed::Accumulated(key);
                }
                TaskResult::Accumulated { key, broken }
            }
            Task::Discard { key, .. } => {
                let state = self.stage(key.stage);
                state.graphs.retain(|(of, _), _| *of != key);
                state.workers.remove(&key);
                state.waiting.remove(&key);
                TaskResult::Discarded { key }
            }
            Task::Apply { step, stage, rounds, gradient_norm, loss } => {
                observed = self.apply((step, stage), &rounds, gradient_norm, loss)?;
                TaskResult::Applied { step, stage, verdict: integer_model::verdict(loss) }
            }
            Task::FetchAhead { .. } => return Ok((None, observed)),
            Task::Store { version, stage } => {
                let copied = self.copy(version, stage)?;
                return Ok((None, copied));
            }
            Task::Restore { version, stage } => {
                observed = Observed::Restored(stage);
                self.restore(version, stage)?
            }
            Task::Leave { stage } => {
                let state = self.stage(stage);
                if !state.is_idle() {
                    return Err(format!("stage {stage} still has work"));
                }
                state.sums.clear();
                observed = Observed::Restored(stage);
                TaskResult::Left { stage }
            }
            Task::SetSumsAside { .. } | Task::PrintSums { .. } | Task::PutSumsBack { .. } => {
                self.audit(task)?
            }
            task => self.round_task(task, payloads)?,
        };
        Ok((Some(result), observed))
    }

    fn stage(&mut self, stage: Stage) -> &mut StageState {
        self.stages.get_mut(&stage).expect("the run has the stage")
    }

    /// What the next pass gets wrong. Colluding peers get the same wrong.
    fn error(&mut self, key: ClaimKey) -> Option<ComputeError> {
        let (error, every) = self.errs?;
        let errs = match error {
            ComputeError::Alike => lies_about(key, every),
            _ => self.rng.within(0..=every - 1) == 0,
        };
        errs.then_some(error)
    }

    /// The weights that an exchange of this work item reads.
    fn weights(&self, key: ClaimKey, exchange: Exchange) -> Result<u64, String> {
        let state = &self.stages[&key.stage];
        let reads = (key.step, exchange);
        let weights = state.weights.read_by(reads, state.version, &self.manifest);
        weights.ok_or_else(|| format!("{key} ran on version {}", state.version))
    }

    fn forward(
        &mut self,
        (key, exchange): (ClaimKey, Exchange),
        activation: Option<PayloadId>,
        held_out: bool,
        payloads: &mut Payloads,
    ) -> Result<TaskResult, String> {
        let input = match activation {
            Some(id) => word(payloads, id)?,
            None => integer_model::samples(self.manifest.training.seed, key, exchange),
        };
        let is_last = key.stage == self.manifest.last_stage();
        let size = self.sizes.activation;
        let at_once = self.manifest.exchanges_at_once();
        let count = self.manifest.exchanges_of(key.microbatch);
        let errs = self.error(key);
        let mut weights = self.weights(key, exchange)?;
        let joined = self.manifest.joins_at(exchange).then_some(weights);
        let state = self.stage(key.stage);
        if count > 1 {
            let elements = state.elements();
            let worker = state.workers.entry(key).or_insert_with(|| Worker::new(weights, elements));
            weights = worker.forward(exchange, at_once, joined)?;
        }
        if !held_out && state.graphs.insert((key, exchange), input).is_some() {
            return Err(format!("{key} ran forward twice"));
        }
        let word = integer_model::forward(weights, input);
        let word = word ^ u64::from(errs == Some(ComputeError::Output));
        let loss = match state.workers.get_mut(&key) {
            Some(worker) => {
                worker.loss = [worker.loss, integer_model::loss(word)].into_iter().sum();
                worker.loss
            }
            None => integer_model::loss(word ^ u64::from(errs == Some(ComputeError::Labels))),
        };
        let loss = (is_last && exchange.0 + 1 == count).then_some(loss);
        let output = (!is_last).then(|| payloads.keep(Content::Word(word), size));
        Ok(TaskResult::Forwarded { key, output, loss })
    }

    fn backward(
        &mut self,
        (key, exchange): (ClaimKey, Exchange),
        gradient: Option<PayloadId>,
        payloads: &mut Payloads,
    ) -> Result<TaskResult, String> {
        let size = self.sizes.gradient;
        let count = self.manifest.exchanges_of(key.microbatch);
        let errs = self.error(key);
        let mut weights = self.weights(key, exchange)?;
        let state = self.stage(key.stage);
        let input = state.graphs.remove(&(key, exchange));
        let input = input.ok_or("a backward pass without its forward pass")?;
        if let Some(worker) = state.workers.get(&key) {
            weights = worker.weights;
        }
        let gradient = match gradient {
            Some(id) => word(payloads, id)?,
            None => {
                let labels = u64::from(errs == Some(ComputeError::Labels));
                integer_model::loss_gradient(integer_model::forward(weights, input) ^ labels)
            }
        };
        let elements = state.elements();
        let mut part = integer_model::weight_gradient(weights, input, gradient, elements);
        match errs {
            Some(ComputeError::Gradient | ComputeError::Alike) => part[0] += 1,
            Some(ComputeError::Nothing) => part.fill(0),
            Some(ComputeError::Stale) => {
                part = integer_model::weight_gradient(weights ^ 1, input, gradient, elements);
            }
            Some(ComputeError::Bit(bit)) => {
                let element = (input % part.len() as u64) as usize;
                part[element] ^= 1 << bit;
            }
            Some(ComputeError::Output | ComputeError::Returned | ComputeError::Labels) | None => {}
        }
        if let Some(worker) = state.workers.get_mut(&key) {
            worker.backward(exchange, &part)?;
            part.clone_from(&worker.sums);
        }
        if exchange.0 + 1 == count {
            state.workers.remove(&key);
            state.waiting.insert(key, part);
        }
        let returned = integer_model::backward(weights, input, gradient);
        let returned = returned ^ u64::from(errs == Some(ComputeError::Returned));
        let upstream = key.stage > Stage(0);
        let gradient = upstream.then(|| payloads.keep(Content::Word(returned), size));
        let leaves = self.left_to_addition(key) > Duration::ZERO;
        Ok(TaskResult::Returned { key, gradient, leaves })
    }

    fn apply(
        &mut self,
        (step, stage): (Step, Stage),
        rounds: &[RoundId],
        gradient_norm: f64,
        loss: FixedLoss,
    ) -> Result<Observed, String> {
        if !self.manifest.groups_of(stage).eq(rounds.iter().map(|round| round.weights)) {
            return Err(format!("stage {stage} is updated by the results of {rounds:?}"));
        }
        let mut sums = Vec::new();
        for round in rounds {
            sums.extend(self.result(*round).whole(*round)?);
        }
        let state = self.stage(stage);
        state.sums.retain(|of, _| *of > step);
        let waits = state.waiting.keys().any(|key| key.step <= step);
        if state.version != step || waits {
            return Err(format!("step {step} is applied to version {}", state.version));
        }
        state.weights = state.weights.updated(&sums, gradient_norm, loss);
        state.version = step.next();
        let weights = state.weights;
        Ok(Observed::Applied { step, stage, sums, weights })
    }

    fn copy(&mut self, version: Step, stage: Stage) -> Result<Observed, String> {
        let state = self.stage(stage);
        if state.version != version {
            return Err(format!("version {version} is saved at version {}", state.version));
        }
        Ok(Observed::Copied { version, stage, weights: state.weights })
    }

    /// The result of writing a copy, successfully or not.
    pub(super) fn stored(
        &self,
        version: Step,
        stage: Stage,
        weights: Weights,
        whole: bool,
    ) -> TaskResult {
        if !whole {
            return TaskResult::NotStored { version, stage };
        }
        let hash = integer_model::file_hash(version, stage, weights);
        let size = self.sizes.snapshot;
        let files = vec![StoredFile { name: format!("stage-{stage}"), hash, size }];
        TaskResult::Stored { version, stage, files }
    }
}

impl Engine {
    fn restore(&mut self, version: Step, stage: Stage) -> Result<TaskResult, String> {
        let weights = match self.manifest.is_initial(version) {
            true => Weights::initial(&self.manifest, stage),
            false => *self
                .disk
                .get(&(version, stage))
                .ok_or("a version that was not fetched is restored")?,
        };
        let state = self.stage(stage);
        state.weights = weights;
        state.version = version;
        state.graphs.clear();
        state.waiting.clear();
        state.sums.clear();
        state.aside = None;
        Ok(TaskResult::Restored { version, stage })
    }
}

impl StageState {
    /// The accumulator of a step.
    fn sums(&mut self, step: Step) -> &mut [i64] {
        let elements = self.elements();
        self.sums.entry(step).or_insert_with(|| vec![0; elements])
    }

    /// Whether nothing is kept for microbatches.
    fn is_idle(&self) -> bool {
        self.graphs.is_empty() && self.workers.is_empty() && self.waiting.is_empty()
    }

    fn elements(&self) -> usize {
        self.groups.values().map(Range::len).sum()
    }
}

/// Whether the task is a forward or backward pass.
pub(super) fn is_pass(task: &Task) -> bool {
    matches!(task, Task::Forward { .. } | Task::Backward { .. })
}

fn word(payloads: &Payloads, id: PayloadId) -> Result<u64, String> {
    match payloads.get(id)? {
        (Content::Word(word), _) => Ok(*word),
        (Content::Sums(_), _) => Err(format!("{id:?} is no activation")),
    }
}
