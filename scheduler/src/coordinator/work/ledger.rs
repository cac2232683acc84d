//! The claims of one step: which member may count which microbatch.
//!
//! The first member that requests a claim gets it. It keeps the claim until the step is committed, it releases the
//! claim, or all of its claims are revoked. So every (step, stage, microbatch) is in at most one accumulator that
//! counts.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step, Term};
use shoal_protocol::message::{FixedLoss, Handover, HeldClaim};

/// The claims of one step.
#[derive(Debug)]
pub(crate) struct Ledger {
    step: Step,
    stages: u16,
    /// The number of training microbatches; those after them are held out.
    training: u32,
    microbatches: u32,
    claims: BTreeMap<(Stage, Microbatch), Claim>,
    /// Unheld microbatches of the first stage.
    free: BTreeSet<Microbatch>,
    /// Work of later stages that lost its holder and has no other yet: its activation must be sent again.
    orphaned: BTreeSet<(Stage, Microbatch)>,
    /// The number of held microbatches of each stage.
    held: Vec<u32>,
    /// The number of done microbatches of each stage.
    done: Vec<u32>,
}

/// The numbers of one term's grants, each higher than all before.
#[derive(Debug)]
pub(crate) struct Grants {
    last: Grant,
}

impl Grants {
    /// The numbers of a term that begins.
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
    handover: Handover,
}

/// What a member states about a microbatch.
pub(crate) type Statement = (Microbatch, Handover, Option<FixedLoss>);

/// The answer to a claim.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ClaimAnswer {
    /// The member holds it, from this moment or before.
    Granted { grant: Grant, next_holder: Option<Member> },
    /// Another member holds it.
    Held { holder: Member },
    /// No such work exists, or its step is not open.
    NotOpen,
}

/// The answer to a report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DoneAnswer {
    /// The work is counted.
    Noted,
    /// The work was counted before.
    Repeated,
    /// The grant is not valid.
    Refused,
}

impl Ledger {
    /// The ledger of a step with so many microbatches, of which `training` are trained on.
    pub(crate) fn open(step: Step, stages: u16, training: u32, microbatches: u32) -> Self {
        assert!((1..=microbatches).contains(&training), "a step trains on something");
        let free = (0..microbatches).map(Microbatch).collect();
        let claims = BTreeMap::new();
        let orphaned = BTreeSet::new();
        let (held, done) = (vec![0; usize::from(stages)], vec![0; usize::from(stages)]);
        Self { step, stages, training, microbatches, claims, free, orphaned, held, done }
    }

    /// The number of microbatches of the step.
    pub(crate) fn microbatches(&self) -> usize {
        self.microbatches as usize
    }

    /// The number of unheld microbatches of the first stage.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// The number of unheld microbatches of a stage.
    pub(crate) fn unheld(&self, stage: Stage) -> u32 {
        self.microbatches - self.held[usize::from(stage.0)]
    }

    /// The lowest unheld microbatch of the first stage.
    pub(crate) fn lowest_free(&self) -> Option<Microbatch> {
        self.free.first().copied()
    }

