//! Chooses the replica that gets the next piece of work.
//!
//! Interleaved weighted round robin (Katevenis et al. 1991; SWARM, arXiv 2301.11913, section 3.2):
//! every candidate has a virtual time that grows by its service time with each piece of work, and
//! the smallest virtual time is next. In the long run, candidates that always have room get work in
//! proportion to their speed.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Step};
use shoal_protocol::units::Moment;

use crate::rng::mixed;
use crate::robust_average::median;

/// Service time of an unmeasured candidate, in nanoseconds, while none is measured.
const UNKNOWN_SERVICE_TIME: u64 = 1_000_000;

/// An answer weighs one part in this many in the running average, once there are that many.
const WEIGHT: u32 = 8;

/// An answer counts as at most this many times the average, so that an outlier has little effect.
const OUTLIER: u64 = 4;

/// A candidate's claimed service time is trusted while its answers take at most this many times the
/// typical ratio to the claim.
const TOLERANCE: u64 = 2;

/// A candidate skipped for being slow is tried again when the others have advanced by the service
/// time of one of its pieces of work. Each attempt that finds it slow doubles that wait, at most
/// this many times: an attempt occupies its engine.
const DOUBLINGS: u32 = 3;

/// Speeds are pieces of work per this many nanoseconds, so that integers suffice.
pub(crate) const PER: u128 = 1_000_000_000_000_000;

/// The speed that corresponds to a service time in nanoseconds.
pub(crate) fn speed(service_time: u64) -> u128 {
    PER / u128::from(service_time.max(1))
}

/// Whether `left` of a step's `all` pieces of work is within the first quarter of the step.
pub(crate) fn is_early(left: usize, all: usize) -> bool {
    left >= all - all / 4
}

/// How the next candidate is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Routing {
    /// By speed and distance, as in training.
    #[default]
    BySpeed,
    /// By speed alone, ignoring distance: a baseline for simulations.
    BySpeedAlone,
    /// In turn, ignoring speed: a baseline.
    InTurn,
    /// Uniformly at random: a baseline.
    AtRandom,
}

/// Repeated choice among members.
#[derive(Debug, Clone)]
pub struct Router {
    seed: u64,
    routing: Routing,
    /// Choices made, and answers received.
    choices: u64,
    answers: u64,
    /// The median of the candidates' overruns: see [`Candidate::overrun`].
    overrun: Option<u64>,
    /// The largest virtual time that was chosen so far. A candidate that returns after a time
    /// without work starts here, so that it does not get all the work at once.
    floor: u64,
    candidates: BTreeMap<Member, Candidate>,
}

/// A position in the order in which candidates are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn(u64, u64);

#[derive(Debug, Clone)]
struct Candidate {
    virtual_time: u64,
    /// Nanoseconds per microbatch as reported by the candidate; `None` before its first report.
    service_time: Option<u64>,
    seen: AnswerStats,
    /// Minimum round-trip time in nanoseconds; 0 if not measured.
    path: u64,
    /// It reported that it is busy, and not yet that it is free.
    busy: bool,
    /// The step of its last piece of work, and the floor at that time.
    last: Option<(Step, u64)>,
    /// Attempts since it was last chosen in time.
    tries: u32,
}

impl Routing {
    /// Whether measured speeds are used.
    #[must_use]
    pub fn is_by_speed(self) -> bool {
        matches!(self, Self::BySpeed | Self::BySpeedAlone)
    }
}

impl Candidate {
    /// A candidate without measurements.
    fn new(virtual_time: u64) -> Self {
        let seen = AnswerStats::default();
        Self { virtual_time, service_time: None, seen, path: 0, busy: false, last: None, tries: 0 }
    }

    /// Ratio of the interval between its answers to its claimed service time, in thousandths. If
    /// others send to it as well, or links are long, it exceeds a thousand, but by about the same
    /// factor for all.
    fn overrun(&self) -> Option<u64> {
        self.seen.overrun()
    }

    /// Records the answer to a request that was sent at a moment.
    fn answers(&mut self, sent: Moment, now: Moment) {
        let since = self.seen.last.map_or(sent, |last| last.max(sent));
        self.seen.last = Some(now);
        let Some(service_time) = self.service_time else { return };
        if self.tries == 0 {
            self.seen.answer(now.since(since), service_time);
        } else if now.since(sent).as_nanos() < u128::from(service_time) {
            // It is faster than reported, and reports that with its next answer to an offer.
            self.last = None;
        }
    }

