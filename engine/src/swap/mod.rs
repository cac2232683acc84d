//! Tensors of stages that lie in memory or in a file, so that a peer hosts more than its memory holds.
//!
//! Before the engine touches a tensor it [needs](Swap::need) it, and may ask for others
//! [ahead](Swap::fetch_ahead). What makes room are the tensors that were used longest ago: passes go up
//! and down the stages, so these are also the ones that are used last. Where a tensor's bytes lie changes
//! none of them.

mod disk;
mod file;
mod images;
mod means;
mod parts;
mod region;
mod stats;
mod tier;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Instant;

use shoal_protocol::ids::{Stage, WeightGroup};
use shoal_protocol::units::Bytes;
use tch::Tensor;

use self::disk::{Direction, Disk, Order};
use self::file::{Extent, SwapFile};
pub(crate) use self::images::Images;
pub use self::images::copy_rate;
pub(crate) use self::means::Means;
pub(crate) use self::parts::Use;
use self::region::{Region, padded};
pub use self::stats::SwapStats;
pub use self::tier::{LowerTier, Tiers, swap_rate};
use crate::device::shim;
use crate::device::tensor::bytes_of;
use crate::error::{EngineError, Result};
use crate::optimizer::Slot;

/// One of a stage's tensors. Numbers tell apart the versions of weights, and the accumulators of steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Weights(usize),
    /// A copy for passes, of what the device computes with.
    Narrow(usize),
    /// A copy of the embedding's rows in f32, beside another one in bf16.
    Embedding(usize),
    Frozen,
    /// What the optimizer keeps beside the weights.
    Slot(Slot),
    Sums(usize),
    /// The mean gradient of an all-reduce, at the first hosted stage of its weight group.
    Mean(WeightGroup),
}

/// A stage's tensor.
pub(crate) type Place = (Stage, Part);

/// A tensor that is handed over: its memory is the swap's from then on.
#[derive(Debug)]
pub(crate) struct Swappable {
    pub(crate) part: Part,
    /// A handle of a contiguous tensor that is all of its storage.
    pub(crate) tensor: Tensor,
    /// Whether all elements are zero.
    pub(crate) is_zero: bool,
}

/// Where the bytes of a tensor are.
#[derive(Debug)]
enum State {
    /// Nowhere: all of them are zero.
    Zero,
    /// In the file.
    Away,
    /// On their way into memory.
    Coming,
    Here(Region),
    /// On their way into the file.
    Leaving,
}

#[derive(Debug)]
struct Vector {
    tensor: Tensor,
    bytes: usize,
    extent: Extent,
    state: State,
    /// Whether the file has other bytes than the memory.
    dirty: bool,
    /// The need for which it was last used.
    used: u64,
}

/// All tensors that are swapped, with the memory that they may take.
#[derive(Debug)]
pub(crate) struct Swap {
    budget: usize,
    /// Bytes in memory, those on their way included.
    held: usize,
    /// Those on their way out.
    leaving: usize,
    file: SwapFile,
    disk: Disk,
    vectors: BTreeMap<Place, Vector>,
    needs: u64,
    /// Tensors to fetch beside the next pass.
    planned: Vec<Place>,
    stats: SwapStats,
}

impl Swap {
    /// A file in `folder`, and a budget of memory.
    pub(crate) fn create(folder: &Path, budget: Bytes) -> Result<Self> {
        let file = SwapFile::create(folder)?;
        let disk = file.handle().and_then(Disk::start).map_err(EngineError::SwapMemory)?;
        Ok(Self {
            budget: usize::try_from(budget.0).unwrap_or(usize::MAX),
            held: 0,
            leaving: 0,
            file,
            disk,
            vectors: BTreeMap::new(),
            needs: 0,
            planned: Vec::new(),
            stats: SwapStats::default(),
        })
    }

    pub(crate) fn stats(&self) -> SwapStats {
        self.stats
    }

    /// Changes the memory that tensors may take. What exceeds it leaves when others come.
    pub(crate) fn set_budget(&mut self, budget: Bytes) {
        self.budget = usize::try_from(budget.0).unwrap_or(usize::MAX);
    }

