//! To which of several equals the next piece of work goes.
//!
//! Interleaved weighted round robin (Katevenis et al. 1991; SWARM, arXiv 2301.11913, section 3.2):
//! every candidate has a virtual time that grows by its pace with each piece of work it gets, and
//! the smallest virtual time is next. Over any while, candidates that always have room get work in
//! proportion to their speed.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::Member;
use shoal_protocol::units::Moment;

use crate::dice::mixed;

/// What an unmeasured candidate is taken to need while nobody is measured.
const UNKNOWN_PACE: u64 = 1_000_000;

/// One answer counts for a part in so many of what is seen, when there are so many.
const WEIGHT: u32 = 8;

/// So many times as much as is typical may a candidate's answers take of what it claims.
const BELIEVED: u64 = 2;

/// Speeds are pieces of work in so many nanoseconds, so that integers do.
pub(crate) const PER: u128 = 1_000_000_000_000_000;

/// The speed of who needs so many nanoseconds for a piece of work.
pub(crate) fn speed(pace: u64) -> u128 {
    PER / u128::from(pace.max(1))
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
    pace: Option<u64>,
    seen: Seen,
    /// Nanoseconds there and back at least; 0 while it is not measured.
    way: u64,
    /// It said so, and has not taken that back.
    busy: bool,
}

impl Routing {
    /// Whether speeds count.
    #[must_use]
    pub fn is_by_speed(self) -> bool {
        matches!(self, Self::BySpeed | Self::BySpeedAlone)
    }
}

impl Candidate {
    /// How many thousandths of the pace that it claims its answers take. Where others send to it as
    /// well and links are long that is more than a thousand, but about as much more for all.
    fn boast(&self) -> Option<u64> {
        let (interval, pace) = (self.seen.interval()?, self.pace?);
        u64::try_from(u128::from(interval) * 1000 / u128::from(pace)).ok()
    }

    /// The pace that it is believed to have: what it claims, unless its answers take more than twice
    /// as much of that as is typical. Then what is seen counts.
    fn believed(&self, typical: Option<u64>) -> Option<u64> {
        let pace = self.pace?;
        match (self.boast(), typical) {
            (Some(own), Some(typical)) if own / BELIEVED > typical => {
                let times = u128::from(own) / u128::from(typical.max(1));
                Some(u64::try_from(u128::from(pace) * times).unwrap_or(u64::MAX / 16))
            }
            _ => Some(pace),
        }
    }
}

/// What was seen of a candidate's answers.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// When the last one came, and how many did.
    last: Option<Moment>,
    count: u32,
    /// Nanoseconds from one to the next while it had something to answer, on average.
    interval: u64,
}

impl Seen {
    fn answer(&mut self, sent: Moment, now: Moment) {
        let since = self.last.map_or(sent, |last| last.max(sent));
        let interval = u64::try_from(now.since(since).as_nanos()).unwrap_or(u64::MAX / 16).max(1);
        self.last = Some(now);
        self.count = self.count.saturating_add(1);
        let weight = u64::from(self.count.min(WEIGHT));
        self.interval = self.interval - self.interval / weight + interval / weight;
    }

    /// The average, where it is one.
    fn interval(&self) -> Option<u64> {
        (self.count >= 2 && self.interval > 0).then_some(self.interval)
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
        let seen = Seen::default();
        let new = || Candidate { virtual_time: start, pace: None, seen, way: 0, busy: false };
        self.candidates = members
            .into_iter()
            .map(|member| (member, old.remove(&member).unwrap_or_else(new)))
            .collect();
    }

    /// The pace that a candidate claims in nanoseconds per microbatch; 0 says nothing.
    pub fn measured(&mut self, member: Member, pace: u64) {
        let counts = pace > 0 && self.routing.is_by_speed();
        if let Some(candidate) = self.candidates.get_mut(&member).filter(|_| counts) {
            candidate.pace = Some(pace);
        }
    }

    /// How long the ways to candidates and back take, as was measured from here.
    pub fn set_ways(&mut self, way: impl Fn(&Member) -> Option<Duration>) {
        let counts = self.routing == Routing::BySpeed;
        for (member, candidate) in self.candidates.iter_mut().filter(|_| counts) {
            let nanoseconds = way(member).map_or(0, |way| way.as_nanos());
            candidate.way = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
        }
    }

