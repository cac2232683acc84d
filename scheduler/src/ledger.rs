//! Who may count what: the claims of one step.
//!
//! A claim is first come. It stays its holder's until the step is committed, the holder lets go of
//! it, or all of the holder's claims are revoked, so that every (step, stage, microbatch) is in at
//! most one accumulator that counts.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step, Term};
use shoal_protocol::message::{FixedLoss, HeldClaim};

/// The claims of one step.
#[derive(Debug)]
pub(crate) struct Ledger {
    step: Step,
    stages: u16,
    /// Microbatches that are trained on; those from here on are held out.
    training: u32,
    microbatches: u32,
    claims: BTreeMap<(Stage, Microbatch), Claim>,
    /// Microbatches of the first stage that nobody holds.
    free: BTreeSet<Microbatch>,
    /// Work of later stages that lost its holder and has no other yet: the activation that it starts
    /// from must be sent again.
    orphaned: BTreeSet<(Stage, Microbatch)>,
    /// How many microbatches of each stage somebody holds.
    held: Vec<u32>,
    /// How many of each stage are done.
    done: Vec<u32>,
}

/// Numbers of one term's grants: each higher than all before.
#[derive(Debug)]
pub(crate) struct Grants {
    last: Grant,
}

impl Grants {
    /// Those of a term that begins.
    pub(crate) fn of(term: Term) -> Self {
        Self { last: Grant { term, number: 0 } }
    }

    fn next(&mut self) -> Grant {
        self.last = self.last.next();
        self.last
    }
}

#[derive(Debug)]
struct Claim {
    holder: Member,
    grant: Grant,
    done: bool,
    loss: Option<FixedLoss>,
}

/// The answer to a claim.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ClaimAnswer {
    /// It is the asker's, perhaps for long.
    Granted { grant: Grant, next_holder: Option<Member> },
    /// It is another's.
    Held { holder: Member },
    /// It is of no step that is open, or there is no such work.
    NotOpen,
}

/// The answer to a report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DoneAnswer {
    /// Written down.
    Noted,
    /// It had been written down.
    Repeated,
    /// Not under a grant that holds.
    Refused,
}

impl Ledger {
    /// The ledger of a step whose `microbatches` are all unheld.
    pub(crate) fn open(step: Step, stages: u16, training: u32, microbatches: u32) -> Self {
        assert!((1..=microbatches).contains(&training), "a step trains on something");
        let free = (0..microbatches).map(Microbatch).collect();
        let claims = BTreeMap::new();
        let orphaned = BTreeSet::new();
        let (held, done) = (vec![0; usize::from(stages)], vec![0; usize::from(stages)]);
        Self { step, stages, training, microbatches, claims, free, orphaned, held, done }
    }

    /// How many microbatches the step has.
    pub(crate) fn all(&self) -> usize {
        self.microbatches as usize
    }

    /// How many microbatches of the first stage nobody holds.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// How many microbatches nobody holds at a stage.
    pub(crate) fn unheld(&self, stage: Stage) -> u32 {
        self.microbatches - self.held[usize::from(stage.0)]
    }

    /// The lowest microbatch of the first stage that nobody holds.
    pub(crate) fn lowest_free(&self) -> Option<Microbatch> {
        self.free.first().copied()
    }

    /// Gives the claim to who asks first, and again to who holds it.
    pub(crate) fn claim(
        &mut self,
        key: ClaimKey,
        member: Member,
        grants: &mut Grants,
    ) -> ClaimAnswer {
        let exists = key.stage.0 < self.stages && key.microbatch.0 < self.microbatches;
        if key.step != self.step || !exists {
            return ClaimAnswer::NotOpen;
        }
        let next_holder =
            self.claims.get(&(key.stage.next(), key.microbatch)).map(|claim| claim.holder);
        if let Some(claim) = self.claims.get(&(key.stage, key.microbatch)) {
            return if claim.holder == member {
                ClaimAnswer::Granted { grant: claim.grant, next_holder }
            } else {
                ClaimAnswer::Held { holder: claim.holder }
            };
        }
        let grant = grants.next();
        let claim = Claim { holder: member, grant, done: false, loss: None };
        self.claims.insert((key.stage, key.microbatch), claim);
        self.held[usize::from(key.stage.0)] += 1;
        self.orphaned.remove(&(key.stage, key.microbatch));
        if key.stage == Stage(0) {
            self.free.remove(&key.microbatch);
        }
        ClaimAnswer::Granted { grant, next_holder }
    }