    /// Takes over the memory of a stage's tensors, in place of earlier ones.
    pub(crate) fn adopt(&mut self, stage: Stage, tensors: Vec<Swappable>) -> Result<()> {
        for Swappable { part, mut tensor, is_zero } in tensors {
            // Those before it may make room.
            self.needs += 1;
            self.remove((stage, part))?;
            let bytes = bytes_of(&tensor).len();
            let extent = self.file.reserve(stage, bytes)?;
            let mut state = State::Zero;
            if is_zero {
                shim::set_memory(&mut tensor, std::ptr::null_mut(), 0)?;
            } else {
                self.make_room(padded(bytes))?;
                let mut region = self.region(bytes)?;
                region.bytes_mut()[..bytes].copy_from_slice(bytes_of(&tensor));
                shim::set_memory(&mut tensor, region.address(), bytes)?;
                state = State::Here(region);
            }
            let used = self.needs;
            let vector = Vector { tensor, bytes, extent, state, dirty: true, used };
            self.vectors.insert((stage, part), vector);
        }
        Ok(())
    }

    /// Forgets a stage's tensors, which nobody reads any more.
    pub(crate) fn forget(&mut self, stage: Stage) -> Result<()> {
        let of_stage = |place: &&Place| place.0 == stage;
        let places: Vec<Place> = self.vectors.keys().filter(of_stage).copied().collect();
        places.into_iter().try_for_each(|place| self.remove(place))
    }

    fn remove(&mut self, place: Place) -> Result<()> {
        if !self.holds(place) {
            return Ok(());
        }
        self.settle(place)?;
        let vector = self.vectors.remove(&place).expect("it is held");
        if matches!(vector.state, State::Here(_)) {
            self.held -= padded(vector.bytes);
        }
        self.file.release(vector.extent);
        Ok(())
    }

    /// Whether tensors are in memory.
    pub(crate) fn are_here(&self, places: &[Place]) -> bool {
        let is_here = |place| matches!(self.vectors[place].state, State::Here(_));
        places.iter().all(is_here)
    }

    /// Whether a tensor was handed over.
    pub(crate) fn holds(&self, place: Place) -> bool {
        self.vectors.contains_key(&place)
    }

    /// Brings tensors into memory, and keeps them there until the next need. `changes` is whether their
    /// values are about to change.
    pub(crate) fn need(&mut self, places: &[Place], changes: bool) -> Result<()> {
        self.needs += 1;
        let start = Instant::now();
        for place in places {
            // The rest of the stage is about to be used too.
            let others = self.vectors.iter_mut().filter(|(other, _)| other.0 == place.0);
            others.for_each(|(_, other)| other.used = other.used.max(self.needs - 1));
        }
        for place in places {
            self.vector_mut(*place).used = self.needs;
        }
        for place in places {
            self.bring(*place)?;
        }
        for place in places.iter().copied() {
            while !matches!(self.vectors[&place].state, State::Here(_)) {
                self.wait()?;
            }
            self.vector_mut(place).dirty |= changes;
        }
        self.stats.waited += start.elapsed();
        Ok(())
    }

    /// Notes that the values of a tensor in memory are about to change.
    pub(crate) fn change(&mut self, place: Place) {
        self.vector_mut(place).dirty = true;
    }

    /// Notes tensors to bring into memory beside the next pass, in place of earlier ones: what that pass
    /// needs must not make room for them.
    pub(crate) fn plan(&mut self, places: Vec<Place>) {
        self.planned = places;
    }

    fn take_in_all(&mut self) -> Result<()> {
        while let Some(answer) = self.disk.poll() {
            self.take_in(answer)?;
        }
        Ok(())
    }

    /// Begins to bring the noted tensors into memory. Those that have no room yet, because what leaves is
    /// still being written, are tried again at the next call.
    pub(crate) fn fetch_planned(&mut self) -> Result<()> {
        let mut planned = std::mem::take(&mut self.planned);
        planned.retain(|place| self.vectors.contains_key(place));
        self.fetch_ahead(&planned)?;
        planned.retain(|place| matches!(self.vectors[place].state, State::Away));
        self.planned = planned;
        Ok(())
    }

