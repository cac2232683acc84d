//! The memory of a simulated device that holds only some of its peer's stages, and the tier below it.
//!
//! It follows the engine: what a task touches is brought into memory before the task begins, the parts
//! that were used longest ago make room, changed ones are written below first, and a stage that is fetched
//! ahead is loaded beside the next pass.

use std::collections::{BTreeMap, VecDeque};

use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::units::{Bytes, Moment, Rate};

use super::integer_model::Weights;
use super::omitted_rules::Omit;
use super::peer_scenario::PeerScenario;
use super::report::Swapped;
use crate::rng::Rng;

/// The device of a peer that swaps its stages.
#[derive(Debug, Clone)]
pub struct TierScenario {
    /// Bytes of stages that it holds at once.
    pub memory: Bytes,
    /// Rate of the link to the tier below, in each direction.
    pub rate: Rate,
    /// Bytes per element.
    pub element: ElementBytes,
}

/// Bytes per element of a stage.
#[derive(Debug, Clone, Copy)]
pub struct ElementBytes {
    /// The weights that a pass reads.
    pub weights: u64,
    /// The rest of the state that an update changes.
    pub moments: u64,
    /// An accumulator.
    pub sums: u64,
}

impl ElementBytes {
    /// Weights and AdamW's moments in f32, and an accumulator.
    pub const ADAMW: Self = Self { weights: 4, moments: 8, sums: 8 };
}

impl TierScenario {
    /// The device of a peer that swaps: at least as large as what one task touches.
    pub(super) fn drawn(
        seed: u64,
        index: u64,
        manifest: &Manifest,
        parameters: &BTreeMap<WeightGroup, usize>,
        peer: &PeerScenario,
    ) -> Option<Self> {
        if peer.limits.resident == usize::MAX {
            return None;
        }
        let element = ElementBytes::ADAMW;
        let elements = |stage| -> u64 {
            manifest.groups_of(stage).map(|weights| parameters[&weights] as u64).sum()
        };
        let sums = |weights| -> u64 {
            manifest.stages_of(weights).map(|stage| element.sums * elements(stage)).sum()
        };
        let state = |stage| (element.weights + element.moments) * elements(stage);
        let update = manifest.stages().map(state).max()?;
        let least = manifest.weight_groups().map(sums).max()?.max(update);
        // Everything, with the accumulators of two steps.
        let all = |stage| state(stage) + 2 * element.sums * elements(stage);
        let whole = manifest.stages().map(all).sum::<u64>().max(least);
        let mut rng = Rng::new(seed ^ (index + 1) << 40 ^ 0x7469_6572);
        let memory = rng.within(least..=whole);
        let memory = Bytes(rng.pick(&[least, (least * 2).min(whole), memory]));
        // The state of a stage takes as long as a fraction of a pass, or several.
        let time = peer.compute.forward * rng.pick(&[1, 4, 20]) / 4;
        let rate = u128::from(update) * 1_000_000_000 / time.as_nanos().max(1);
        let rate = Rate(u64::try_from(rate).unwrap_or(u64::MAX).max(1));
        Some(Self { memory, rate, element })
    }
}

/// A part of a stage's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Weights,
    Moments,
    Sums(Step),
}

/// A part of a stage.
pub(super) type Place = (Stage, Part);

/// The content of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Weights { version: Step, weights: Weights },
    Moments { version: Step },
    Sums(Vec<i64>),
}

/// A part that a task read, as it is on the device and as it should be.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) place: Place,
    pub(super) found: Option<Value>,
    pub(super) present: Value,
}

/// A part on the device or on its way there.
#[derive(Debug)]
struct Resident {
    value: Value,
    /// Whether it changed since it came.
    changed: bool,
    /// The number of the need for which it was last used.
    used: u64,
    /// The time from which it takes memory, and the time at which it is complete.
    from: Moment,
    until: Moment,
}

