//! An island of several devices.
//!
//! Rounds read accumulators in the machine's memory. Workers of the processor add to these and read the same weights; a
//! GPU has weights and accumulators of its own, whose integers are moved when a round first reads them. Both are exact, so it
//! does not matter which device ran a pass. Devices that compute slices together have the sums of their slices, from
//! which rounds read. Each device updates a share of the weights, for which alone it has what
//! the optimizer keeps (ZeRO-1, arXiv 1910.02054), and copies the others' shares where it has weights of its own.
//!
//! Devices that divide the stages have nothing of each other's: all that is done to a stage is done by its device.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use shoal_protocol::ids::{ClaimKey, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::{Manifest, Verdict};
use shoal_protocol::units::Bytes;

use super::Arrangement;
use super::additions::Additions;
use super::sums::Sums;
use super::worker::{Lent, Starting, Work, Worker};
use crate::checkpoint::{self, StageState};
use crate::device::collectives::{self, DeviceLinks};
use crate::device::setup::DeviceChoice;
use crate::engine::Engine;
use crate::engine::footprint::{Footprint, bytes_here};
use crate::engine::origin::Origin;
use crate::error::{EngineError, Result};
use crate::model::expert_loads::StageRouting;
use crate::model::parameters::{range_in_stage, range_within, summed_elements};
use crate::numeric::fixed_point::add_words;
use crate::optimizer::Update;
use crate::swap::{LowerTier, Means, Swap, SwapStats, Tiers, Use};
use crate::train::accumulator::Accumulator;
use crate::weights::pass_groups::passes_at_once;
use crate::weights::share::Share;

/// An accumulator: its stage, and which one of that stage.
pub(super) type SumsKey = (Stage, usize);

/// Several devices.
#[derive(Debug)]
pub(super) struct Several {
    manifest: Manifest,
    workers: Vec<Worker>,
    arrangement: Arrangement,
    /// Whether replicas have weights and accumulators of their own, or once for all in the machine's memory.
    are_apart: bool,
    /// How devices exchange sums, if several compute the slices of a pass together.
    links: Option<DeviceLinks>,
    /// The devices of each pass.
    of_pass: usize,
    /// The devices that divide the state: all or, where each group trains virtual workers from it, those of a group.
    of_state: usize,
    /// The tier below the machine's memory.
    lower: Option<LowerTier>,
    /// The mean gradients, since more stages were hosted than memory holds.
    means: Option<RefCell<Swap>>,
    /// The sums of each hosted stage.
    pub(super) sums: BTreeMap<Stage, Sums>,
    /// Sums that were set aside, by device.
    pub(super) aside: BTreeMap<SumsKey, Vec<tch::Tensor>>,
    /// The GPUs' accumulators with sums that were not moved.
    counted: BTreeSet<(usize, SumsKey)>,
    /// Additions to accumulators that have not ended.
    additions: Additions,
    /// What the routers of each stage did before its newest update, until that is read.
    routing: BTreeMap<Stage, StageRouting>,
}

