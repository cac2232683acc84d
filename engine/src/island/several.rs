//! An island of several devices.
//!
//! Before a round, the integers of all accumulators are moved into one vector in the machine's memory, which
//! other members read; that is exact, so it does not matter which device ran a pass. Each device updates a share
//! of the weights, for which alone it has what the optimizer keeps (ZeRO-1, arXiv 1910.02054), and copies the
//! others' shares.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use shoal_protocol::ids::{ClaimKey, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;

use super::share::Share;
use super::worker::{Lent, Worker, Work};
use crate::accumulator::add_words;
use crate::checkpoint::{self, StageState};
use crate::device::DeviceChoice;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::optimizer::Update;
use crate::origin::Origin;
use crate::parameters::{parameter_count, range_in_stage};

/// An accumulator: its stage, and which one of that stage.
type SumsKey = (Stage, usize);

/// Several devices with replicas of the same stages.
#[derive(Debug)]
pub(super) struct Several {
    manifest: Manifest,
    workers: Vec<Worker>,
    /// The sums of all devices, as far as they were moved here.
    sums: BTreeMap<SumsKey, Vec<i64>>,
    /// The accumulators with sums that were not moved.
    counted: BTreeSet<(usize, SumsKey)>,
    hosted: BTreeSet<Stage>,
}

impl Several {
    /// Starts a thread for each device.
    pub(super) fn new(
        manifest: &Manifest,
        span: StageSpan,
        devices: &[DeviceChoice],
        threads: usize,
    ) -> Result<Self> {
        let start = |(device, share): (&DeviceChoice, Share)| {
            let manifest = manifest.clone();
            let make = move |device| Engine::sharing(&manifest, span, device, share);
            Worker::start(*device, threads, make)
        };
        let shares = Share::all(devices.len());
        Ok(Self {
            manifest: manifest.clone(),
            workers: devices.iter().zip(shares).map(start).collect::<Result<_>>()?,
            sums: BTreeMap::new(),
            counted: BTreeSet::new(),
            hosted: span.stages().collect(),
        })
    }

    pub(super) fn hosted(&self) -> usize {
        self.hosted.len()
    }

    /// Queues work on a device's engine. `counts` is the microbatch whose gradient it may add to the device's
    /// accumulator.
    pub(super) fn run(&mut self, device: usize, counts: Option<ClaimKey>, work: Work) -> Result<()> {
        if let Some(key) = counts {
            self.counted.insert((device, (key.stage, self.turn(key.step))));
        }
        self.workers[device].run(work)
    }

    /// Passes the sums of a step over all devices to a function; see [`Engine::read_sums`].
    pub(super) fn read_sums<T>(
        &mut self,
        weights: WeightGroup,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let stages: Vec<Stage> = self.manifest.stages_of(weights).collect();
        let hosted: Vec<Stage> =
            stages.iter().copied().filter(|stage| self.hosted.contains(stage)).collect();
        let turn = self.turn(step);
        for stage in &hosted {
            self.collect((*stage, turn))?;
        }
        let part = |stage: &Stage| -> Result<&[u8]> {
            let group = range_in_stage(&self.manifest, *stage, weights);
            let (expected, found) = (group.len(), range.end);
            if found > expected {
                let what = "a range of sums";
                return Err(EngineError::WrongLength { what, expected, found });
            }
            let place = group.start + range.start..group.start + range.end;
            Ok(bytemuck::cast_slice(&self.sums[&(*stage, turn)][place]))
        };
        match &hosted[..] {
            [] => Err(EngineError::NotHosted(stages[0])),
            [only] => Ok(read(part(only)?)),
            several => {
                let mut all = vec![0i64; range.len()];
                for stage in several {
                    add_words(&mut all, part(stage)?);
                }
                Ok(read(bytemuck::cast_slice(&all)))
            }
        }
    }

    /// Moves what the devices have in their accumulators into this machine's memory.
    fn collect(&mut self, (stage, turn): SumsKey) -> Result<()> {
        let elements = parameter_count(&self.manifest, stage);
        let sums = self.sums.entry((stage, turn)).or_insert_with(|| vec![0; elements]);
        for (device, worker) in self.workers.iter().enumerate() {
            let place = (device, (stage, turn));
            if self.counted.contains(&place) {
                worker.ask()?;
                worker.receive()?.stage_mut(stage)?.move_sums(turn, sums)?;
                self.counted.remove(&place);
            }
        }
        Ok(())
    }