/// The memory of a device and the tier below.
#[derive(Debug)]
pub(super) struct Tiers {
    scenario: TierScenario,
    /// Elements of each stage, and the number of real ones that each stands for.
    elements: BTreeMap<Stage, usize>,
    weight: u64,
    device: BTreeMap<Place, Resident>,
    below: BTreeMap<Place, Value>,
    /// Bytes of the parts on the device.
    resident: u64,
    /// Parts that take memory until they are written: the end of the write and the bytes.
    leaving: VecDeque<(Moment, u64)>,
    /// The times at which the link is free, inward and outward.
    inward: Moment,
    outward: Moment,
    needs: u64,
    /// Parts to fetch beside the next pass.
    ahead: Vec<Place>,
    /// Contents of parts when they were fetched ahead, in runs whose passes read them whatever happened
    /// since.
    fetched: BTreeMap<Place, Value>,
    /// The reads of the last task.
    pub(super) reads: Vec<Read>,
    pub(super) swapped: Swapped,
}

impl Tiers {
    /// An empty device, with these stages below.
    pub(super) fn new(
        scenario: &TierScenario,
        weight: u64,
        elements: BTreeMap<Stage, usize>,
        below: impl Iterator<Item = (Place, Value)>,
    ) -> Self {
        Self {
            scenario: scenario.clone(),
            elements,
            weight,
            device: BTreeMap::new(),
            below: below.collect(),
            resident: 0,
            leaving: VecDeque::new(),
            inward: Moment::default(),
            outward: Moment::default(),
            needs: 0,
            ahead: Vec::new(),
            fetched: BTreeMap::new(),
            reads: Vec::new(),
            swapped: Swapped::default(),
        }
    }

    pub(super) fn memory(&self) -> Bytes {
        self.scenario.memory
    }

    /// Bytes that the device holds at a moment.
    pub(super) fn held(&self, now: Moment) -> Bytes {
        let here = self.device.iter().filter(|(_, resident)| resident.from <= now);
        let leaving = self.leaving.iter().filter(|(until, _)| *until > now);
        let here = here.map(|(place, _)| self.size(*place)).sum::<u64>();
        Bytes(here + leaving.map(|(_, bytes)| bytes).sum::<u64>())
    }

    /// The content of a part on the device.
    pub(super) fn read(&self, place: Place) -> Option<Value> {
        self.device.get(&place).map(|resident| resident.value.clone())
    }

    /// Brings parts into memory for a task. Returns the time at which all are there.
    pub(super) fn need(&mut self, now: Moment, places: &[Place], omit: Omit) -> Moment {
        self.needs += 1;
        for (place, resident) in &mut self.device {
            if places.contains(place) {
                resident.used = self.needs;
            } else if places.iter().any(|(stage, _)| *stage == place.0) {
                // The rest of the stage is about to be used too.
                resident.used = resident.used.max(self.needs - 1);
            }
        }
        let mut ready = now;
        for place in places {
            ready = ready.max(self.bring(now, *place, omit));
        }
        self.swapped.waited += ready.since(now);
        ready
    }

    /// Notes parts to fetch beside the next pass.
    pub(super) fn fetch_ahead(&mut self, places: Vec<Place>) {
        self.ahead = places;
    }

    /// Puts the content of earlier fetches in place of the present one.
    pub(super) fn read_fetched(&mut self, places: &[Place]) {
        for place in places {
            if let Some(fetched) = self.fetched.get(place)
                && let Some(resident) = self.device.get_mut(place)
            {
                resident.value = fetched.clone();
            }
        }
    }

    /// Begins to fetch what was noted.
    pub(super) fn begin_fetching(&mut self, now: Moment, omit: Omit) {
        let noted = std::mem::take(&mut self.ahead);
        self.fetch(now, noted, omit);
    }

    /// Begins to fetch parts, as far as they have room beside those of the last need.
    pub(super) fn fetch(&mut self, now: Moment, places: Vec<Place>, omit: Omit) {
        for place in places {
            let Some(value) = self.below.get(&place).cloned() else { continue };
            if self.device.contains_key(&place) {
                continue;
            }
            if omit == Omit::PrefetchVersions {
                self.fetched.insert(place, value);
            }
            if let Some(from) = self.make_room(now, self.size(place), omit) {
                self.load(place, from);
            }
        }
    }

    /// Replaces the content of a part that the running task needed.
    pub(super) fn change(&mut self, place: Place, value: Value) {
        if let Some(resident) = self.device.get_mut(&place) {
            resident.value = value;
            resident.changed = true;
        }
    }