impl Several {
    /// Starts a thread for each device, with these tiers below them.
    pub(super) fn new(
        manifest: &Manifest,
        span: StageSpan,
        (devices, arrangement): (&[DeviceChoice], Arrangement),
        (threads, tiers): (usize, Tiers),
    ) -> Result<Self> {
        let divides = arrangement == Arrangement::Stages;
        let passes = match divides {
            true => devices.len(),
            false => passes_at_once(manifest, devices.len())?,
        };
        assert!(
            !divides || tiers.are_none() && manifest.model.slices == 1 && manifest.inner.is_none(),
            "devices that divide the stages have all of them, and neither slices nor virtual workers"
        );
        assert!(
            tiers.lower.is_none() || passes == 1 && manifest.inner.is_none(),
            "devices that compute several passes at once do not swap to a disk, nor do virtual workers"
        );
        let of_pass = devices.len() / passes;
        let is_together = passes == 1 || of_pass > 1;
        let has_gpus = devices.iter().any(|device| !device.is_processor());
        let are_apart = has_gpus && tiers.device.is_none();
        let (shares, links): (Vec<Share>, _) = match is_together {
            true => {
                let (seats, links) = collectives::seats(devices, of_pass)?;
                let shares = match manifest.inner {
                    Some(_) => Share::all_by_group(seats).collect(),
                    None => Share::all_together(seats).collect(),
                };
                (shares, Some(links))
            }
            false if divides => (vec![Share::WHOLE; devices.len()], None),
            false => (Share::all(devices.len(), are_apart).collect(), None),
        };
        // Weights are drawn once for each memory.
        let drawn = if is_together || are_apart { devices.len() } else { 1 };
        let start = |(index, (device, share)): (usize, (&DeviceChoice, Share))| {
            let (manifest, seat) = (manifest.clone(), share.seat().cloned());
            let span = if index < drawn && !divides { span } else { StageSpan::none() };
            let tiers = tiers.clone();
            let make = move |device| Engine::sharing(&manifest, span, device, (share, tiers));
            Worker::start(*device, threads, seat, make)
        };
        // All at once, since each of these memories has its weights drawn.
        let started: Vec<Starting> =
            devices.iter().zip(shares).enumerate().map(start).collect::<Result<_>>()?;
        let mut island = Self {
            manifest: manifest.clone(),
            workers: started.into_iter().map(Starting::begun).collect::<Result<_>>()?,
            arrangement,
            links,
            of_pass,
            of_state: match (is_together, &manifest.inner) {
                (true, Some(_)) => of_pass,
                _ => devices.len(),
            },
            are_apart,
            lower: tiers.lower.clone(),
            means: None,
            sums: BTreeMap::new(),
            aside: BTreeMap::new(),
            counted: BTreeSet::new(),
            additions: Additions::default(),
            routing: BTreeMap::new(),
        };
        for stage in span.stages() {
            if divides {
                island.host(stage)?;
                continue;
            }
            island.host_beside(stage)?;
            island.make_sums(stage)?;
        }
        island.divide_memory()?;
        Ok(island)
    }

    /// The devices that have a stage.
    fn devices_of(&self, stage: Stage) -> Range<usize> {
        match self.arrangement {
            Arrangement::Stages => {
                let device = stage.device_in_turn(self.workers.len());
                device..device + 1
            }
            Arrangement::Passes => 0..self.workers.len(),
        }
    }

    /// Makes the accumulators of a stage that is new on its devices.
    fn make_sums(&mut self, stage: Stage) -> Result<()> {
        self.counted.retain(|(_, (of, _))| *of != stage);
        if self.is_together() {
            let parts = self.parts_of_sums(stage)?;
            self.sums.insert(stage, Sums::Parts(parts));
            return Ok(());
        }
        let elements = summed_elements(&self.manifest, stage);
        let accumulator = |_| Accumulator::new(&self.manifest, elements, None, tch::Device::Cpu);
        let sums: Vec<Accumulator> =
            (0..self.manifest.steps_at_once()).map(accumulator).collect::<Result<_>>()?;
        if !self.are_apart {
            self.each_of(stage, |engine| {
                engine.stage_mut(stage)?.accumulators.clone_from(&sums);
                Ok(())
            })?;
        }
        self.sums.insert(stage, Sums::Joined(sums));
        Ok(())
    }