    /// Begins to bring tensors into memory, as far as they have room beside those of the last need.
    pub(crate) fn fetch_ahead(&mut self, places: &[Place]) -> Result<()> {
        self.take_in_all()?;
        for place in places.iter().copied() {
            let vector = &self.vectors[&place];
            let length = padded(vector.bytes);
            if !matches!(vector.state, State::Away) {
                continue;
            }
            self.vector_mut(place).used = self.needs;
            while self.held - self.leaving + length > self.budget {
                let Some(victim) = self.victim() else { return Ok(()) };
                self.evict(victim)?;
            }
            if self.held + length <= self.budget && self.disk.has_room() {
                self.bring(place)?;
            }
        }
        Ok(())
    }

    /// Makes a tensor zero, wherever it is.
    pub(crate) fn clear(&mut self, place: Place) -> Result<()> {
        self.settle(place)?;
        let vector = self.vector_mut(place);
        shim::set_memory(&mut vector.tensor, std::ptr::null_mut(), 0)?;
        vector.dirty = true;
        let was_here = matches!(std::mem::replace(&mut vector.state, State::Zero), State::Here(_));
        let length = padded(vector.bytes);
        if was_here {
            self.held -= length;
        }
        Ok(())
    }

    /// Begins to bring a tensor into memory if it is not there or on its way; waits for room.
    fn bring(&mut self, place: Place) -> Result<()> {
        let (bytes, extent) = (self.vectors[&place].bytes, self.vectors[&place].extent);
        match self.vectors[&place].state {
            // What leaves comes back when it is written, since it is needed.
            State::Here(_) | State::Coming | State::Leaving => return Ok(()),
            State::Zero | State::Away => {
                self.make_room(padded(bytes))?;
                self.await_disk()?;
            }
        }
        let mut region = self.region(bytes)?;
        let vector = self.vectors.get_mut(&place).expect("it is known");
        match vector.state {
            State::Zero => {
                shim::set_memory(&mut vector.tensor, region.address(), bytes)?;
                vector.state = State::Here(region);
                vector.dirty = true;
            }
            _ => {
                vector.state = State::Coming;
                self.stats.read += Bytes(bytes as u64);
                self.disk.give(Order { place, direction: Direction::In, extent, region });
            }
        }
        Ok(())
    }

    /// Memory for a tensor; there is room for it.
    fn region(&mut self, bytes: usize) -> Result<Region> {
        let region = Region::zeroed(bytes).map_err(EngineError::SwapMemory)?;
        self.held += padded(bytes);
        self.stats.peak = self.stats.peak.max(Bytes(self.held as u64));
        Ok(region)
    }

    /// Waits until so many bytes have room, and makes some where nothing is on its way out.
    fn make_room(&mut self, length: usize) -> Result<()> {
        while self.held + length > self.budget {
            let is_freed = self.held - self.leaving + length <= self.budget;
            match self.victim().filter(|_| !is_freed) {
                Some(victim) => self.evict(victim)?,
                None if self.disk.is_idle() => {
                    let needs = Bytes((self.held + length) as u64);
                    return Err(EngineError::SwapBudget { needs, has: Bytes(self.budget as u64) });
                }
                None => self.wait()?,
            }
        }
        Ok(())
    }

    /// The tensor in memory that was used longest ago, not for the last need.
    fn victim(&self) -> Option<Place> {
        let here = self.vectors.iter().filter(|(_, vector)| {
            matches!(vector.state, State::Here(_)) && vector.used < self.needs
        });
        here.min_by_key(|(_, vector)| vector.used).map(|(place, _)| *place)
    }

    /// Takes a tensor out of memory: at once, or when its bytes are in the file.
    fn evict(&mut self, place: Place) -> Result<()> {
        self.await_disk()?;
        let vector = self.vectors.get_mut(&place).expect("it is known");
        shim::set_memory(&mut vector.tensor, std::ptr::null_mut(), 0)?;
        let next = if vector.dirty { State::Leaving } else { State::Away };
        let State::Here(region) = std::mem::replace(&mut vector.state, next) else {
            unreachable!("only what is here is evicted");
        };
        let (bytes, extent) = (vector.bytes, vector.extent);
        if !std::mem::take(&mut vector.dirty) {
            self.held -= padded(bytes);
            return Ok(());
        }
        self.leaving += padded(bytes);
        self.stats.written += Bytes(bytes as u64);
        self.disk.give(Order { place, direction: Direction::Out, extent, region });
        Ok(())
    }