    /// Takes in a claim that an earlier coordinator granted. Returns whether it can be: there is such
    /// work, and nobody else holds it.
    pub(crate) fn restore(&mut self, claim: &HeldClaim, holder: Member) -> bool {
        let HeldClaim { key, grant, done, loss } = *claim;
        let place = (key.stage, key.microbatch);
        let exists = key.stage.0 < self.stages && key.microbatch.0 < self.microbatches;
        let last = key.stage.0 + 1 == self.stages;
        let sound = !done || last == loss.is_some();
        if key.step != self.step || !exists || !sound || self.claims.contains_key(&place) {
            return false;
        }
        self.claims.insert(place, Claim { holder, grant, done, loss: loss.filter(|_| done) });
        self.held[usize::from(key.stage.0)] += 1;
        self.done[usize::from(key.stage.0)] += u32::from(done);
        if key.stage == Stage(0) {
            self.free.remove(&key.microbatch);
        }
        true
    }

    /// Notes that the work is in its holder's accumulator.
    pub(crate) fn done(
        &mut self,
        key: ClaimKey,
        member: Member,
        grant: Grant,
        loss: Option<FixedLoss>,
    ) -> DoneAnswer {
        if key.step != self.step {
            return DoneAnswer::Refused;
        }
        let last = key.stage.0 + 1 == self.stages;
        match self.claims.get_mut(&(key.stage, key.microbatch)) {
            Some(claim) if claim.holder == member && claim.grant == grant => {
                if claim.done {
                    return DoneAnswer::Repeated;
                }
                if last != loss.is_some() {
                    return DoneAnswer::Refused;
                }
                claim.done = true;
                claim.loss = loss;
                self.done[usize::from(key.stage.0)] += 1;
                DoneAnswer::Noted
            }
            _ => DoneAnswer::Refused,
        }
    }

