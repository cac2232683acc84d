//! To which of several equals the next piece of work goes.
//!
//! Interleaved weighted round robin (Katevenis et al. 1991; SWARM, arXiv 2301.11913, section 3.2):
//! every candidate has a virtual time that grows by its pace with each piece of work it gets, and
//! the smallest virtual time is next. Over any while, candidates that always have room get work in
//! proportion to their speed.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Step};
use shoal_protocol::units::Moment;

use crate::rng::mixed;
use crate::robust_average::median;

/// What an unmeasured candidate is taken to need while nobody is measured.
const UNKNOWN_PACE: u64 = 1_000_000;

/// One answer counts for a part in so many of what is seen, when there are so many.
const WEIGHT: u32 = 8;

/// For so many times as much as on average an answer counts at most.
const ACCIDENT: u64 = 4;

/// So many times as much as is typical may a candidate's answers take of what it claims.
const BELIEVED: u64 = 2;

/// Who is left out for being slow is tried again when others were given as much as it could have done one
/// piece meanwhile, and twice as much with each try that finds it slow, so often at most: what it tries keeps
/// its engine from all else.
const DOUBLINGS: u32 = 3;

/// Speeds are pieces of work in so many nanoseconds, so that integers do.
pub(crate) const PER: u128 = 1_000_000_000_000_000;

/// The speed of who needs so many nanoseconds for a piece of work.
pub(crate) fn speed(service_time: u64) -> u128 {
    PER / u128::from(service_time.max(1))
}

/// Whether so many of all pieces of a step's work are left near its beginning.
pub(crate) fn is_early(left: usize, all: usize) -> bool {
    left >= all - all / 4
}

/// By what the next candidate is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Routing {
    /// By speed, as a swarm does.
    #[default]
    BySpeed,
    /// By speed alone, whoever is near: what a simulation is compared with.
    BySpeedAlone,
    /// One after the other: the same.
    InTurn,
    /// Any, each as likely as another: the same.
    AtRandom,
}

/// One choice among members, again and again.
#[derive(Debug, Clone)]
pub struct Router {
    seed: u64,
    routing: Routing,
    /// Choices made, and answers seen.
    choices: u64,
    answers: u64,
    /// What is typical of candidates: see [`Candidate::boast`].
    boast: Option<u64>,
    /// The largest virtual time that was ever chosen as the smallest. Who comes back after a while
    /// without work starts here, so that it does not get everything at once.
    floor: u64,
    candidates: BTreeMap<Member, Candidate>,
}

/// A place in the order in which candidates are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn(u64, u64);

#[derive(Debug, Clone)]
struct Candidate {
    virtual_time: u64,
    /// Nanoseconds for one microbatch, as it says; none while it says nothing.
    service_time: Option<u64>,
    seen: Seen,
    /// Nanoseconds there and back at least; 0 while it is not measured.
    path: u64,
    /// It said so, and has not taken that back.
    busy: bool,
    /// The step of which it had something last, and the floor by then.
    last: Option<(Step, u64)>,
    /// How often it was tried since it was last chosen in time.
    tries: u32,
}

impl Routing {
    /// Whether speeds count.
    #[must_use]
    pub fn is_by_speed(self) -> bool {
        matches!(self, Self::BySpeed | Self::BySpeedAlone)
    }
}

impl Candidate {
    /// One that nothing is known of.
    fn new(virtual_time: u64) -> Self {
        let seen = Seen::default();
        Self { virtual_time, service_time: None, seen, path: 0, busy: false, last: None, tries: 0 }
    }

    /// How many thousandths of the pace that it claims its answers take. Where others send to it as
    /// well and links are long that is more than a thousand, but about as much more for all.
    fn boast(&self) -> Option<u64> {
        self.seen.boast()
    }

    /// It answers what was sent to it at a moment.
    fn answers(&mut self, sent: Moment, now: Moment) {
        let since = self.seen.last.map_or(sent, |last| last.max(sent));
        self.seen.last = Some(now);
        let Some(service_time) = self.service_time else { return };
        if self.tries == 0 {
            self.seen.answer(now.since(since), service_time);
        } else if now.since(sent).as_nanos() < u128::from(service_time) {
            // It is faster than it said, and says so with its next answer to an offer.
            self.last = None;
        }
    }

    /// The pace that it is believed to have: what it claims, unless its answers take more than twice
    /// as much of that as is typical. Then what is seen counts.
    fn believed(&self, robust_average: Option<u64>) -> Option<u64> {
        let service_time = self.service_time?;
        match (self.boast(), robust_average) {
            (Some(own), Some(robust_average)) if own / BELIEVED > robust_average => {
                let seen =
                    u128::from(service_time) * u128::from(own) / u128::from(robust_average.max(1));
                Some(u64::try_from(seen).unwrap_or(u64::MAX / 16))
            }
            _ => Some(service_time),
        }
    }
}