    /// Grants a claim that is not held, and repeats the grant to its holder.
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
        let (done, handover) = (false, Handover::default());
        let claim = Claim { holder: member, grant, done, loss: None, handover };
        self.claims.insert((key.stage, key.microbatch), claim);
        self.held[usize::from(key.stage.0)] += 1;
        self.orphaned.remove(&(key.stage, key.microbatch));
        if key.stage == Stage(0) {
            self.free.remove(&key.microbatch);
        }
        ClaimAnswer::Granted { grant, next_holder }
    }

    /// Takes a claim that an earlier coordinator granted. Returns whether that is possible: such work exists, and
    /// no other member holds it.
    pub(crate) fn restore(&mut self, claim: &HeldClaim, holder: Member) -> bool {
        let HeldClaim { key, grant, done, loss, handover } = *claim;
        let place = (key.stage, key.microbatch);
        let exists = key.stage.0 < self.stages && key.microbatch.0 < self.microbatches;
        let last = key.stage.0 + 1 == self.stages;
        let sound = !done || FixedLoss::may_be(loss, last);
        if key.step != self.step || !exists || !sound || self.claims.contains_key(&place) {
            return false;
        }
        let loss = loss.filter(|_| done);
        self.claims.insert(place, Claim { holder, grant, done, loss, handover });
        self.held[usize::from(key.stage.0)] += 1;
        self.done[usize::from(key.stage.0)] += u32::from(done);
        if key.stage == Stage(0) {
            self.free.remove(&key.microbatch);
        }
        true
    }

    /// Takes the report that the work is in its holder's accumulator.
    pub(crate) fn done(
        &mut self,
        key: ClaimKey,
        member: Member,
        grant: Grant,
        (loss, handover): (Option<FixedLoss>, Handover),
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
                if !FixedLoss::may_be(loss, last) {
                    return DoneAnswer::Refused;
                }
                claim.done = true;
                claim.loss = loss;
                claim.handover = handover;
                self.done[usize::from(key.stage.0)] += 1;
                DoneAnswer::Noted
            }
            _ => DoneAnswer::Refused,
        }
    }

    /// The claims whose work is not done yet.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = (ClaimKey, Member, Grant)> + '_ {
        let step = self.step;
        self.claims.iter().filter(|(_, claim)| !claim.done).map(
            move |((stage, microbatch), claim)| {
                let key = ClaimKey { step, stage: *stage, microbatch: *microbatch };
                (key, claim.holder, claim.grant)
            },
        )
    }

    /// The claims whose work is done.
    pub(crate) fn finished(&self) -> impl Iterator<Item = ClaimKey> + '_ {
        let step = self.step;
        self.claims.iter().filter(|(_, claim)| claim.done).map(move |((stage, microbatch), _)| {
            ClaimKey { step, stage: *stage, microbatch: *microbatch }
        })
    }

    /// The member that holds a claim, its work done or not.
    pub(crate) fn holder(&self, key: ClaimKey) -> Option<Member> {
        self.claims.get(&(key.stage, key.microbatch)).map(|claim| claim.holder)
    }

    /// Whether a member holds a claim under this grant, and its work is not done yet.
    pub(crate) fn awaits(&self, key: ClaimKey, member: Member, grant: Grant) -> bool {
        let claim = self.claims.get(&(key.stage, key.microbatch));
        claim.is_some_and(|claim| claim.holder == member && claim.grant == grant && !claim.done)
    }

    /// The number of held claims.
    pub(crate) fn held(&self) -> u64 {
        self.claims.len() as u64
    }

    /// The number of microbatches that are not done at a stage.
    pub(crate) fn undone(&self, stage: Stage) -> u32 {
        self.microbatches - self.done[usize::from(stage.0)]
    }

    /// The training microbatches that each member's accumulators of these stages must hold, in order.
    pub(crate) fn counted(
        &self,
        stages: impl Iterator<Item = Stage>,
    ) -> BTreeMap<Member, Vec<(Stage, Microbatch)>> {
        let mut counted: BTreeMap<Member, Vec<(Stage, Microbatch)>> = BTreeMap::new();
        for stage in stages {
            let all = (stage, Microbatch(0))..(stage, Microbatch(self.training));
            for (key, claim) in self.claims.range(all).filter(|(_, claim)| claim.done) {
                counted.entry(claim.holder).or_default().push(*key);
            }
        }
        counted
    }

    /// What each member has stated about the training microbatches that it has done at a stage, in order.
    pub(crate) fn stated(&self, stage: Stage) -> BTreeMap<Member, Vec<Statement>> {
        let mut stated: BTreeMap<Member, Vec<Statement>> = BTreeMap::new();
        let all = (stage, Microbatch(0))..(stage, Microbatch(self.training));
        for ((_, microbatch), claim) in self.claims.range(all).filter(|(_, claim)| claim.done) {
            let Claim { holder, handover, loss, .. } = *claim;
            stated.entry(holder).or_default().push((*microbatch, handover, loss));
        }
        stated
    }

    /// Who did work that is done, and what it states of the tensors at both ends.
    pub(crate) fn handover(&self, key: ClaimKey) -> Option<(Member, &Handover)> {
        let claim = self.claims.get(&(key.stage, key.microbatch))?;
        claim.done.then_some((claim.holder, &claim.handover))
    }

    /// The sum of the training microbatches' losses and, if the step has any, of the held-out ones'.
    pub(crate) fn losses(&self) -> (FixedLoss, Option<FixedLoss>) {
        // Other stages than the last report gradients that are not finite.
        let losses = |from: u32, to: u32| {
            let is_of = |(_, microbatch): &(Stage, Microbatch)| (from..to).contains(&microbatch.0);
            self.claims
                .iter()
                .filter(|(key, _)| is_of(key))
                .filter_map(|(_, claim)| claim.loss)
                .sum()
        };
        let held_out =
            (self.training < self.microbatches).then(|| losses(self.training, self.microbatches));
        (losses(0, self.training), held_out)
    }

    /// Revokes all claims of a member, done or not: what it accumulated counts nowhere.
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
            revoked.done += u64::from(self.remove(stage, microbatch));
        }
        revoked
    }

    /// Whether a member has done the work of a claim at one of these stages.
    pub(crate) fn has_counted(&self, member: Member, stages: &BTreeSet<Stage>) -> bool {
        let mut own = self.claims.iter().filter(|(_, claim)| claim.holder == member && claim.done);
        own.any(|((stage, _), _)| stages.contains(stage))
    }

    /// Revokes a claim that its holder releases. Returns whether the member held it under this grant, and its work
    /// was not done.
    pub(crate) fn release(&mut self, key: ClaimKey, member: Member, grant: Grant) -> bool {
        let held = self
            .claims
            .get(&(key.stage, key.microbatch))
            .is_some_and(|claim| claim.holder == member && claim.grant == grant && !claim.done);
        let ours = held && key.step == self.step;
        if ours {
            self.remove(key.stage, key.microbatch);
        }
        ours
    }

    /// Removes a claim. Returns whether its work was done.
    fn remove(&mut self, stage: Stage, microbatch: Microbatch) -> bool {
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

    /// Work of later stages that is unheld while the stage before is held: its activation is on its way, or lost.
    pub(crate) fn unclaimed(&self) -> BTreeSet<(Stage, Microbatch)> {
        let onward = self.claims.keys().map(|(stage, microbatch)| (stage.next(), *microbatch));
        onward.filter(|key| key.0.0 < self.stages && !self.claims.contains_key(key)).collect()
    }

    /// The holder of the stage before, and its claim, if this work has lost its own holder.
    pub(crate) fn upstream_holder(&self, key: ClaimKey) -> Option<(Member, ClaimKey)> {
        let upstream = key.upstream()?;
        let orphaned = self.orphaned.contains(&(key.stage, key.microbatch));
        let claim = self.claims.get(&(upstream.stage, upstream.microbatch));
        claim.filter(|_| orphaned).map(|claim| (claim.holder, upstream))
    }

    /// The claims whose activation must be offered again, by holder: those before work that lost its holder, and
    /// before work that has been unclaimed since `unclaimed`.
    pub(crate) fn to_replay(
        &self,
        unclaimed: &BTreeSet<(Stage, Microbatch)>,
    ) -> BTreeMap<Member, Vec<ClaimKey>> {
        let mut replays: BTreeMap<Member, Vec<ClaimKey>> = BTreeMap::new();
        let unclaimed = unclaimed.iter().filter(|key| !self.claims.contains_key(key));
        let all: BTreeSet<&(Stage, Microbatch)> = self.orphaned.iter().chain(unclaimed).collect();
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

/// The claims that were revoked from a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Revoked {
    pub(crate) claims: u64,
    /// Those among them whose work was done, and must be done again.
    pub(crate) done: u64,
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    const HANDOVER: Handover =
        Handover { activation: None, output: None, gradient: None, returned: None };

    fn nth(number: u64) -> Grant {
        Grant { term: Term(1), number }
    }

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn key(stage: u16, microbatch: u32) -> ClaimKey {
        ClaimKey { step: Step(4), stage: Stage(stage), microbatch: Microbatch(microbatch) }
    }

    /// The ledger of a step of two stages, two training microbatches and a held-out one.
    struct Step4 {
        ledger: Ledger,
        grants: Grants,
    }

    impl Step4 {
        fn claim(&mut self, key: ClaimKey, member: Member) -> ClaimAnswer {
            self.ledger.claim(key, member, &mut self.grants)
        }
    }

    fn step4() -> Step4 {
        let grants = Grants { last: nth(9) };
        Step4 { ledger: Ledger::open(Step(4), 2, 2, 3), grants }
    }

    fn granted(grant: u64) -> ClaimAnswer {
        ClaimAnswer::Granted { grant: nth(grant), next_holder: None }
    }

    #[test]
    fn the_first_request_gets_a_claim_and_the_answer_repeats() {
        let mut step = step4();
        assert_eq!(step.claim(key(1, 0), member(1)), granted(10));
        assert_eq!(step.claim(key(1, 0), member(2)), ClaimAnswer::Held { holder: member(1) });
        assert_eq!(step.claim(key(1, 0), member(1)), granted(10));
        assert_eq!(step.claim(key(1, 1), member(2)), granted(11));
    }

    #[test]
    fn a_grant_names_the_holder_of_the_next_stage() {
        let mut step = step4();
        step.claim(key(1, 0), member(1));
        let answer = step.claim(key(0, 0), member(2));
        let next_holder = Some(member(1));
        assert_eq!(answer, ClaimAnswer::Granted { grant: nth(11), next_holder });
    }

    #[test]
    fn claims_of_other_steps_are_not_open() {
        let mut step = step4();
        for wrong in [ClaimKey { step: Step(5), ..key(0, 0) }, key(2, 0), key(0, 3)] {
            assert_eq!(step.claim(wrong, member(1)), ClaimAnswer::NotOpen);
        }
    }

    #[test]
    fn microbatches_of_the_first_stage_are_granted_lowest_first() {
        let mut step = step4();
        assert_eq!(step.ledger.lowest_free(), Some(Microbatch(0)));
        step.claim(key(0, 0), member(1));
        assert_eq!(step.ledger.lowest_free(), Some(Microbatch(1)));
        step.claim(key(0, 1), member(1));
        step.claim(key(0, 2), member(1));
        assert_eq!(step.ledger.lowest_free(), None);
    }

    #[test]
    fn only_the_holder_reports_done_under_its_grant_and_only_once() {
        let mut step = step4();
        step.claim(key(0, 0), member(1));
        let mut done =
            |by, grant| step.ledger.done(key(0, 0), member(by), nth(grant), (None, HANDOVER));
        assert_eq!(done(2, 10), DoneAnswer::Refused);
        assert_eq!(done(1, 11), DoneAnswer::Refused);
        assert_eq!(done(1, 10), DoneAnswer::Noted);
        assert_eq!(done(1, 10), DoneAnswer::Repeated);
    }

    #[test]
    fn only_the_last_stage_reports_a_loss() {
        let mut step = step4();
        step.claim(key(0, 0), member(1));
        step.claim(key(1, 0), member(1));
        let loss = Some(FixedLoss::new(5, 1));
        assert_eq!(
            step.ledger.done(key(0, 0), member(1), nth(10), (loss, HANDOVER)),
            DoneAnswer::Refused
        );
        assert_eq!(
            step.ledger.done(key(1, 0), member(1), nth(11), (None, HANDOVER)),
            DoneAnswer::Refused
        );
    }

    fn finish(step: &mut Step4) {
        for stage in 0..2 {
            for microbatch in 0..3 {
                let key = key(stage, microbatch);
                let holder = member((microbatch % 2) as u8);
                let ClaimAnswer::Granted { grant, .. } = step.claim(key, holder) else {
                    panic!("no other member requests it");
                };
                assert_eq!(step.ledger.undone(Stage(stage)), 3 - microbatch);
                let loss = (stage == 1).then_some(FixedLoss::new(1 << microbatch, 1));
                assert_eq!(
                    step.ledger.done(key, holder, grant, (loss, HANDOVER)),
                    DoneAnswer::Noted
                );
            }
        }
    }

    #[test]
    fn a_complete_step_gives_each_members_count_and_the_losses() {
        let mut step = step4();
        finish(&mut step);
        assert_eq!([0, 1].map(|stage| step.ledger.undone(Stage(stage))), [0, 0]);
        let counted = step.ledger.counted([Stage(0), Stage(1)].into_iter());
        assert_eq!(counted[&member(0)], [0, 1].map(|stage| (Stage(stage), Microbatch(0))));
        assert_eq!(counted[&member(1)], [0, 1].map(|stage| (Stage(stage), Microbatch(1))));
        assert_eq!(step.ledger.losses(), (FixedLoss::new(3, 2), Some(FixedLoss::new(4, 1))));
    }

    #[test]
    fn a_revoked_claim_is_undone_and_granted_anew_under_a_higher_number() {
        let mut step = step4();
        finish(&mut step);
        let (both, none) = (BTreeSet::from([Stage(0), Stage(1)]), BTreeSet::new());
        assert!(step.ledger.has_counted(member(1), &both));
        assert!(!step.ledger.has_counted(member(3), &both));
        assert!(!step.ledger.has_counted(member(1), &none));
        assert_eq!(step.ledger.revoke(member(1)), Revoked { claims: 2, done: 2 });
        assert!(!step.ledger.has_counted(member(1), &both));
        assert_eq!([0, 1].map(|stage| step.ledger.undone(Stage(stage))), [1, 1]);
        assert_eq!(step.ledger.lowest_free(), Some(Microbatch(1)));
        let answer = step.claim(key(0, 1), member(0));
        assert_eq!(answer, granted(16));
        let counted = step.ledger.counted(std::iter::once(Stage(0)));
        assert_eq!(counted.get(&member(1)), None);
    }

    #[test]
    fn orphaned_work_is_replayed_by_the_holder_before_until_it_is_claimed() {
        let mut step = step4();
        step.claim(key(0, 0), member(1));
        step.claim(key(1, 0), member(2));
        assert!(step.ledger.to_replay(&BTreeSet::new()).is_empty());
        step.ledger.revoke(member(2));
        assert_eq!(
            step.ledger.to_replay(&BTreeSet::new()),
            BTreeMap::from([(member(1), vec![key(0, 0)])])
        );
        step.claim(key(1, 0), member(3));
        assert!(step.ledger.to_replay(&BTreeSet::new()).is_empty());
        // Without both neighbours, the first stage's work is granted first.
        step.ledger.revoke(member(3));
        step.ledger.revoke(member(1));
        assert!(step.ledger.to_replay(&BTreeSet::new()).is_empty());
        assert_eq!(step.ledger.lowest_free(), Some(Microbatch(0)));
        step.claim(key(0, 0), member(4));
        assert_eq!(
            step.ledger.to_replay(&BTreeSet::new()),
            BTreeMap::from([(member(4), vec![key(0, 0)])])
        );
    }

    #[test]
    fn only_the_holder_releases_a_claim_and_only_before_it_is_done() {
        let mut step = step4();
        step.claim(key(1, 0), member(1));
        for (other, grant) in [(2, 10), (1, 9)] {
            assert!(!step.ledger.release(key(1, 0), member(other), nth(grant)));
        }
        assert!(step.ledger.release(key(1, 0), member(1), nth(10)));
        assert!(!step.ledger.release(key(1, 0), member(1), nth(10)));
        assert_eq!(step.claim(key(1, 0), member(1)), granted(11));
        let loss = Some(FixedLoss::new(1, 1));
        step.ledger.done(key(1, 0), member(1), nth(11), (loss, HANDOVER));
        assert!(!step.ledger.release(key(1, 0), member(1), nth(11)));
    }

    #[test]
    fn work_that_stays_unclaimed_is_replayed_too() {
        let mut step = step4();
        step.claim(key(0, 1), member(1));
        let unclaimed = step.ledger.unclaimed();
        assert_eq!(unclaimed, BTreeSet::from([(Stage(1), Microbatch(1))]));
        let replays = step.ledger.to_replay(&unclaimed);
        assert_eq!(replays, BTreeMap::from([(member(1), vec![key(0, 1)])]));
        step.claim(key(1, 1), member(2));
        assert!(step.ledger.unclaimed().is_empty() && step.ledger.to_replay(&unclaimed).is_empty());
    }
}