    /// Its effective service time: the claimed one, unless its overrun exceeds twice the typical
    /// one. Then the observed one.
    fn believed(&self, typical: Option<u64>) -> Option<u64> {
        let service_time = self.service_time?;
        match (self.overrun(), typical) {
            (Some(own), Some(typical)) if own / TOLERANCE > typical => {
                let seen = u128::from(service_time) * u128::from(own) / u128::from(typical.max(1));
                Some(u64::try_from(seen).unwrap_or(u64::MAX / 16))
            }
            _ => Some(service_time),
        }
    }
}

/// Statistics of a candidate's answers.
#[derive(Debug, Clone, Copy, Default)]
struct AnswerStats {
    /// The time of the last answer.
    last: Option<Moment>,
    /// The number of answers averaged.
    count: u32,
    /// Running average of intervals between answers while work was outstanding, in thousandths of
    /// the service time claimed at the time. A candidate that reports a slowdown is therefore not
    /// penalised when it is fast again.
    overrun: u64,
}

impl AnswerStats {
    fn answer(&mut self, interval: Duration, service_time: u64) {
        let overrun = interval.as_nanos() * 1000 / u128::from(service_time.max(1));
        // A single answer that takes very long is an outlier.
        let most =
            if self.count < 2 { u64::MAX / 16 } else { self.overrun.saturating_mul(OUTLIER) };
        let overrun =
            u64::try_from(overrun).unwrap_or(u64::MAX / 16).min(most).clamp(1, u64::MAX / 16);
        self.count = self.count.saturating_add(1);
        let weight = u64::from(self.count.min(WEIGHT));
        self.overrun = self.overrun - self.overrun / weight + overrun / weight;
    }

    /// The average, if there are at least two answers.
    fn overrun(&self) -> Option<u64> {
        (self.count >= 2 && self.overrun > 0).then_some(self.overrun)
    }
}