/// What was seen of a candidate's answers.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// When the last one came.
    last: Option<Moment>,
    /// How many count.
    count: u32,
    /// Thousandths of the pace that it claimed from one to the next while it had something to answer, on
    /// average. Who said that it became slower does not boast when it is fast again.
    boast: u64,
}

impl Seen {
    fn answer(&mut self, interval: Duration, service_time: u64) {
        let boast = interval.as_nanos() * 1000 / u128::from(service_time.max(1));
        // One of many that takes very long is an accident.
        let most = if self.count < 2 { u64::MAX / 16 } else { self.boast.saturating_mul(ACCIDENT) };
        let boast = u64::try_from(boast).unwrap_or(u64::MAX / 16).min(most).clamp(1, u64::MAX / 16);
        self.count = self.count.saturating_add(1);
        let weight = u64::from(self.count.min(WEIGHT));
        self.boast = self.boast - self.boast / weight + boast / weight;
    }

    /// The average, where it is one.
    fn boast(&self) -> Option<u64> {
        (self.count >= 2 && self.boast > 0).then_some(self.boast)
    }
}

impl Router {
    /// A router without candidates. The seed orders candidates that are equally good.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::by(Routing::BySpeed, seed)
    }

    /// The same with another way to choose.
    #[must_use]
    pub fn by(routing: Routing, seed: u64) -> Self {
        Self {
            seed,
            routing,
            choices: 0,
            answers: 0,
            boast: None,
            floor: 0,
            candidates: BTreeMap::new(),
        }
    }

    /// By what it chooses.
    #[must_use]
    pub fn routing(&self) -> Routing {
        self.routing
    }

    /// Makes these members the candidates. Who was one keeps its time; newcomers start at the
    /// minimum, so that they are tried early.
    pub fn set_candidates(&mut self, members: impl IntoIterator<Item = Member>) {
        let mut members: Vec<Member> = members.into_iter().collect();
        members.sort_unstable();
        members.dedup();
        // Most changes of a membership are about others.
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

    /// The pace that a candidate claims in nanoseconds per microbatch; 0 says nothing.
    pub fn measured(&mut self, member: Member, service_time: u64) {
        let counts = service_time > 0 && self.routing.is_by_speed();
        if let Some(candidate) = self.candidates.get_mut(&member).filter(|_| counts) {
            candidate.service_time = Some(service_time);
        }
    }

    /// How long the ways to candidates and back take, as was measured from here.
    pub fn set_link_estimates(&mut self, path: impl Fn(&Member) -> Option<Duration>) {
        let counts = self.routing == Routing::BySpeed;
        for (member, candidate) in self.candidates.iter_mut().filter(|_| counts) {
            let nanoseconds = path(member).map_or(0, |path| path.as_nanos());
            candidate.path = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        }
    }

    /// A candidate answered what was sent to it at a moment. Returns whether others may be believed to have
    /// other paces since.
    pub fn answered(&mut self, member: Member, sent: Moment, now: Moment) -> bool {
        let all = self.candidates.len() as u64;
        let Some(candidate) = self.candidates.get_mut(&member) else { return false };
        candidate.answers(sent, now);
        self.answers += 1;
        // All of many are not looked at with each few answers.
        let looks = self.answers.is_multiple_of(all.max(u64::from(WEIGHT)));
        if looks {
            let boasts = self.candidates.values().filter_map(Candidate::boast);
            let mut boasts: Vec<u64> = boasts.collect();
            self.boast = median(&mut boasts);
        }
        looks
    }

    /// Nanoseconds that a candidate is believed to need for a piece of work; none while it says nothing.
    pub(crate) fn believed(&self, member: Member) -> Option<u64> {
        self.candidates.get(&member)?.believed(self.boast)
    }

    /// Takes a candidate out of the choice until it is free.
    pub fn set_busy(&mut self, member: Member) {
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.busy = true;
        }
    }

    /// Takes a candidate back into the choice. Returns whether it had been out of it.
    pub fn set_free(&mut self, member: Member) -> bool {
        let floor = self.floor;
        let Some(candidate) = self.candidates.get_mut(&member) else { return false };
        candidate.virtual_time = candidate.virtual_time.max(floor);
        std::mem::take(&mut candidate.busy)
    }

    /// Takes all candidates back into the choice.
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

    /// The same among some of the candidates, any of whom would be in time for this step's end.
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

    /// Whether a candidate that would be late at this step's end may have one piece of its work all the
    /// same: nothing else shows whether it is as slow as it was.
    pub(crate) fn may_try(&self, step: Step, member: Member) -> bool {
        self.candidates.get(&member).is_some_and(|known| self.is_due(step, known))
    }

    fn is_due(&self, step: Step, known: &Candidate) -> bool {
        let Some((last, then)) = known.last else { return true };
        let service_time = known.believed(self.boast).unwrap_or(0);
        let wait = service_time.saturating_mul(1 << known.tries.min(DOUBLINGS));
        step.0.abs_diff(last.0) > 1 && self.floor.saturating_sub(then) >= wait
    }

    /// A candidate that would be late gets a piece of work, and nothing for what it did not get before. It
    /// answers for itself: what was seen of its answers counts half as much.
    pub(crate) fn tries(&mut self, step: Step, member: Member) -> Member {
        let floor = self.floor;
        let mut tries = 0;
        if let Some(known) = self.candidates.get_mut(&member) {
            known.virtual_time = known.virtual_time.max(floor);
            known.seen.boast /= 2;
            tries = known.tries.saturating_add(1);
        }
        self.chosen_for(step, member);
        if let Some(known) = self.candidates.get_mut(&member) {
            known.tries = tries;
        }
        member
    }

    /// When it is a candidate's turn: the lower before the higher, unless chance alone decides.
    pub(crate) fn turn_of(&self, member: Member) -> Option<Turn> {
        let candidate = self.candidates.get(&member)?;
        Some(Turn(self.turn(candidate), self.tie_break(&member)))
    }

    /// Whose turn it is.
    fn next_of<'a>(
        &self,
        able: impl Iterator<Item = (&'a Member, &'a Candidate)>,
    ) -> Option<Member> {
        let key = |(member, candidate): &(&Member, &Candidate)| {
            (self.turn(candidate), self.tie_break(member))
        };
        able.min_by_key(key).map(|(member, _)| *member)
    }

    /// A candidate is chosen.
    fn chosen(&mut self, member: Member) -> Member {
        self.choices += 1;
        let time = self.candidates[&member].virtual_time;
        self.floor = self.floor.max(time);
        self.charge(member);
        member
    }

    /// A candidate is chosen that would be in time for a step's end.
    fn chosen_for(&mut self, step: Step, member: Member) -> Member {
        self.chosen(member);
        let floor = self.floor;
        if let Some(known) = self.candidates.get_mut(&member) {
            known.last = Some((step, floor));
            known.tries = 0;
        }
        member
    }

    /// The same for a piece of a step's work that so many follow before its end: whose answer to this one
    /// would not be here when all together can be done with those is left out, the slow and the far. Near
    /// the step's beginning one that was left out for long may be tried.
    pub fn choose_in_time(
        &mut self,
        step: Step,
        (following, early): (u64, bool),
        eligible: impl Fn(&Member) -> bool,
    ) -> Option<Member> {
        let boast = self.boast;
        let able = self.candidates.iter().filter(|(member, _)| eligible(member));
        let able: Vec<(&Member, &Candidate)> = able.collect();
        // Until its answer is here.
        let takes = |known: &Candidate| {
            let service_time = known.believed(boast)?;
            Some(u128::from(service_time) + u128::from(known.path))
        };
        let (mut soonest, mut together) = (u128::MAX, 0u128);
        for (_, known) in &able {
            soonest = soonest.min(takes(known).unwrap_or(u128::MAX));
            together += known.believed(boast).map_or(0, speed);
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

    /// Charges a candidate for a piece of work that it got without being chosen.
    pub fn charge(&mut self, member: Member) {
        let service_time = self.charged(member);
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.virtual_time = candidate.virtual_time.saturating_add(service_time);
        }
    }

    /// Takes the charge back from a candidate that did not take the work.
    pub fn refund(&mut self, member: Member) {
        let service_time = self.charged(member);
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.virtual_time = candidate.virtual_time.saturating_sub(service_time);
        }
    }

    /// What a piece of work costs a candidate of virtual time.
    fn charged(&self, member: Member) -> u64 {
        let known = self.candidates.get(&member).and_then(|known| known.believed(self.boast));
        known.unwrap_or_else(|| self.robust_service_time()).max(1)
    }

    /// Mean pace of those that are measured.
    fn robust_service_time(&self) -> u64 {
        let service_times =
            || self.candidates.values().filter_map(|known| known.believed(self.boast));
        match service_times().count() as u64 {
            0 => UNKNOWN_PACE,
            count => (service_times().map(u128::from).sum::<u128>() / u128::from(count)) as u64,
        }
    }

    /// What counts first: whose turn it is.
    fn turn(&self, candidate: &Candidate) -> u64 {
        if self.routing == Routing::AtRandom { 0 } else { candidate.virtual_time }
    }

    /// An order of candidates whose turn it is, which differs from router to router; it is always the
    /// same one, but where chance alone decides.
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
