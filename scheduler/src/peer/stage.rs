//! One hosted stage: its room, its pace, and the way onward from it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Member, Microbatch, Step};
use shoal_protocol::message::proof_tag;

use crate::robust_average::RobustAverage;
use crate::router::Router;

/// One hosted stage.
#[derive(Debug)]
pub(super) struct Hosted {
    /// Microbatches that may take up room.
    pub(super) window: usize,
    /// What the window never grows beyond.
    pub(super) largest_window: usize,
    /// How many microbatches of each step take up room. A later step's must not keep an older one from
    /// ending, so each has room of its own.
    taken: BTreeMap<Step, usize>,
    /// Offers that wait for room, oldest step and lowest microbatch first.
    pub(super) offers: BTreeMap<(Step, Microbatch), Waiting>,
    /// Work of open steps that was refused or dropped here: if it is offered again, another replica
    /// may have taken it meanwhile.
    pub(super) refused: BTreeSet<(Step, Microbatch)>,
    /// Who was told that this stage is busy, and the step it asked about last.
    pub(super) turned_away: BTreeMap<Member, Step>,
    /// Whose work was let go of as late, and what.
    pub(super) let_down: BTreeMap<Member, ClaimKey>,
    /// Work of this stage whose activation nobody takes now.
    pub(super) blocked: BTreeSet<ClaimKey>,
    /// The replicas of the next stage, or some, and which part of them these are.
    pub(super) onward: Router,
    pub(super) part: Part,
    pub(super) service_time: ServiceTime,
    /// What is in the accumulator of each step.
    counted: BTreeMap<Step, Counted>,
}

/// What is in a step's accumulator.
#[derive(Debug, Clone, Default)]
pub(super) struct Counted {
    pub(super) microbatches: BTreeSet<Microbatch>,
    /// The sum of their tags.
    pub(super) proof: u64,
}

impl Hosted {
    pub(super) fn new(window: usize, largest_window: usize, onward: Router) -> Self {
        assert!(window > 0 && window <= largest_window, "a stage has room");
        Self {
            window,
            largest_window,
            taken: BTreeMap::new(),
            offers: BTreeMap::new(),
            refused: BTreeSet::new(),
            turned_away: BTreeMap::new(),
            let_down: BTreeMap::new(),
            blocked: BTreeSet::new(),
            onward,
            part: Part::default(),
            service_time: ServiceTime::default(),
            counted: BTreeMap::new(),
        }
    }

    /// A microbatch is in its step's accumulator.
    pub(super) fn count(&mut self, key: ClaimKey) {
        let counted = self.counted.entry(key.step).or_default();
        counted.microbatches.insert(key.microbatch);
        counted.proof = counted.proof.wrapping_add(proof_tag(key));
    }

    /// What a step's accumulator holds.
    pub(super) fn counted(&self, step: Step) -> Counted {
        self.counted.get(&step).cloned().unwrap_or_default()
    }

    /// Forgets what is of steps before this one.
    pub(super) fn forget_before(&mut self, step: Step) {
        self.counted.retain(|of, _| *of >= step);
        self.offers.retain(|(of, _), _| *of >= step);
        self.refused.retain(|(of, _)| *of >= step);
    }

    /// How many more microbatches of a step it can take in.
    pub(super) fn room(&self, step: Step) -> usize {
        self.window.saturating_sub(self.taken(step))
    }

    /// Takes out the first offer whose step has room: what waits is of steps that have none.
    pub(super) fn next_offer(&mut self) -> Option<((Step, Microbatch), Waiting)> {
        let mut places = self.offers.keys();
        let place = *places.find(|(step, _)| self.room(*step) > 0)?;
        self.offers.remove_entry(&place)
    }

    /// Whether a step's microbatches take up the whole window.
    pub(super) fn is_full(&self, step: Step) -> bool {
        self.taken(step) >= self.window
    }

    /// The most microbatches of one step that take up room.
    pub(super) fn accepted(&self) -> usize {
        self.taken.values().copied().max().unwrap_or(0)
    }

    /// A microbatch of this step is taken in.
    pub(super) fn take(&mut self, step: Step) {
        *self.taken.entry(step).or_default() += 1;
    }

    /// A microbatch of this step takes up no more room.
    pub(super) fn give_room_back(&mut self, step: Step) {
        let taken = self.taken.get_mut(&step).expect("it was taken in");
        *taken -= 1;
        if *taken == 0 {
            self.taken.remove(&step);
        }
    }

    /// Forgets everything about work, none of which is left: all is done again.
    pub(super) fn forget_work(&mut self) {
        assert!(self.taken.is_empty(), "no work is left");
        self.offers.clear();
        self.refused.clear();
        self.turned_away.clear();
        self.let_down.clear();
        self.blocked.clear();
        self.counted.clear();
        self.onward.set_all_free();
    }

    fn taken(&self, step: Step) -> usize {
        self.taken.get(&step).copied().unwrap_or_default()
    }
}

/// An offer that waits for room.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) from: Member,
    pub(super) retry: bool,
}

/// Which part of a stage's replicas some are that were met among so many of all members, in an order that
/// is random: about the same part of the members it took to meet them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) met: usize,
    pub(super) members: usize,
}

impl Default for Part {
    fn default() -> Self {
        Self { met: 1, members: 1 }
    }
}

impl Part {
    /// This part of so much.
    pub(super) fn of(self, all: u64) -> u64 {
        let part = u128::from(all) * self.met as u128 / self.members.max(1) as u128;
        u64::try_from(part).unwrap_or(all)
    }
}

/// How long the engine needs for one microbatch.
#[derive(Debug, Default)]
pub(super) struct ServiceTime {
    forward: RobustAverage,
    backward: RobustAverage,
}

impl ServiceTime {
    pub(super) fn ran_forward(&mut self, busy: Duration) {
        self.forward.add(busy);
    }

    pub(super) fn ran_backward(&mut self, busy: Duration) {
        self.backward.add(busy);
    }

    /// Nanoseconds for both passes; none while one is not measured.
    pub(super) fn nanoseconds(&self) -> Option<u64> {
        Some(self.forward.nanoseconds()? + self.backward.nanoseconds()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_follows_what_is_measured() {
        let mut service_time = ServiceTime::default();
        service_time.ran_forward(Duration::from_nanos(800));
        assert_eq!(service_time.nanoseconds(), None);
        service_time.ran_backward(Duration::from_nanos(1600));
        assert_eq!(service_time.nanoseconds(), Some(2400));
        service_time.ran_backward(Duration::from_nanos(800));
        assert_eq!(service_time.nanoseconds(), Some(800 + 1200));
    }
}