impl Router {
    /// Creates a router without candidates. The seed orders candidates that are equally good.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::by(Routing::BySpeed, seed)
    }

    /// Creates a router with the given kind of routing.
    #[must_use]
    pub fn by(routing: Routing, seed: u64) -> Self {
        Self {
            seed,
            routing,
            choices: 0,
            answers: 0,
            overrun: None,
            floor: 0,
            candidates: BTreeMap::new(),
        }
    }

    /// The kind of routing.
    #[must_use]
    pub fn routing(&self) -> Routing {
        self.routing
    }

    /// Replaces the candidates. Known ones keep their virtual time; new ones start at the minimum,
    /// so that they are tried early.
    pub fn set_candidates(&mut self, members: impl IntoIterator<Item = Member>) {
        let mut members: Vec<Member> = members.into_iter().collect();
        members.sort_unstable();
        members.dedup();
        // Most membership changes concern other stages.
        if self.candidates.keys().eq(&members) {
            return;
        }
        let mut old = std::mem::take(&mut self.candidates);
        let start =
            old.values().map(|candidate| candidate.virtual_time).min().unwrap_or(self.floor);
        let known = members.into_iter().map(|member| {
            let known = old.remove(&member).unwrap_or_else(|| Candidate::new(start));
            (member, known)
        });
        self.candidates = known.collect();
    }

    /// Records the service time that a candidate claims, in nanoseconds per microbatch; 0 means
    /// unknown.
    pub fn measured(&mut self, member: Member, service_time: u64) {
        let counts = service_time > 0 && self.routing.is_by_speed();
        if let Some(candidate) = self.candidates.get_mut(&member).filter(|_| counts) {
            candidate.service_time = Some(service_time);
        }
    }

    /// Sets the round-trip times to the candidates, as measured from here.
    pub fn set_link_estimates(&mut self, path: impl Fn(&Member) -> Option<Duration>) {
        let counts = self.routing == Routing::BySpeed;
        for (member, candidate) in self.candidates.iter_mut().filter(|_| counts) {
            let nanoseconds = path(member).map_or(0, |path| path.as_nanos());
            candidate.path = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        }
    }

    /// Records a candidate's answer to a request that was sent at a moment. Returns whether
    /// effective service times may have changed.
    pub fn answered(&mut self, member: Member, sent: Moment, now: Moment) -> bool {
        let all = self.candidates.len() as u64;
        let Some(candidate) = self.candidates.get_mut(&member) else { return false };
        candidate.answers(sent, now);
        self.answers += 1;
        // The median over many candidates is not recomputed with every answer.
        let looks = self.answers.is_multiple_of(all.max(u64::from(WEIGHT)));
        if looks {
            let overruns = self.candidates.values().filter_map(Candidate::overrun);
            let mut overruns: Vec<u64> = overruns.collect();
            self.overrun = median(&mut overruns);
        }
        looks
    }

    /// A candidate's effective service time in nanoseconds; `None` before its first report.
    pub(crate) fn believed(&self, member: Member) -> Option<u64> {
        self.candidates.get(&member)?.believed(self.overrun)
    }

    /// Excludes a candidate from the choice until it is free.
    pub fn set_busy(&mut self, member: Member) {
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.busy = true;
        }
    }

    /// Includes a candidate again. Returns whether it was excluded.
    pub fn set_free(&mut self, member: Member) -> bool {
        let floor = self.floor;
        let Some(candidate) = self.candidates.get_mut(&member) else { return false };
        candidate.virtual_time = candidate.virtual_time.max(floor);
        std::mem::take(&mut candidate.busy)
    }

    /// Includes all candidates again.
    pub fn set_all_free(&mut self) {
        let members: Vec<Member> = self.candidates.keys().copied().collect();
        for member in members {
            self.set_free(member);
        }
    }

    /// Chooses the next candidate among those that are not busy, and charges it.
    pub fn choose(&mut self) -> Option<Member> {
        self.choose_where(|_| true)
    }

    /// Chooses the next candidate among those that are not busy and eligible, and charges it.
    pub fn choose_where(&mut self, eligible: impl Fn(&Member) -> bool) -> Option<Member> {
        let able = self
            .candidates
            .iter()
            .filter(|(member, candidate)| !candidate.busy && eligible(member));
        let member = self.next_of(able)?;
        Some(self.chosen(member))
    }

    /// Chooses like [`Self::choose_where`] among some of the candidates, each of which would finish
    /// in time for this step's end.
    pub fn choose_of(
        &mut self,
        step: Step,
        members: impl IntoIterator<Item = Member>,
    ) -> Option<Member> {
        let known = members.into_iter().filter_map(|member| {
            let candidate = self.candidates.get(&member).filter(|candidate| !candidate.busy)?;
            Some((self.turn(candidate), self.tie_break(&member), member))
        });
        let (_, _, member) = known.min()?;
        Some(self.chosen_for(step, member))
    }

    /// Whether a candidate that would be late at this step's end may get one piece of its work all
    /// the same: only an attempt shows whether it is still slow.
    pub(crate) fn may_try(&self, step: Step, member: Member) -> bool {
        self.candidates.get(&member).is_some_and(|known| self.is_due(step, known))
    }

    fn is_due(&self, step: Step, known: &Candidate) -> bool {
        let Some((last, then)) = known.last else { return true };
        let service_time = known.believed(self.overrun).unwrap_or(0);
        let wait = service_time.saturating_mul(1 << known.tries.min(DOUBLINGS));
        step.0.abs_diff(last.0) > 1 && self.floor.saturating_sub(then) >= wait
    }

    /// Gives a late candidate a piece of work without compensation for the work that it did not
    /// get. Its answers count half as much from then on, so that it can recover.
    pub(crate) fn tries(&mut self, step: Step, member: Member) -> Member {
        let floor = self.floor;
        let mut tries = 0;
        if let Some(known) = self.candidates.get_mut(&member) {
            known.virtual_time = known.virtual_time.max(floor);
            known.seen.overrun /= 2;
            tries = known.tries.saturating_add(1);
        }
        self.chosen_for(step, member);
        if let Some(known) = self.candidates.get_mut(&member) {
            known.tries = tries;
        }
        member
    }

    /// A candidate's position in the order of choice: lower before higher, unless the choice is
    /// random.
    pub(crate) fn turn_of(&self, member: Member) -> Option<Turn> {
        let candidate = self.candidates.get(&member)?;
        Some(Turn(self.turn(candidate), self.tie_break(&member)))
    }

    /// The candidate with the smallest virtual time.
    fn next_of<'a>(
        &self,
        able: impl Iterator<Item = (&'a Member, &'a Candidate)>,
    ) -> Option<Member> {
        let key = |(member, candidate): &(&Member, &Candidate)| {
            (self.turn(candidate), self.tie_break(member))
        };
        able.min_by_key(key).map(|(member, _)| *member)
    }

    /// Charges a chosen candidate.
    fn chosen(&mut self, member: Member) -> Member {
        self.choices += 1;
        let time = self.candidates[&member].virtual_time;
        self.floor = self.floor.max(time);
        self.charge(member);
        member
    }

    /// Charges a candidate that would finish in time for a step's end.
    fn chosen_for(&mut self, step: Step, member: Member) -> Member {
        self.chosen(member);
        let floor = self.floor;
        if let Some(known) = self.candidates.get_mut(&member) {
            known.last = Some((step, floor));
            known.tries = 0;
        }
        member
    }

    /// Chooses like [`Self::choose_where`] for a piece of work that `following` others follow
    /// before its step's end. It skips candidates whose answer would arrive after all candidates
    /// together could finish those, because they are slow or far. Near the step's beginning
    /// (`early`) it may try one that was skipped for long.
    pub fn choose_in_time(
        &mut self,
        step: Step,
        (following, early): (u64, bool),
        eligible: impl Fn(&Member) -> bool,
    ) -> Option<Member> {
        let overrun = self.overrun;
        let able = self.candidates.iter().filter(|(member, _)| eligible(member));
        let able: Vec<(&Member, &Candidate)> = able.collect();
        // Time until its answer arrives.
        let takes = |known: &Candidate| {
            let service_time = known.believed(overrun)?;
            Some(u128::from(service_time) + u128::from(known.path))
        };
        let (mut soonest, mut together) = (u128::MAX, 0u128);
        for (_, known) in &able {
            soonest = soonest.min(takes(known).unwrap_or(u128::MAX));
            together += known.believed(overrun).map_or(0, speed);
        }
        let rest = u128::from(following) * PER / together.max(1);
        let longest = soonest.saturating_add(rest);
        let late = |known: &Candidate| takes(known).is_some_and(|takes| takes > longest);
        let free = || able.iter().copied().filter(|(_, known)| !known.busy);
        let mut tried =
            free().filter(|(_, known)| early && late(known) && self.is_due(step, known));
        if let Some(member) = tried.next().map(|(member, _)| *member) {
            return Some(self.tries(step, member));
        }
        let member = self.next_of(free().filter(|(_, known)| !late(known)))?;
        Some(self.chosen_for(step, member))
    }

    /// Charges a candidate for a piece of work that it got without a choice.
    pub fn charge(&mut self, member: Member) {
        let service_time = self.charged(member);
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.virtual_time = candidate.virtual_time.saturating_add(service_time);
        }
    }

    /// Refunds a candidate that did not accept the work.
    pub fn refund(&mut self, member: Member) {
        let service_time = self.charged(member);
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.virtual_time = candidate.virtual_time.saturating_sub(service_time);
        }
    }

    /// Virtual time that a piece of work costs a candidate.
    fn charged(&self, member: Member) -> u64 {
        let known = self.candidates.get(&member).and_then(|known| known.believed(self.overrun));
        known.unwrap_or_else(|| self.mean_service_time()).max(1)
    }

    /// Mean service time of the measured candidates.
    fn mean_service_time(&self) -> u64 {
        let service_times =
            || self.candidates.values().filter_map(|known| known.believed(self.overrun));
        match service_times().count() as u64 {
            0 => UNKNOWN_SERVICE_TIME,
            count => (service_times().map(u128::from).sum::<u128>() / u128::from(count)) as u64,
        }
    }

    /// The primary key of the order of choice: virtual time.
    fn turn(&self, candidate: &Candidate) -> u64 {
        if self.routing == Routing::AtRandom { 0 } else { candidate.virtual_time }
    }

    /// Orders candidates with equal virtual time. The order differs between routers and is fixed
    /// for each, except with random routing.
    fn tie_break(&self, member: &Member) -> u64 {
        let bytes = member.peer.0.first_chunk::<8>().expect("a peer id has 32 bytes");
        let seed = match self.routing {
            Routing::AtRandom => mixed(self.seed, self.choices),
            Routing::BySpeed | Routing::BySpeedAlone | Routing::InTurn => self.seed,
        };
        mixed(u64::from_le_bytes(*bytes), seed)
    }
}

#[cfg(test)]
mod tests;