    /// Forgets the parts of a stage for which the condition holds.
    pub(super) fn forget(&mut self, stage: Stage, which: impl Fn(Part) -> bool) {
        let places = self.device.keys().chain(self.below.keys()).copied();
        let places: Vec<Place> = places.filter(|(of, part)| *of == stage && which(*part)).collect();
        places.into_iter().for_each(|place| self.remove(place));
    }

    fn remove(&mut self, place: Place) {
        self.below.remove(&place);
        if self.device.remove(&place).is_some() {
            self.resident -= self.size(place);
        }
    }

    fn put(&mut self, place: Place, resident: Resident) {
        self.resident += self.size(place);
        self.device.insert(place, resident);
    }

    /// Brings a part onto the device, from which it may be missing. Returns the time at which it is there.
    fn bring(&mut self, now: Moment, place: Place, omit: Omit) -> Moment {
        if let Some(resident) = self.device.get(&place) {
            return resident.until.max(now);
        }
        let from = self.make_room(now, self.size(place), omit).unwrap_or(now);
        self.load(place, from)
    }

    /// Loads a part that is not on the device and has room from a moment on. Returns the time at which it
    /// is there.
    fn load(&mut self, place: Place, from: Moment) -> Moment {
        let size = self.size(place);
        let (value, until) = match self.below.get(&place) {
            Some(value) => {
                self.inward = from.max(self.inward) + self.scenario.rate.time(Bytes(size));
                self.swapped.loaded += Bytes(size);
                (value.clone(), self.inward)
            }
            // What was never written is zero, or about to be replaced.
            None => (Value::Sums(vec![0; self.elements[&place.0]]), from),
        };
        self.put(place, Resident { value, changed: false, used: self.needs, from, until });
        until
    }

    /// Makes room for so many bytes. Returns the time from which they have it; `None` if what the last
    /// need touches leaves none.
    fn make_room(&mut self, now: Moment, size: u64, omit: Omit) -> Option<Moment> {
        if omit == Omit::Room {
            return Some(now);
        }
        let mut at = now;
        self.leaving.retain(|(until, _)| *until > now);
        loop {
            let leaving = self.leaving.iter().filter(|(until, _)| *until > at);
            let taken = self.resident + size;
            if taken + leaving.map(|(_, bytes)| bytes).sum::<u64>() <= self.scenario.memory.0 {
                return Some(at);
            }
            if taken > self.scenario.memory.0 {
                let (victim, from) = self.victim(omit)?;
                at = at.max(from);
                self.evict(at, victim, omit);
            } else {
                at = self.leaving.iter().map(|(until, _)| *until).find(|until| *until > at)?;
            }
        }
    }

    /// The part that was used longest ago, and not for the last need, and the time at which it is complete.
    fn victim(&self, omit: Omit) -> Option<(Place, Moment)> {
        let oldest = if omit == Omit::InUse {
            self.device.iter().min_by_key(|(_, resident)| resident.from)?
        } else {
            let free = self.device.iter().filter(|(_, resident)| resident.used < self.needs);
            free.min_by_key(|(_, resident)| resident.used)?
        };
        Some((*oldest.0, oldest.1.until))
    }

    fn evict(&mut self, at: Moment, place: Place, omit: Omit) {
        let Some(resident) = self.device.remove(&place) else { return };
        let size = self.size(place);
        self.resident -= size;
        if !resident.changed {
            return;
        }
        self.outward = at.max(self.outward) + self.scenario.rate.time(Bytes(size));
        self.leaving.push_back((self.outward, size));
        if omit == Omit::SumsLeave && matches!(place.1, Part::Sums(_)) {
            self.below.remove(&place);
        } else {
            self.below.insert(place, resident.value);
        }
    }

    fn size(&self, (stage, part): Place) -> u64 {
        let ElementBytes { weights, moments, sums } = self.scenario.element;
        let each = match part {
            Part::Weights => weights,
            Part::Moments => moments,
            Part::Sums(_) => sums,
        };
        self.elements[&stage] as u64 * self.weight * each
    }
}