    /// The devices' accumulators of a stage, by step and then by device.
    fn parts_of_sums(&self, stage: Stage) -> Result<Vec<Vec<Accumulator>>> {
        let engines = self.all()?;
        let part = |engine: &Lent<'_>, turn: usize| -> Result<Accumulator> {
            Ok(engine.stage(stage)?.accumulators[turn].clone())
        };
        let of_turn = |turn| engines.iter().map(|engine| part(engine, turn as usize)).collect();
        (0..self.manifest.steps_at_once()).map(of_turn).collect()
    }

    /// How the devices exchange sums; `None` if each computes passes of its own.
    pub(super) fn links(&self) -> Option<&DeviceLinks> {
        self.links.as_ref()
    }

    fn is_together(&self) -> bool {
        self.links.is_some()
    }

    /// See [`super::Island::devices_of_pass`].
    pub(super) fn devices_of_pass(&self, place: usize) -> Range<usize> {
        place * self.of_pass..(place + 1) * self.of_pass
    }

    pub(super) fn hosted(&self) -> usize {
        self.sums.len()
    }

    /// See [`Engine::swaps`].
    pub(super) fn swaps(&self) -> bool {
        self.lower.as_ref().is_some_and(|lower| lower.swaps(self.hosted()))
    }

    /// What was swapped for all devices by the end of their last work; `None` if they have everything all the time.
    pub(super) fn swap_stats(&self) -> Option<SwapStats> {
        let of_devices = self.workers.iter().filter_map(Worker::swapped);
        let of_devices = of_devices.reduce(SwapStats::beside)?;
        let of_means = self.means.as_ref().map(|means| means.borrow().stats());
        let of_means = of_means.unwrap_or_default();
        let (peak, all) = (of_devices.peak + of_means.peak, of_devices.and(of_means));
        Some(SwapStats { peak, ..all })
    }

    /// See [`super::Island::footprints`].
    pub(super) fn footprints(&self) -> Vec<Footprint> {
        let mut all: Vec<Footprint> = self.workers.iter().map(Worker::footprint).collect();
        let joined = self.sums.values().filter_map(Sums::joined).flatten();
        joined.for_each(|sums| all[0].sums += bytes_here(&sums.tensor()));
        all
    }

    /// Plans to bring what passes of a stage read to the devices beside the passes before; see [`Engine::fetch_ahead`].
    pub(super) fn fetch_ahead(&self, stage: Stage, sums: Option<Step>) -> Result<()> {
        let plan = || Box::new(move |engine: &mut Engine| engine.fetch_ahead(stage, sums));
        self.workers.iter().try_for_each(|worker| worker.run(plan()))
    }

    /// Divides the memory for the stages that are hosted now, as devices do for theirs.
    fn divide_memory(&mut self) -> Result<()> {
        let hosted: Vec<Stage> = self.sums.keys().copied().collect();
        let Some(lower) = &self.lower else { return Ok(()) };
        let budget = lower.budget_of_means(&self.manifest, &hosted, self.workers.len());
        if let (Some(budget), None) = (budget, &self.means) {
            self.means = Some(RefCell::new(Swap::create(&lower.folder, budget)?));
        }
        if let Some(means) = &self.means {
            means.borrow_mut().set_budget(budget.unwrap_or(Bytes(u64::MAX)));
        }
        Ok(())
    }

    /// The mean gradients of all-reduces, which belong to no device.
    pub(super) fn means(&self) -> Means<'_> {
        let hosted = self.sums.keys().copied().collect();
        Means { manifest: &self.manifest, hosted, swap: self.means.as_ref() }
    }

    /// Brings the mean gradients that an update of a stage reads into memory; see [`Engine::need_update`].
    pub(super) fn need_update(&self, stage: Stage) -> Result<()> {
        let Some(swap) = &self.means else { return Ok(()) };
        let places = self.means().of_stage(stage)?;
        swap.borrow_mut().need(&places, true)
    }

    /// Queues work on a device's engine. `counts` is the microbatch whose gradient it may add to the device's
    /// accumulator.
    pub(super) fn run(
        &mut self,
        device: usize,
        counts: Option<ClaimKey>,
        work: Work,
    ) -> Result<()> {
        let Some(key) = counts else { return self.workers[device].run(work) };
        let place = (key.stage, self.turn(key.step));
        if self.are_apart && !self.is_together() {
            self.counted.insert((device, place));
        }
        let addition = self.additions.begin(place);
        self.workers[device].run(Box::new(move |engine| {
            work(engine);
            drop(addition);
        }))
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
            stages.iter().copied().filter(|stage| self.sums.contains_key(stage)).collect();
        for stage in &hosted {
            self.gather(*stage, step)?;
        }
        let place = |stage: &Stage| {
            range_within(&range_in_stage(&self.manifest, *stage, weights), range.clone())
        };
        match &hosted[..] {
            [] => Err(EngineError::NotHosted(stages[0])),
            [only] => {
                // The function may write to the mean.
                self.means().need_if_swapped(weights)?;
                self.read_stage_sums(*only, step, place(only)?, read)
            }
            several => {
                let mut all = vec![0i64; range.len()];
                for stage in several {
                    let add = |part: &[u8]| add_words(&mut all, part);
                    self.read_stage_sums(*stage, step, place(stage)?, add)?;
                }
                self.means().need_if_swapped(weights)?;
                Ok(read(bytemuck::cast_slice(&all)))
            }
        }
    }

    /// Passes the sums of a range of a stage's flat vector to a function, while they are in memory.
    pub(super) fn read_stage_sums<T>(
        &self,
        stage: Stage,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let _lent = self.lend_sums(stage, step, false)?;
        self.sums[&stage].read(self.turn(step), range, read)
    }

    /// Brings a step's sums of a stage into memory, where they stay while the engines are lent.
    pub(super) fn lend_sums(
        &self,
        stage: Stage,
        step: Step,
        changes: bool,
    ) -> Result<Vec<Lent<'_>>> {
        let lent = if self.lower.is_some() { self.all()? } else { Vec::new() };
        lent.iter().try_for_each(|engine| engine.need(stage, Use::Sums(step), changes))?;
        Ok(lent)
    }

    /// Waits until everything is added to a step's sums of a stage, and moves them to where they are read. Returns the
    /// index of their accumulators.
    pub(super) fn gather(&mut self, stage: Stage, step: Step) -> Result<usize> {
        let turn = self.turn(step);
        self.additions.wait((stage, turn));
        self.collect((stage, turn))?;
        Ok(turn)
    }

    /// The run.
    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Moves what GPUs have in accumulators of their own.
    fn collect(&mut self, (stage, turn): SumsKey) -> Result<()> {
        let Sums::Joined(sums) = &self.sums[&stage] else { return Ok(()) };
        for device in self.devices_of(stage) {
            let worker = &self.workers[device];
            if self.counted.contains(&(device, (stage, turn))) {
                worker.ask()?;
                sums[turn].take(&worker.receive()?.stage(stage)?.accumulators[turn])?;
                self.counted.remove(&(device, (stage, turn)));
            }
        }
        Ok(())
    }

    /// Updates a stage; see [`Engine::apply`].
    pub(super) fn apply(&mut self, stage: Stage, update: &Update<'_>) -> Result<Verdict> {
        let mut engines = self.engines_of(stage)?;
        update_each(&mut engines, stage, update)?;
        if !self.have_one_memory() {
            engines.chunks_mut(self.of_state).try_for_each(|group| exchange(group, stage))?;
        }
        let turn = self.turn(update.step);
        let mut verdict = Verdict::WHOLE;
        let mut routing = StageRouting::default();
        for engine in &mut engines {
            verdict = engine.stage_mut(stage)?.end_update(update)?;
            engine.clear(stage, turn)?;
            routing.join(engine.take_routing(stage)?);
        }
        drop(engines);
        self.routing.insert(stage, routing);
        self.forget_sums(stage, turn..turn + 1)?;
        Ok(verdict)
    }

    /// See [`super::Island::take_routing`].
    pub(super) fn take_routing(&mut self, stage: Stage) -> StageRouting {
        self.routing.remove(&stage).unwrap_or_default()
    }

    /// A copy of a stage's weights and optimizer state.
    pub(super) fn state(&self, stage: Stage) -> Result<StageState> {
        let engines = self.engines_of(stage)?;
        let mut state = engines[0].state(stage)?;
        for engine in engines.iter().take(self.of_state).skip(1) {
            let StageState { weights, stale_weights, slots } = engine.state(stage)?;
            state.weights.extend(weights);
            for (all, own) in state.stale_weights.iter_mut().zip(stale_weights) {
                all.extend(own);
            }
            for (slot, values) in slots {
                state.slots.entry(slot).or_default().extend(values);
            }
        }
        Ok(state)
    }

    /// Whether a stage needs the base at any version; see [`Engine::needs_base`].
    pub(super) fn needs_base(&self, stage: Stage) -> Result<bool> {
        self.engines_of(stage)?[0].needs_base(stage)
    }

    /// Loads what a stage takes from these files; see [`Engine::load`].
    pub(super) fn load(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        self.each_of(stage, |engine| engine.load(stage, origin))
    }

    /// Adds a stage unless it is hosted already; see [`Engine::host`].
    pub(super) fn host(&mut self, stage: Stage) -> Result<()> {
        if self.sums.contains_key(&stage) {
            return Ok(());
        }
        match self.have_one_memory() {
            true => {
                self.engines_of(stage)?[0].host(stage)?;
                self.host_beside(stage)?;
            }
            false => self.each_of(stage, |engine| engine.host(stage))?,
        }
        self.make_sums(stage)?;
        self.divide_memory()
    }

    /// Whether all devices read the same weights.
    fn have_one_memory(&self) -> bool {
        !self.is_together() && !self.are_apart && self.arrangement == Arrangement::Passes
    }

    /// Adds a stage with the weights of the first device to the others, if all have one memory.
    fn host_beside(&mut self, stage: Stage) -> Result<()> {
        if !self.have_one_memory() {
            return Ok(());
        }
        let mut engines = self.all()?;
        let (first, others) = engines.split_first_mut().expect("there is a device");
        let first = first.stage(stage)?;
        others.iter_mut().try_for_each(|engine| engine.host_beside(first))
    }

    /// Removes a stage and its microbatches in flight.
    pub(super) fn leave(&mut self, stage: Stage) -> Result<()> {
        self.each_of(stage, |engine| engine.leave(stage))?;
        self.counted.retain(|(_, (of, _))| *of != stage);
        self.sums.remove(&stage);
        self.forget_means(stage)?;
        self.divide_memory()
    }

    /// Forgets the mean gradients of a stage, which nobody reads any more.
    fn forget_means(&self, stage: Stage) -> Result<()> {
        self.means.iter().try_for_each(|means| means.borrow_mut().forget(stage))
    }

    /// Resets a stage to the first version; see [`Engine::restart`].
    pub(super) fn restart(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        if self.have_one_memory() {
            let mut engines = self.all()?;
            let (first, others) = engines.split_first_mut().expect("there is a device");
            // They keep the memory of what is replaced.
            others.iter_mut().try_for_each(|engine| engine.leave(stage))?;
            first.restart(stage, origin)?;
            for engine in others {
                engine.host_beside(first.stage(stage)?)?;
                engine.load(stage, origin)?;
            }
        } else {
            self.each_of(stage, |engine| engine.restart(stage, origin))?;
        }
        self.forget_means(stage)?;
        self.make_sums(stage)
    }

    /// Loads a stage of a version from files; see [`Engine::read_stage`].
    pub(super) fn read_stage(&mut self, stage: Stage, version: Step, folder: &Path) -> Result<()> {
        let state = checkpoint::read_stage(folder, &self.manifest, stage)?;
        self.each_of(stage, |engine| engine.set_state(stage, version, &state))?;
        self.forget_sums(stage, 0..self.manifest.steps_at_once() as usize)
    }

    /// Borrows the engines of all devices, once the work that they have is done.
    fn all(&self) -> Result<Vec<Lent<'_>>> {
        borrow(&self.workers)
    }

    /// Borrows the engines that have a stage, once the work that they have is done.
    fn engines_of(&self, stage: Stage) -> Result<Vec<Lent<'_>>> {
        borrow(&self.workers[self.devices_of(stage)])
    }

    /// Does something with each engine that has a stage.
    fn each_of(
        &mut self,
        stage: Stage,
        mut work: impl FnMut(&mut Engine) -> Result<()>,
    ) -> Result<()> {
        self.engines_of(stage)?.iter_mut().try_for_each(|engine| work(engine))
    }

    fn turn(&self, step: Step) -> usize {
        (step.0 % self.manifest.steps_at_once()) as usize
    }

    /// Forgets what was counted in accumulators of a stage, which the devices have cleared on their side.
    fn forget_sums(&mut self, stage: Stage, turns: Range<usize>) -> Result<()> {
        self.counted.retain(|(_, (of, turn))| *of != stage || !turns.contains(turn));
        self.sums[&stage].clear(turns)
    }
}

/// Borrows the engines of some devices, once the work that they have is done.
fn borrow(workers: &[Worker]) -> Result<Vec<Lent<'_>>> {
    workers.iter().try_for_each(Worker::ask)?;
    workers.iter().map(Worker::receive).collect()
}

/// Gives each engine what the others updated.
fn exchange(engines: &mut [Lent<'_>], stage: Stage) -> Result<()> {
    for owner in 0..engines.len() {
        let (before, rest) = engines.split_at_mut(owner);
        let (owner, after) = rest.split_first_mut().expect("the owner is one of them");
        let updated = owner.stage(stage)?;
        for engine in before.iter_mut().chain(after) {
            engine.stage_mut(stage)?.copy_from(updated)?;
        }
    }
    Ok(())
}

/// Lets each engine update its share, at the same time.
fn update_each(engines: &mut [Lent<'_>], stage: Stage, update: &Update<'_>) -> Result<()> {
    std::thread::scope(|scope| {
        let update_own = |engine: &mut Engine| {
            engine.need_update(stage)?;
            engine.stage_mut(stage)?.update_own(update)
        };
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

#[cfg(test)]
mod tests;
