//! One hosted stage: its room, its queue of offers, its measured times and its accumulator's contents.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Member, Microbatch, Stage, Step};
use shoal_protocol::message::proof_tag;

use crate::peer::config::PeerConfig;
use crate::robust_average::RobustAverage;
use crate::schedule::first_window;

/// One hosted stage.
#[derive(Debug)]
pub(super) struct HostedStage {
    /// Microbatches of one step that may occupy room.
    window: usize,
    /// The upper limit of the window.
    largest_window: usize,
    /// The window that this one narrows to as its work ends, where it is to begin anew.
    narrows_to: Option<usize>,
    /// Stages after this one.
    behind: usize,
    /// Microbatches that occupy room, by step. Each step has its own room, since a later step's must not
    /// keep an older one from ending.
    occupied: BTreeMap<Step, usize>,
    /// Offers that wait for room, oldest step and lowest microbatch first.
    pub(super) offers: BTreeMap<(Step, Microbatch), QueuedOffer>,
    /// Refused or dropped work of open steps: another replica may hold its claim when it is offered again.
    refused: BTreeSet<(Step, Microbatch)>,
    /// Refused senders that wait for room, each with the step of its last offer.
    waiting_senders: BTreeMap<Member, Step>,
    /// Senders of work that was released as late, and that work.
    late_senders: BTreeMap<Member, ClaimKey>,
    pub(super) times: PassTimes,
    /// The contents of each step's accumulator.
    counted: BTreeMap<Step, Counted>,
}

/// The contents of a step's accumulators.
#[derive(Debug, Clone, Default)]
pub(in crate::peer) struct Counted {
    pub(in crate::peer) microbatches: BTreeSet<(Stage, Microbatch)>,
    /// The sum of their tags.
    pub(in crate::peer) proof: u64,
}

/// An offer that waits for room.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueuedOffer {
    pub(super) from: Member,
    pub(super) retry: bool,
}

impl HostedStage {
    /// A stage of a peer that hosts so many, each with its share of the limits.
    pub(super) fn new(config: &PeerConfig, stage: Stage, hosted: usize) -> Self {
        let manifest = &config.manifest;
        let behind = usize::from(manifest.last_stage().0 - stage.0);
        let window = window_at_first(config, behind, hosted);
        assert!(window > 0, "a stage has room");
        Self {
            window,
            largest_window: largest_window(config, hosted),
            narrows_to: None,
            behind,
            occupied: BTreeMap::new(),
            offers: BTreeMap::new(),
            refused: BTreeSet::new(),
            waiting_senders: BTreeMap::new(),
            late_senders: BTreeMap::new(),
            times: PassTimes::default(),
            counted: BTreeMap::new(),
        }
    }

    pub(super) fn window(&self) -> usize {
        self.window
    }

    /// Adapts the window's limit to the number of hosted stages.
    pub(super) fn set_share(&mut self, config: &PeerConfig, hosted: usize) {
        self.largest_window = largest_window(config, hosted);
        if config.limits.swaps(hosted) {
            self.window = self.window.max(config.limits.first_swapped_window);
        }
        self.narrow();
    }

    /// The window begins anew, in a span of so many stages: it was as wide as links needed that are not used any more, and
    /// a replica with a wider window than others takes more than its part.
    pub(super) fn begin_window(&mut self, config: &PeerConfig, hosted: usize) {
        self.narrows_to = Some(window_at_first(config, self.behind, hosted));
        self.narrow();
    }

    /// Narrows the window to its limit, as far as it is not occupied.
    fn narrow(&mut self) {
        let limit = self.largest_window.min(self.narrows_to.unwrap_or(usize::MAX));
        self.window = self.window.min(limit.max(self.accepted()));
        self.narrows_to.take_if(|narrow| self.window <= *narrow);
    }

    /// Widens the window by so many, up to its limit. Returns whether it did.
    pub(super) fn widen(&mut self, more: usize) -> bool {
        let widens = self.window < self.largest_window && self.narrows_to.is_none();
        if widens {
            self.window = (self.window + more).min(self.largest_window);
        }
        widens
    }