    /// Claims whose work is not done yet.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = (ClaimKey, Member, Grant)> + '_ {
        let step = self.step;
        self.claims.iter().filter(|(_, claim)| !claim.done).map(
            move |((stage, microbatch), claim)| {
                let key = ClaimKey { step, stage: *stage, microbatch: *microbatch };
                (key, claim.holder, claim.grant)
            },
        )
    }

    /// Whether this member's work under this grant is not done yet.
    pub(crate) fn awaits(&self, key: ClaimKey, member: Member, grant: Grant) -> bool {
        let claim = self.claims.get(&(key.stage, key.microbatch));
        claim.is_some_and(|claim| claim.holder == member && claim.grant == grant && !claim.done)
    }

    /// How many claims somebody holds.
    pub(crate) fn held(&self) -> u64 {
        self.claims.len() as u64
    }

    /// How many microbatches are not done at a stage.
    pub(crate) fn undone(&self, stage: Stage) -> u32 {
        self.microbatches - self.done[usize::from(stage.0)]
    }

    /// The training microbatches that each member's accumulator of a stage must hold, in order.
    pub(crate) fn counted(&self, stage: Stage) -> BTreeMap<Member, Vec<Microbatch>> {
        let mut counted: BTreeMap<Member, Vec<Microbatch>> = BTreeMap::new();
        let all = (stage, Microbatch(0))..(stage, Microbatch(self.training));
        for ((_, microbatch), claim) in self.claims.range(all).filter(|(_, claim)| claim.done) {
            counted.entry(claim.holder).or_default().push(*microbatch);
        }
        counted
    }

    /// Sum of the training microbatches' losses and, where the step has any, of the held-out ones'.
    pub(crate) fn losses(&self) -> (FixedLoss, Option<FixedLoss>) {
        let last = Stage(self.stages - 1);
        let losses = |from: u32, to: u32| {
            self.claims
                .range((last, Microbatch(from))..(last, Microbatch(to)))
                .filter_map(|(_, claim)| claim.loss)
                .sum()
        };
        let held_out =
            (self.training < self.microbatches).then(|| losses(self.training, self.microbatches));
        (losses(0, self.training), held_out)
    }

    /// Takes back every claim of a member, done or not: what it accumulated counts nowhere.
    /// Returns how many there were, and how many of them were done.
    pub(crate) fn revoke(&mut self, member: Member) -> Revoked {
        let gone: Vec<(Stage, Microbatch)> = self
            .claims
            .iter()
            .filter(|(_, claim)| claim.holder == member)
            .map(|(key, _)| *key)
            .collect();
        let mut revoked = Revoked::default();
        for (stage, microbatch) in gone {
            revoked.claims += 1;
            revoked.done += u64::from(self.take_back(stage, microbatch));
        }
        revoked
    }

    /// Whether a member has counted something.
    pub(crate) fn has_counted(&self, member: Member) -> bool {
        self.claims.values().any(|claim| claim.holder == member && claim.done)
    }

    /// Takes back one claim that its holder lets go of. Returns whether it was its holder's under
    /// this grant, and not done.
    pub(crate) fn release(&mut self, key: ClaimKey, member: Member, grant: Grant) -> bool {
        let held = self
            .claims
            .get(&(key.stage, key.microbatch))
            .is_some_and(|claim| claim.holder == member && claim.grant == grant && !claim.done);
        let ours = held && key.step == self.step;
        if ours {
            self.take_back(key.stage, key.microbatch);
        }
        ours
    }

    /// Makes a claim nobody's; returns whether it was done.
    fn take_back(&mut self, stage: Stage, microbatch: Microbatch) -> bool {
        let claim = self.claims.remove(&(stage, microbatch)).expect("the caller has looked");
        self.held[usize::from(stage.0)] -= 1;
        self.done[usize::from(stage.0)] -= u32::from(claim.done);
        if stage == Stage(0) {
            self.free.insert(microbatch);
        } else {
            self.orphaned.insert((stage, microbatch));
        }
        claim.done
    }

    /// Work of later stages that nobody holds though the stage before is held: its activation is on
    /// its way, or got lost.
    pub(crate) fn gaps(&self) -> BTreeSet<(Stage, Microbatch)> {
        let onward = self.claims.keys().map(|(stage, microbatch)| (stage.next(), *microbatch));
        onward.filter(|key| key.0.0 < self.stages && !self.claims.contains_key(key)).collect()
    }

    /// Whose activation this work starts from, if nobody holds it any more: the holder and its own work.
    pub(crate) fn sender_of(&self, key: ClaimKey) -> Option<(Member, ClaimKey)> {
        let upstream = key.upstream()?;
        let orphaned = self.orphaned.contains(&(key.stage, key.microbatch));
        let claim = self.claims.get(&(upstream.stage, upstream.microbatch));
        claim.filter(|_| orphaned).map(|claim| (claim.holder, upstream))
    }

    /// The work whose activation must be offered again, by its holders: what lost its holder, and
    /// these gaps.
    pub(crate) fn to_replay(
        &self,
        old_gaps: &BTreeSet<(Stage, Microbatch)>,
    ) -> BTreeMap<Member, Vec<ClaimKey>> {
        let mut replays: BTreeMap<Member, Vec<ClaimKey>> = BTreeMap::new();
        let old_gaps = old_gaps.iter().filter(|key| !self.claims.contains_key(key));
        let all: BTreeSet<&(Stage, Microbatch)> = self.orphaned.iter().chain(old_gaps).collect();
        for (stage, microbatch) in all {
            let stage = Stage(stage.0 - 1);
            if let Some(upstream) = self.claims.get(&(stage, *microbatch)) {
                let key = ClaimKey { step: self.step, stage, microbatch: *microbatch };
                replays.entry(upstream.holder).or_default().push(key);
            }
        }
        replays
    }
}