    /// Updates a stage; see [`Engine::apply`].
    pub(super) fn apply(&mut self, stage: Stage, update: &Update<'_>) -> Result<()> {
        let mut engines = self.all()?;
        update_each(&mut engines, stage, update)?;
        for owner in 0..engines.len() {
            let (before, rest) = engines.split_at_mut(owner);
            let (owner, after) = rest.split_first_mut().expect("the owner is one of them");
            let updated = owner.stage(stage)?;
            for engine in before.iter_mut().chain(after) {
                engine.stage_mut(stage)?.copy_from(updated)?;
            }
        }
        let turn = self.turn(update.step);
        for engine in &mut engines {
            engine.stage_mut(stage)?.end_update(update.step)?;
            engine.clear(stage, turn)?;
        }
        drop(engines);
        self.forget_sums(stage, Some(turn));
        Ok(())
    }

    /// A copy of a stage's weights and optimizer state.
    pub(super) fn state(&self, stage: Stage) -> Result<StageState> {
        let engines = self.all()?;
        let mut state = engines[0].state(stage)?;
        for engine in &engines[1..] {
            for (slot, values) in engine.stage(stage)?.own_slots()? {
                state.slots.entry(slot).or_default().extend(values);
            }
        }
        Ok(state)
    }

    /// Whether a stage needs the base at any version; see [`Engine::needs_base`].
    pub(super) fn needs_base(&self, stage: Stage) -> Result<bool> {
        self.all()?[0].needs_base(stage)
    }

    /// Loads what a stage takes from these files; see [`Engine::load`].
    pub(super) fn load(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        self.each(|engine| engine.load(stage, origin))
    }

    /// Adds a stage unless it is hosted already; see [`Engine::host`].
    pub(super) fn host(&mut self, stage: Stage) -> Result<()> {
        self.each(|engine| engine.host(stage))?;
        self.hosted.insert(stage);
        Ok(())
    }

    /// Removes a stage and its microbatches in flight.
    pub(super) fn leave(&mut self, stage: Stage) -> Result<()> {
        self.each(|engine| engine.leave(stage))?;
        self.hosted.remove(&stage);
        self.forget_sums(stage, None);
        Ok(())
    }

    /// Resets a stage to the first version; see [`Engine::restart`].
    pub(super) fn restart(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        self.each(|engine| engine.restart(stage, origin))?;
        self.forget_sums(stage, None);
        Ok(())
    }

    /// Loads a stage of a version from files; see [`Engine::read_stage`].
    pub(super) fn read_stage(
        &mut self,
        stage: Stage,
        version: Step,
        folder: &Path,
    ) -> Result<()> {
        let state = checkpoint::read_stage(folder, &self.manifest, stage)?;
        self.each(|engine| engine.set_state(stage, version, &state))?;
        self.forget_sums(stage, None);
        Ok(())
    }

    /// Borrows the engines of all devices, once the work that they have is done.
    fn all(&self) -> Result<Vec<Lent<'_>>> {
        self.workers.iter().try_for_each(Worker::ask)?;
        self.workers.iter().map(Worker::receive).collect()
    }

    fn each(&mut self, mut work: impl FnMut(&mut Engine) -> Result<()>) -> Result<()> {
        self.all()?.iter_mut().try_for_each(|engine| work(engine))
    }

    fn turn(&self, step: Step) -> usize {
        (step.0 % self.manifest.steps_at_once()) as usize
    }

    /// Forgets what was counted at a stage: in one of its accumulators, or in all.
    fn forget_sums(&mut self, stage: Stage, turn: Option<usize>) {
        let stays = |(of, at): &SumsKey| *of != stage || turn.is_some_and(|turn| turn != *at);
        self.sums.retain(|key, _| stays(key));
        self.counted.retain(|(_, key)| stays(key));
    }
}

/// Lets each engine update its share, at the same time.
fn update_each(engines: &mut [Lent<'_>], stage: Stage, update: &Update<'_>) -> Result<()> {
    std::thread::scope(|scope| {
        let update_own = |engine: &mut Engine| engine.stage_mut(stage)?.update_own(update);
        let started: Vec<_> = engines
            .iter_mut()
            .map(|engine| {
                let engine: &mut Engine = engine;
                scope.spawn(move || update_own(engine))
            })
            .collect();
        started.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}