    /// Adds a microbatch to its step's accumulator.
    pub(super) fn count(&mut self, key: ClaimKey) {
        let counted = self.counted.entry(key.step).or_default();
        counted.microbatches.insert((key.stage, key.microbatch));
        counted.proof = counted.proof.wrapping_add(proof_tag(key));
    }

    pub(super) fn counted(&self, step: Step) -> Counted {
        self.counted.get(&step).cloned().unwrap_or_default()
    }

    /// Forgets earlier steps.
    pub(super) fn forget_before(&mut self, step: Step) {
        self.counted.retain(|of, _| *of >= step);
        self.offers.retain(|(of, _), _| *of >= step);
        self.refused.retain(|(of, _)| *of >= step);
    }

    /// Microbatches of a step for which there is room.
    pub(super) fn room(&self, step: Step) -> usize {
        self.window.saturating_sub(self.occupied_in(step))
    }

    /// Takes the first offer whose step has room. The other steps' offers wait.
    pub(super) fn next_offer(&mut self) -> Option<((Step, Microbatch), QueuedOffer)> {
        let mut places = self.offers.keys();
        let place = *places.find(|(step, _)| self.room(*step) > 0)?;
        self.offers.remove_entry(&place)
    }

    /// Removes the offers of a step and later ones.
    pub(super) fn take_offers_from(
        &mut self,
        step: Step,
    ) -> BTreeMap<(Step, Microbatch), QueuedOffer> {
        self.offers.split_off(&(step, Microbatch(0)))
    }

    /// Whether senders wait for room.
    pub(super) fn has_waiting(&self) -> bool {
        !self.offers.is_empty() || !self.waiting_senders.is_empty()
    }

    /// Whether a step's microbatches occupy the whole window.
    pub(super) fn is_full(&self, step: Step) -> bool {
        self.occupied_in(step) >= self.window
    }

    /// The most microbatches of one step that occupy room.
    pub(super) fn accepted(&self) -> usize {
        self.occupied.values().copied().max().unwrap_or(0)
    }

    /// Gives room to a microbatch of this step.
    pub(super) fn occupy(&mut self, step: Step) {
        *self.occupied.entry(step).or_default() += 1;
    }

    /// Takes the room of a microbatch of this step back.
    pub(super) fn vacate(&mut self, step: Step) {
        let occupied = self.occupied.get_mut(&step).expect("it was occupied");
        *occupied -= 1;
        if *occupied == 0 {
            self.occupied.remove(&step);
        }
        self.narrow();
    }

    pub(super) fn note_refused(&mut self, key: ClaimKey) {
        self.refused.insert((key.step, key.microbatch));
    }

    pub(super) fn was_refused(&self, key: ClaimKey) -> bool {
        self.refused.contains(&(key.step, key.microbatch))
    }

    /// Remembers a refused sender, up to so many, until there is room.
    pub(super) fn add_waiting_sender(&mut self, from: Member, step: Step, most: usize) {
        if self.waiting_senders.len() < most || self.waiting_senders.contains_key(&from) {
            self.waiting_senders.insert(from, step);
        }
    }

    pub(super) fn remove_waiting_sender(&mut self, from: Member) {
        self.waiting_senders.remove(&from);
    }

    /// Takes the refused senders for which there is a place: in the queue, or room in their step.
    pub(super) fn take_served_senders(&mut self, places: usize, version: Step) -> Vec<Member> {
        let queue_full = self.offers.len() >= places;
        let all = std::mem::take(&mut self.waiting_senders);
        let (waiting, served): (BTreeMap<_, _>, BTreeMap<_, _>) = all
            .into_iter()
            .partition(|(_, step)| queue_full && self.room((*step).max(version)) == 0);
        self.waiting_senders = waiting;
        served.into_keys().collect()
    }

    /// Remembers the sender of released work that was stolen, up to so many, until there is room.
    pub(super) fn add_stolen_sender(&mut self, from: Member, step: Step, most: usize) {
        if self.waiting_senders.len() < most {
            self.waiting_senders.insert(from, step);
        }
    }