/// What was taken back from a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Revoked {
    /// Claims.
    pub(crate) claims: u64,
    /// Those among them whose work had been done, and is done again.
    pub(crate) done: u64,
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    fn nth(number: u64) -> Grant {
        Grant { term: Term(1), number }
    }

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn key(stage: u16, microbatch: u32) -> ClaimKey {
        ClaimKey { step: Step(4), stage: Stage(stage), microbatch: Microbatch(microbatch) }
    }

    /// The books of a step of two stages, two training microbatches and a held-out one.
    struct Books {
        ledger: Ledger,
        grants: Grants,
    }

    impl Books {
        fn claim(&mut self, key: ClaimKey, member: Member) -> ClaimAnswer {
            self.ledger.claim(key, member, &mut self.grants)
        }
    }

    fn books() -> Books {
        let grants = Grants { last: nth(9) };
        Books { ledger: Ledger::open(Step(4), 2, 2, 3), grants }
    }

    fn granted(grant: u64) -> ClaimAnswer {
        ClaimAnswer::Granted { grant: nth(grant), next_holder: None }
    }

    #[test]
    fn a_claim_is_first_come_and_its_answer_repeats() {
        let mut books = books();
        assert_eq!(books.claim(key(1, 0), member(1)), granted(10));
        assert_eq!(books.claim(key(1, 0), member(2)), ClaimAnswer::Held { holder: member(1) });
        assert_eq!(books.claim(key(1, 0), member(1)), granted(10));
        assert_eq!(books.claim(key(1, 1), member(2)), granted(11));
    }

    #[test]
    fn a_grant_names_the_holder_of_the_next_stage() {
        let mut books = books();
        books.claim(key(1, 0), member(1));
        let answer = books.claim(key(0, 0), member(2));
        let next_holder = Some(member(1));
        assert_eq!(answer, ClaimAnswer::Granted { grant: nth(11), next_holder });
    }

    #[test]
    fn what_is_not_of_this_step_is_not_open() {
        let mut books = books();
        for wrong in [ClaimKey { step: Step(5), ..key(0, 0) }, key(2, 0), key(0, 3)] {
            assert_eq!(books.claim(wrong, member(1)), ClaimAnswer::NotOpen);
        }
    }

    #[test]
    fn microbatches_of_the_first_stage_are_given_out_lowest_first() {
        let mut books = books();
        assert_eq!(books.ledger.lowest_free(), Some(Microbatch(0)));
        books.claim(key(0, 0), member(1));
        assert_eq!(books.ledger.lowest_free(), Some(Microbatch(1)));
        books.claim(key(0, 1), member(1));
        books.claim(key(0, 2), member(1));
        assert_eq!(books.ledger.lowest_free(), None);
    }

    #[test]
    fn only_the_holder_under_its_grant_is_done_and_only_once() {
        let mut books = books();
        books.claim(key(0, 0), member(1));
        let mut done = |who, grant| books.ledger.done(key(0, 0), member(who), nth(grant), None);
        assert_eq!(done(2, 10), DoneAnswer::Refused);
        assert_eq!(done(1, 11), DoneAnswer::Refused);
        assert_eq!(done(1, 10), DoneAnswer::Noted);
        assert_eq!(done(1, 10), DoneAnswer::Repeated);
    }

    #[test]
    fn a_loss_comes_from_the_last_stage_and_from_no_other() {
        let mut books = books();
        books.claim(key(0, 0), member(1));
        books.claim(key(1, 0), member(1));
        let loss = Some(FixedLoss(5));
        assert_eq!(books.ledger.done(key(0, 0), member(1), nth(10), loss), DoneAnswer::Refused);
        assert_eq!(books.ledger.done(key(1, 0), member(1), nth(11), None), DoneAnswer::Refused);
    }

    fn finish(books: &mut Books) {
        for stage in 0..2 {
            for microbatch in 0..3 {
                let key = key(stage, microbatch);
                let who = member((microbatch % 2) as u8);
                let ClaimAnswer::Granted { grant, .. } = books.claim(key, who) else {
                    panic!("nobody else asks");
                };
                assert_eq!(books.ledger.undone(Stage(stage)), 3 - microbatch);
                let loss = (stage == 1).then_some(FixedLoss(1 << microbatch));
                assert_eq!(books.ledger.done(key, who, grant, loss), DoneAnswer::Noted);
            }
        }
    }

    #[test]
    fn a_complete_step_says_who_counted_what_and_the_losses() {
        let mut books = books();
        finish(&mut books);
        assert_eq!([0, 1].map(|stage| books.ledger.undone(Stage(stage))), [0, 0]);
        assert_eq!(books.ledger.counted(Stage(1))[&member(0)], [Microbatch(0)]);
        assert_eq!(books.ledger.counted(Stage(0))[&member(1)], [Microbatch(1)]);
        assert_eq!(books.ledger.losses(), (FixedLoss(3), Some(FixedLoss(4))));
    }

    #[test]
    fn a_revoked_claim_is_undone_and_granted_anew_under_a_higher_number() {
        let mut books = books();
        finish(&mut books);
        assert!(books.ledger.has_counted(member(1)) && !books.ledger.has_counted(member(3)));
        assert_eq!(books.ledger.revoke(member(1)), Revoked { claims: 2, done: 2 });
        assert!(!books.ledger.has_counted(member(1)));
        assert_eq!([0, 1].map(|stage| books.ledger.undone(Stage(stage))), [1, 1]);
        assert_eq!(books.ledger.lowest_free(), Some(Microbatch(1)));
        let answer = books.claim(key(0, 1), member(0));
        assert_eq!(answer, granted(16));
        assert_eq!(books.ledger.counted(Stage(0)).get(&member(1)), None);
    }

    #[test]
    fn what_lost_its_holder_is_replayed_by_the_holder_before_until_it_is_claimed() {
        let mut books = books();
        books.claim(key(0, 0), member(1));
        books.claim(key(1, 0), member(2));
        assert!(books.ledger.to_replay(&BTreeSet::new()).is_empty());
        books.ledger.revoke(member(2));
        assert_eq!(
            books.ledger.to_replay(&BTreeSet::new()),
            BTreeMap::from([(member(1), vec![key(0, 0)])])
        );
        books.claim(key(1, 0), member(3));
        assert!(books.ledger.to_replay(&BTreeSet::new()).is_empty());
        // Both neighbours gone: the first stage's work is given out first.
        books.ledger.revoke(member(3));
        books.ledger.revoke(member(1));
        assert!(books.ledger.to_replay(&BTreeSet::new()).is_empty());
        assert_eq!(books.ledger.lowest_free(), Some(Microbatch(0)));
        books.claim(key(0, 0), member(4));
        assert_eq!(
            books.ledger.to_replay(&BTreeSet::new()),
            BTreeMap::from([(member(4), vec![key(0, 0)])])
        );
    }

    #[test]
    fn a_claim_is_released_by_its_holder_under_its_grant_while_it_is_not_done() {
        let mut books = books();
        books.claim(key(1, 0), member(1));
        for (who, grant) in [(2, 10), (1, 9)] {
            assert!(!books.ledger.release(key(1, 0), member(who), nth(grant)));
        }
        assert!(books.ledger.release(key(1, 0), member(1), nth(10)));
        assert!(!books.ledger.release(key(1, 0), member(1), nth(10)));
        assert_eq!(books.claim(key(1, 0), member(1)), granted(11));
        let loss = Some(FixedLoss(1));
        books.ledger.done(key(1, 0), member(1), nth(11), loss);
        assert!(!books.ledger.release(key(1, 0), member(1), nth(11)));
    }

    #[test]
    fn a_gap_that_lasts_is_replayed_too() {
        let mut books = books();
        books.claim(key(0, 1), member(1));
        let gaps = books.ledger.gaps();
        assert_eq!(gaps, BTreeSet::from([(Stage(1), Microbatch(1))]));
        let replays = books.ledger.to_replay(&gaps);
        assert_eq!(replays, BTreeMap::from([(member(1), vec![key(0, 1)])]));
        books.claim(key(1, 1), member(2));
        assert!(books.ledger.gaps().is_empty() && books.ledger.to_replay(&gaps).is_empty());
    }
}