    /// Waits until the disk takes an order. An error that it meets concerns another one, so nothing has changed yet.
    fn await_disk(&mut self) -> Result<()> {
        while !self.disk.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits until a tensor is not on its way.
    fn settle(&mut self, place: Place) -> Result<()> {
        while matches!(self.vectors[&place].state, State::Coming | State::Leaving) {
            self.wait()?;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let answer = self.disk.wait();
        self.take_in(answer)
    }

    /// A tensor arrived in memory or in the file.
    fn take_in(&mut self, (order, result): (Order, io::Result<()>)) -> Result<()> {
        let Order { place, direction, mut region, .. } = order;
        let (needs, has_failed) = (self.needs, result.is_err());
        let length = padded(self.vectors[&place].bytes);
        if direction == Direction::Out {
            self.leaving -= length;
        }
        let vector = self.vector_mut(place);
        // A failure loses nothing: what was not read is read again, and what was not written stays in memory.
        let stays = match direction {
            Direction::In => !has_failed,
            // What is needed again meanwhile has not lost its memory.
            Direction::Out => has_failed || vector.used == needs,
        };
        if stays {
            let bytes = vector.bytes;
            shim::set_memory(&mut vector.tensor, region.address(), bytes)?;
            vector.dirty |= has_failed;
            vector.state = State::Here(region);
        } else {
            vector.state = State::Away;
            self.held -= length;
        }
        result.map_err(|source| self.file.failure(place.0, direction, source))
    }

    fn vector_mut(&mut self, place: Place) -> &mut Vector {
        self.vectors.get_mut(&place).expect("the stage handed it over")
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::device::tensor::{elements, elements_mut};

    const COUNT: usize = 3 * 1024;
    const LENGTH: usize = 4 * COUNT;

    fn swap(vectors: usize) -> (tempfile::TempDir, Swap) {
        let folder = tempfile::tempdir().expect("a folder");
        let budget = Bytes((vectors * LENGTH) as u64);
        let swap = Swap::create(folder.path(), budget).expect("a file");
        (folder, swap)
    }

    /// Hands over a tensor of each stage, filled with the stage's number, and returns views of them.
    fn fill(swap: &mut Swap, stages: u16) -> Vec<Tensor> {
        let stages = (0..stages).map(|stage| {
            let options = (Kind::Float, Device::Cpu);
            let tensor = Tensor::full([COUNT as i64], f64::from(stage), options);
            let view = tensor.narrow(0, 1, 8);
            let part = Part::Weights(0);
            let all = vec![Swappable { part, tensor, is_zero: false }];
            swap.adopt(Stage(stage), all).expect("room");
            view
        });
        stages.collect()
    }

    #[test]
    fn tensors_come_back_with_their_values_within_the_budget() {
        let (_folder, mut swap) = swap(2);
        let mut views = fill(&mut swap, 5);
        let place = |stage| [(Stage(stage), Part::Weights(0))];
        for round in 0..4u16 {
            for stage in (0..5u16).chain((0..4).rev()) {
                swap.need(&place(stage), true).expect("room");
                swap.fetch_ahead(&place((stage + 1) % 5)).expect("a disk");
                let view = &mut views[usize::from(stage)];
                let expected = view.double_value(&[7]);
                let fresh = f64::from(round * 100 + stage);
                assert!(round == 0 || expected >= f64::from((round - 1) * 100), "{expected}");
                let _ = view.fill_(fresh);
                assert_eq!(view.double_value(&[7]), fresh);
            }
        }
        for stage in 0..5u16 {
            swap.need(&place(stage), false).expect("room");
            let value = views[usize::from(stage)].double_value(&[0]);
            assert_eq!(value, f64::from(300 + stage));
        }
        let stats = swap.stats();
        assert!(stats.peak <= Bytes(2 * LENGTH as u64) && stats.read > Bytes(0), "{stats:?}");
    }

    #[test]
    fn cleared_tensors_are_zero_and_cost_no_reading() {
        let (_folder, mut swap) = swap(1);
        let views = fill(&mut swap, 2);
        for stage in [1, 0, 1] {
            let place = (Stage(stage), Part::Weights(0));
            swap.clear(place).expect("a disk");
            let before = swap.stats().read;
            swap.need(&[place], false).expect("room");
            assert_eq!(elements::<f32>(&views[usize::from(stage)].contiguous()), [0.0; 8]);
            assert_eq!(swap.stats().read, before);
        }
    }

    #[test]
    fn only_changed_tensors_are_written_again() {
        let (_folder, mut swap) = swap(1);
        let mut views = fill(&mut swap, 2);
        let [first, second] = [0, 1].map(|stage| (Stage(stage), Part::Weights(0)));
        let visit_both = |swap: &mut Swap| {
            let before = swap.stats().written;
            swap.need(&[second], false).expect("room");
            swap.need(&[first], false).expect("room");
            swap.stats().written.0 - before.0
        };
        visit_both(&mut swap);
        assert_eq!(visit_both(&mut swap), 0);
        let _ = views[0].fill_(5.0);
        swap.change(first);
        assert_eq!(visit_both(&mut swap), LENGTH as u64);
        assert_eq!(views[0].double_value(&[7]), 5.0);
    }

    #[test]
    fn failures_of_the_disk_lose_nothing() {
        let (_folder, mut swap) = swap(2);
        let mut views = fill(&mut swap, 2);
        let _ = views[0].fill_(7.0);
        let place = (Stage(0), Part::Weights(0));
        let fail = |swap: &mut Swap| {
            let (order, _) = swap.disk.wait();
            let failed = swap.take_in((order, Err(io::ErrorKind::Other.into())));
            assert!(failed.expect_err("it fails").to_string().contains("stage 0"));
            (swap.held, swap.leaving)
        };
        swap.evict(place).expect("a disk with room");
        assert_eq!(fail(&mut swap), (2 * LENGTH, 0), "it was not written and stays");
        assert_eq!(views[0].double_value(&[0]), 7.0);
        swap.evict(place).expect("a disk with room");
        swap.settle(place).expect("the disk works again");
        assert_eq!((swap.held, swap.leaving), (LENGTH, 0));
        swap.bring(place).expect("room");
        assert_eq!(fail(&mut swap), (LENGTH, 0), "it was not read and stays away");
        swap.need(&[place], false).expect("the disk works again");
        assert_eq!((swap.held, views[0].double_value(&[0])), (2 * LENGTH, 7.0));
    }

    #[test]
    fn what_is_needed_at_once_must_fit() {
        let (_folder, mut swap) = swap(1);
        let tensor = || Tensor::zeros([COUNT as i64], (Kind::Float, Device::Cpu));
        let parts = [Part::Slot(Slot::FirstMoment), Part::Slot(Slot::SecondMoment)];
        let all = parts.map(|part| Swappable { part, tensor: tensor(), is_zero: true });
        swap.adopt(Stage(0), all.into()).expect("no room is needed yet");
        let places = parts.map(|part| (Stage(0), part));
        let error = swap.need(&places, true).expect_err("twice the budget");
        assert!(error.to_string().contains("--memory"), "{error}");
        swap.need(&places[..1], true).expect("one fits");
    }

    #[test]
    fn forgotten_tensors_free_their_room() {
        let (_folder, mut swap) = swap(1);
        fill(&mut swap, 2);
        swap.forget(Stage(0)).expect("a disk");
        swap.forget(Stage(1)).expect("a disk");
        let mut views = fill(&mut swap, 1);
        swap.need(&[(Stage(0), Part::Weights(0))], true).expect("room");
        assert_eq!(elements_mut::<f32>(&mut views[0])[3], 0.0);
    }

    #[test]
    fn tensors_in_place_of_others_take_no_more_of_the_disk() {
        let (_folder, mut swap) = swap(1);
        fill(&mut swap, 4);
        let once = swap.file.on_disk();
        for _ in 0..5 {
            fill(&mut swap, 4);
        }
        assert_eq!(swap.file.on_disk(), once);
    }

    #[test]
    fn a_disk_without_room_is_named_with_the_stage() {
        let (folder, mut swap) = swap(1);
        let stage = Stage(3);
        let error = swap.file.reserve(stage, 1 << 60).expect_err("no disk is as large");
        let (text, path) = (error.to_string(), folder.path().display().to_string());
        assert!(text.contains(&path) && text.contains("stage 3"), "{text}");
    }
}