    /// Remembers the sender of released late work, up to so many, until the engine ends a pass.
    pub(super) fn add_late_sender(&mut self, from: Member, key: ClaimKey, most: usize) {
        if self.late_senders.len() < most {
            self.late_senders.insert(from, key);
        }
    }

    pub(super) fn has_late(&self, key: ClaimKey) -> bool {
        self.late_senders.values().any(|late| *late == key)
    }

    pub(super) fn take_late_senders(&mut self) -> BTreeMap<Member, ClaimKey> {
        std::mem::take(&mut self.late_senders)
    }

    /// Forgets departed senders.
    pub(super) fn remove_senders(&mut self, departed: &BTreeSet<Member>) {
        self.offers.retain(|_, offer| !departed.contains(&offer.from));
        self.waiting_senders.retain(|member, _| !departed.contains(member));
    }

    /// Forgets all work, of which none has room, for a rewind.
    pub(super) fn forget_work(&mut self) {
        assert!(self.occupied.is_empty(), "no work is left");
        self.offers.clear();
        self.refused.clear();
        self.waiting_senders.clear();
        self.late_senders.clear();
        self.counted.clear();
    }

    fn occupied_in(&self, step: Step) -> usize {
        self.occupied.get(&step).copied().unwrap_or_default()
    }
}

/// The window of one of so many hosted stages at first, with so many stages of the run behind it.
fn window_at_first(config: &PeerConfig, behind: usize, hosted: usize) -> usize {
    let limits = &config.limits;
    let devices = usize::from(config.candidate.devices.get());
    let swaps = limits.swaps(hosted);
    let window = if swaps { limits.first_swapped_window } else { limits.first_window };
    window.max(devices * first_window(behind)).min(largest_window(config, hosted))
}

/// The upper limit of the window of one of so many hosted stages.
fn largest_window(config: &PeerConfig, hosted: usize) -> usize {
    let (limits, manifest) = (&config.limits, &config.manifest);
    let round_trip = manifest.activation_bytes() + manifest.gradient_bytes();
    // One more step's work is accepted before the first of them ends, and that step's work is accepted
    // again after the loss of a member.
    let steps = manifest.steps_at_once() + 1;
    let exchanges = u64::from(manifest.exchanges_at_once());
    let share = limits.in_flight.0 / hosted as u64 / steps / (round_trip.0 * exchanges);
    let most = if manifest.workers_exchange() {
        // Each worker has weights and an optimizer of its own, and fills the pipeline with the passes of an update.
        usize::from(config.candidate.devices.get()).min(limits.largest_window(hosted))
    } else {
        limits.largest_window(hosted)
    };
    (most as u64).min(share).max(1) as usize
}

/// The measured times of the passes of one microbatch.
#[derive(Debug, Default)]
pub(super) struct PassTimes {
    forward: RobustAverage,
    backward: RobustAverage,
    /// The addition of weight gradients, where backward passes leave products to it.
    addition: RobustAverage,
}

impl PassTimes {
    pub(super) fn add_forward(&mut self, busy: Duration) {
        self.forward.add(busy);
    }

    pub(super) fn add_backward(&mut self, busy: Duration) {
        self.backward.add(busy);
    }

    pub(super) fn add_addition(&mut self, busy: Duration) {
        self.addition.add(busy);
    }

    /// Nanoseconds for both passes and what follows them, once both are measured.
    pub(super) fn nanoseconds(&self) -> Option<u64> {
        let addition = self.addition.nanoseconds().unwrap_or(0);
        Some(self.forward.nanoseconds()? + self.backward.nanoseconds()? + addition)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_follow_the_measurements() {
        let mut times = PassTimes::default();
        times.add_forward(Duration::from_nanos(800));
        assert_eq!(times.nanoseconds(), None);
        times.add_backward(Duration::from_nanos(1600));
        assert_eq!(times.nanoseconds(), Some(2400));
        times.add_backward(Duration::from_nanos(800));
        assert_eq!(times.nanoseconds(), Some(800 + 1200));
        times.add_addition(Duration::from_nanos(500));
        assert_eq!(times.nanoseconds(), Some(800 + 1200 + 500));
    }
}