    /// A candidate answered what was sent to it at a moment.
    pub fn answered(&mut self, member: Member, sent: Moment, now: Moment) {
        let Some(candidate) = self.candidates.get_mut(&member) else { return };
        candidate.seen.answer(sent, now);
        self.answers += 1;
        if self.answers.is_multiple_of(u64::from(WEIGHT)) {
            let boasts = self.candidates.values().filter_map(Candidate::boast);
            let mut boasts: Vec<u64> = boasts.collect();
            boasts.sort_unstable();
            self.boast = boasts.get(boasts.len().saturating_sub(1) / 2).copied();
        }
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

    /// The same among some of the candidates.
    pub fn choose_of(&mut self, members: impl IntoIterator<Item = Member>) -> Option<Member> {
        let known = members.into_iter().filter_map(|member| {
            let candidate = self.candidates.get(&member).filter(|candidate| !candidate.busy)?;
            Some((self.turn(candidate), self.tie_break(&member), member))
        });
        let (_, _, member) = known.min()?;
        Some(self.chosen(member))
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

    /// The same for a piece of work that so many follow before a step's end: whose answer to this one would
    /// not be here when all together can be done with those is left out, the slow and the far.
    pub fn choose_in_time(
        &mut self,
        following: u64,
        eligible: impl Fn(&Member) -> bool,
    ) -> Option<Member> {
        let boast = self.boast;
        let able = self.candidates.iter().filter(|(member, _)| eligible(member));
        let able: Vec<(&Member, &Candidate)> = able.collect();
        // Until its answer is here.
        let takes = |known: &Candidate| {
            let pace = known.believed(boast)?;
            Some(u128::from(pace) + u128::from(known.way))
        };
        let (mut soonest, mut together) = (u128::MAX, 0u128);
        for (_, known) in &able {
            soonest = soonest.min(takes(known).unwrap_or(u128::MAX));
            together += known.believed(boast).map_or(0, speed);
        }
        let rest = u128::from(following) * PER / together.max(1);
        let longest = soonest.saturating_add(rest);
        let late = |known: &Candidate| takes(known).is_some_and(|takes| takes > longest);
        let free = able.into_iter().filter(|(_, known)| !known.busy && !late(known));
        let member = self.next_of(free)?;
        Some(self.chosen(member))
    }

    /// Charges a candidate for a piece of work that it got without being chosen.
    pub fn charge(&mut self, member: Member) {
        let pace = self.charged(member);
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.virtual_time = candidate.virtual_time.saturating_add(pace);
        }
    }

    /// Takes the charge back from a candidate that did not take the work.
    pub fn refund(&mut self, member: Member) {
        let pace = self.charged(member);
        if let Some(candidate) = self.candidates.get_mut(&member) {
            candidate.virtual_time = candidate.virtual_time.saturating_sub(pace);
        }
    }

    /// What a piece of work costs a candidate of virtual time.
    fn charged(&self, member: Member) -> u64 {
        let known = self.candidates.get(&member).and_then(|known| known.believed(self.boast));
        known.unwrap_or_else(|| self.typical_pace()).max(1)
    }

    /// Mean pace of those that are measured.
    fn typical_pace(&self) -> u64 {
        let paces = || self.candidates.values().filter_map(|known| known.believed(self.boast));
        match paces().count() as u64 {
            0 => UNKNOWN_PACE,
            count => (paces().map(u128::from).sum::<u128>() / u128::from(count)) as u64,
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
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use proptest::prelude::*;
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn router(paces: &[u64]) -> Router {
        let mut router = Router::new(7);
        router.set_candidates((0..paces.len()).map(|number| member(number as u8)));
        for (number, pace) in paces.iter().enumerate() {
            router.measured(member(number as u8), *pace);
        }
        router
    }

    /// How many of the last half of so many microbatches go to each of these replicas, if the first of
    /// them says that it is so many times as fast as it is. Some are on their way at a time, and each
    /// replica answers one after the other.
    fn last_go_to(paces: &[u64], boast: u64, count: usize) -> Vec<usize> {
        let mut router = router(&[]);
        router.set_candidates((0..paces.len()).map(|number| member(number as u8)));
        for (number, pace) in paces.iter().enumerate() {
            let claims = if number == 0 { pace / boast } else { *pace };
            router.measured(member(number as u8), claims);
        }
        let moment = |nanoseconds: u64| Moment(Duration::from_nanos(nanoseconds));
        let (mut free, mut coming) = (vec![0; paces.len()], BTreeSet::new());
        let mut counts = vec![0; paces.len()];
        let mut now = 0;
        for number in 0..count {
            let to = router.choose().expect("nobody is busy");
            let place = usize::from(to.peer.0[0]);
            counts[place] += usize::from(number >= count / 2);
            free[place] = now.max(free[place]) + paces[place];
            coming.insert((free[place], to, now));
            if number >= 4 * paces.len() {
                let (at, from, sent) = coming.pop_first().expect("some are on their way");
                now = at;
                router.answered(from, moment(sent), moment(now));
            }
        }
        counts
    }

    fn chosen(router: &mut Router, times: usize, of: usize) -> Vec<usize> {
        let mut counts = vec![0; of];
        for _ in 0..times {
            counts[usize::from(router.choose().expect("somebody is free").peer.0[0])] += 1;
        }
        counts
    }

    #[test]
    fn work_is_in_proportion_to_speed_and_interleaved() {
        let mut router = router(&[1000, 2000, 4000]);
        assert_eq!(chosen(&mut router, 7, 3), [4, 2, 1]);
        let fast: Vec<bool> = (0..14).map(|_| router.choose() == Some(member(0))).collect();
        assert!(fast.windows(3).all(|three| three.contains(&true)), "{fast:?}");
    }

    #[test]
    fn newcomers_are_tried_early_and_take_no_more_than_their_part_after() {
        let mut router = router(&[1000, 1000]);
        chosen(&mut router, 100, 2);
        router.set_candidates((0..3).map(member));
        router.measured(member(2), 1000);
        assert_eq!(chosen(&mut router, 30, 3), [10, 10, 10]);
    }

    #[test]
    fn the_busy_are_left_out_and_do_not_catch_up() {
        let mut router = router(&[1000, 1000]);
        router.set_busy(member(0));
        assert_eq!(chosen(&mut router, 50, 2), [0, 50]);
        assert!(router.set_free(member(0)));
        assert!(!router.set_free(member(0)));
        let counts = chosen(&mut router, 20, 2);
        assert!(counts[0] <= 11, "{counts:?}");
        router.set_busy(member(0));
        router.set_busy(member(1));
        assert_eq!(router.choose(), None);
    }

    #[test]
    fn a_refund_undoes_a_choice() {
        let mut router = router(&[1000, 3000]);
        let first = router.choose().expect("somebody is free");
        router.refund(first);
        assert_eq!(router.choose(), Some(first));
    }

    #[test]
    fn the_far_have_no_part_in_a_step_s_end() {
        let mut router = router(&[1000, 1000]);
        let way = |member: &Member| u64::from(member.peer.0[0]) * 3000;
        router.set_ways(|member| Some(Duration::from_nanos(way(member))));
        let mut last = vec![Vec::new(); 2];
        for following in (0..20).rev() {
            let to = router.choose_in_time(following, |_| true).expect("nobody is busy");
            last[usize::from(to.peer.0[0])].push(following);
        }
        // 2 in 1000: who answers 3000 later has to have 6 after it.
        assert_eq!(last[1].last(), Some(&6), "{last:?}");
        // Before that each has its part.
        assert!(last[0].len().abs_diff(last[1].len()) <= 7, "{last:?}");
    }

    #[test]
    fn the_last_of_a_step_go_to_those_who_end_them_in_time() {
        let all = |_: &Member| true;
        let mut router = router(&[1000, 2000, 4000]);
        let mut last = vec![Vec::new(); 3];
        for following in (0..21).rev() {
            let to = router.choose_in_time(following, all).expect("nobody is busy");
            last[usize::from(to.peer.0[0])].push(following);
        }
        // 7 in 4000: who needs 3000 longer than the fastest has to have 5.25 after it.
        assert!(last[2].iter().all(|following| *following >= 6), "{last:?}");
        assert!(last[1].iter().all(|following| *following >= 2), "{last:?}");
        // Where only the slow may have it, they do.
        let slow = |candidate: &Member| *candidate == member(2);
        assert_eq!(router.choose_in_time(0, slow), Some(member(2)));
    }

    proptest! {
        /// Whatever one of several claims, what was seen of it counts in the end.
        #[test]
        fn who_boasts_gets_little_more_than_its_part(
            paces in prop::collection::vec(1_000u64..8_000, 3..8),
            boast in 1u64..100,
        ) {
            let speed: f64 = paces.iter().map(|pace| 1.0 / *pace as f64).sum();
            let part = 1.0 / paces[0] as f64 / speed;
            let counts = last_go_to(&paces, boast, 4_000);
            prop_assert!(counts[0] as f64 <= 2.2 * part * 2_000.0 + 10.0, "{counts:?} {part}");
        }

        #[test]
        fn counts_are_proportional_to_speed(
            paces in prop::collection::vec(1_000u64..100_000, 1..12),
            rounds in 200usize..2000,
        ) {
            let mut router = router(&paces);
            let counts = chosen(&mut router, rounds, paces.len());
            let speed: f64 = paces.iter().map(|pace| 1.0 / *pace as f64).sum();
            for (count, pace) in counts.iter().zip(&paces) {
                let expected = rounds as f64 / *pace as f64 / speed;
                // No candidate is ever more than one piece of work ahead of its virtual time.
                prop_assert!((*count as f64 - expected).abs() <= paces.len() as f64 + 1.0);
            }
        }
    }
}
