//! One round: its members, the microbatches that they have counted, and their results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{Attempt, Member, Mend, Microbatch, Stage};
use shoal_protocol::message::{
    FromCoordinator, Mended, OWNER_GROUPS, PROJECTIONS, Round, RoundCheck, RoundGroup,
    RoundGroupChange, RoundGroupMember, RoundId, RoundOutcome, SumsPrint,
};

use super::super::{Out, send};
use crate::paging;
use crate::round::{checked_groups, place_in};

/// A round that is open.
#[derive(Debug)]
pub(super) struct OpenRound {
    pub(super) round: Round,
    /// The sum of the tags of the whole batch.
    pub(super) proof: u64,
    /// The microbatches that the replicas' accumulators must hold.
    pub(super) counted: BTreeMap<Member, Vec<(Stage, Microbatch)>>,
    /// The replicas' results, and what each makes of their challenge.
    pub(super) outcomes: BTreeMap<Member, Report>,
    /// Whether a replica is gone: the round is mended once others have done its work.
    pub(super) torn: bool,
}

/// What a member reports of a round.
#[derive(Debug, Clone)]
pub(in super::super) struct Report {
    /// The result.
    pub(in super::super) outcome: RoundOutcome,
    /// What its sums and the result make of the result's challenge.
    pub(in super::super) checks: Vec<RoundCheck>,
    /// The prints of its sums, by stage.
    pub(in super::super) sums: Vec<(Stage, SumsPrint)>,
}

/// How far the replicas of a round agree on its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Agreement {
    /// Results are still to come.
    Partial,
    /// All have the same.
    Whole,
    /// More than half have the same, and these members others; or these have reported what cannot be.
    Minority(Vec<Member>),
    /// No result has more than half of them.
    Split,
    /// All have the same, and it is not the sum of what they gave in the pieces of these members.
    Forged(BTreeSet<Member>),
}

impl OpenRound {
    /// Whether all replicas hold a result.
    pub(super) fn is_complete(&self) -> bool {
        self.outcomes.len() == self.round.group.members.len()
    }

    /// Whether a result of this attempt and mend is expected.
    pub(super) fn expects(&self, id: RoundId, mend: Mend) -> bool {
        self.round.id == id && self.round.mended.mend == mend && !self.torn
    }

    /// Whether a member has pieces to reduce.
    pub(super) fn reduces(&self, member: Member) -> bool {
        let members = || self.round.group.members.iter();
        let none_reduces = members().all(|part| part.weight == 0);
        members().any(|part| part.member == member && (part.weight > 0 || none_reduces))
    }

    /// Whether a member reduces a part.
    pub(super) fn has_replica(&self, member: Member) -> bool {
        place_in(&self.round, member).is_some()
    }

    /// Takes a replica's result.
    ///
    /// # Errors
    /// When a microbatch was lost or counted twice, by the replica's own proof.
    pub(super) fn record(&mut self, from: Member, report: Report) -> Result<(), String> {
        let outcome = report.outcome;
        let RoundId { step, weights, .. } = self.round.id;
        if outcome.proof != self.proof {
            return Err(format!(
                "{from} proves {:#018x} instead of {:#018x} for step {}, weight group {}: a microbatch \
                 was lost or counted twice",
                outcome.proof, self.proof, step, weights
            ));
        }
        self.outcomes.insert(from, report);
        Ok(())
    }

    /// How far the replicas agree.
    pub(super) fn agreement(&self, codec: SumCodec) -> Agreement {
        if !self.is_complete() {
            return Agreement::Partial;
        }
        let groups = checked_groups(&self.round, codec);
        let without_pieces = self.without_pieces(groups);
        let outcomes = || self.outcomes.iter().map(|(member, report)| (*member, report));
        let broken = outcomes().filter(|(_, report)| !is_report(report, groups, &without_pieces));
        let broken: Vec<Member> = broken.map(|(member, _)| member).collect();
        // Where several members make nothing of it, it is the round that is broken, and no member of it is a liar.
        if broken.len() > 1 && broken.len() == self.outcomes.len() {
            return Agreement::Split;
        }
        if !broken.is_empty() {
            return Agreement::Minority(broken);
        }
        let with = |one: &Report| outcomes().filter(|(_, other)| agree(one, other)).count();
        let most = self.outcomes.values().max_by_key(|one| with(one));
        let most = most.expect("a complete round has members");
        let minority = outcomes().filter(|(_, one)| !agree(one, most));
        let minority: Vec<Member> = minority.map(|(member, _)| member).collect();
        if minority.is_empty() {
            let forged = self.forged(groups);
            return if forged.is_empty() { Agreement::Whole } else { Agreement::Forged(forged) };
        }
        if 2 * minority.len() < self.outcomes.len() {
            Agreement::Minority(minority)
        } else {
            Agreement::Split
        }
    }

    /// The groups of owners that reduce nothing, in a whole round.
    fn without_pieces(&self, groups: usize) -> Vec<bool> {
        let Round { group, mended, .. } = &self.round;
        let none_reduces = group.members.iter().all(|part| part.weight == 0);
        let mut without = vec![mended.mend == Mend(0) && !none_reduces; groups];
        if groups == 0 {
            return without;
        }
        let places = group.members.iter().enumerate().filter(|(_, part)| part.weight > 0);
        places.for_each(|(place, _)| without[place % OWNER_GROUPS] = false);
        without
    }

    /// The owners of pieces that are not the sum of what the members say that they gave.
    fn forged(&self, groups: usize) -> BTreeSet<Member> {
        let is_forged = |group: usize| {
            let checks = self.outcomes.values().map(|report| report.checks[group]);
            // Who exaggerates its slack gains nothing: it could as well say that it gave the difference.
            let slack: f64 = checks.clone().map(|check| check.slack).sum();
            (0..PROJECTIONS).any(|direction| {
                let given: f64 = checks.clone().map(|check| check.own[direction]).sum();
                let whole = checks.clone().next().map_or(0.0, |check| check.result[direction]);
                (given - whole).abs() > slack
            })
        };
        let places = (0..).zip(&self.round.group.members);
        let forged: BTreeSet<usize> = (0..groups).filter(|group| is_forged(*group)).collect();
        let owns = |place: usize| forged.contains(&(place % OWNER_GROUPS));
        places.filter(|(place, _)| owns(*place)).map(|(_, part)| part.member).collect()
    }

    /// The replicas whose result is lacking, if others have theirs.
    pub(super) fn lacking(&self) -> Vec<Member> {
        let replicas = self.round.group.members.iter().map(|part| part.member);
        let lacking = replicas.filter(|member| !self.outcomes.contains_key(member));
        lacking.filter(|_| !self.outcomes.is_empty()).collect()
    }

    /// The attempt and the result of a complete round.
    pub(super) fn result(&self) -> (Attempt, RoundOutcome) {
        let report = self.outcomes.values().next().expect("a round has members");
        (self.round.id.attempt, report.outcome)
    }

    /// A replica is gone.
    pub(super) fn tear(&mut self) {
        self.torn = true;
        self.outcomes.clear();
    }

    /// The torn round among the members of a smaller group. None if a member outside it has counted something,
    /// or no member is left.
    pub(super) fn mended(
        self,
        group: Arc<RoundGroup>,
        counted: BTreeMap<Member, Vec<(Stage, Microbatch)>>,
    ) -> Option<Self> {
        let places = (0..).zip(&group.members);
        let is_changed = |member| self.counted.get(member) != counted.get(member);
        let changed = places.filter_map(|(place, part)| is_changed(&part.member).then_some(place));
        let mended = Mended { mend: self.round.mended.mend.next(), changed: changed.collect() };
        let round = Round { id: self.round.id, group, mended };
        let mended = Self { round, counted, torn: false, ..self };
        let fits = mended.counted.keys().all(|member| mended.has_replica(*member));
        (fits && !mended.round.group.members.is_empty()).then_some(mended)
    }

    /// Sends the round to all its members. Those that know the group before receive the difference.
    pub(super) fn send(&self, before: &RoundGroup, out: &mut Out) {
        let group = &self.round.group;
        let change = before.change_to(group);
        let known: BTreeSet<Member> = before.all().map(|one| one.member).collect();
        let small = change.gone.len() + change.here.len() <= paging::CHANGED;
        for RoundGroupMember { member, .. } in group.all() {
            if small && known.contains(&member) {
                send(member, self.close_message(member, change.clone()), out);
            } else {
                self.send_whole(member, out);
            }
        }
    }

    /// Sends the round and its whole group to a member.
    pub(super) fn send_whole(&self, to: Member, out: &mut Out) {
        let group = &self.round.group;
        let number = group.number;
        let all: Vec<RoundGroupMember> = group.all().collect();
        for (part, here) in paging::cut(&all) {
            let weights = self.round.id.weights;
            send(to, FromCoordinator::RoundGroup { weights, number, part, here }, out);
        }
        let same = RoundGroupChange { since: number, number, ..RoundGroupChange::default() };
        send(to, self.close_message(to, same), out);
    }

    /// The message that begins the round for a member.
    fn close_message(&self, to: Member, group: RoundGroupChange) -> FromCoordinator {
        let (round, mended) = (self.round.id, self.round.mended.clone());
        let counted = self.counted.get(&to).cloned().unwrap_or_default();
        FromCoordinator::Close { round, group, mended, counted }
    }
}

/// Whether a report has a check of numbers for each group of owners, and nothing of those without pieces.
fn is_report(report: &Report, groups: usize, without_pieces: &[bool]) -> bool {
    let checks = &report.checks;
    let is_nothing =
        |check: &RoundCheck| check.own.iter().chain(&check.result).all(|of| *of == 0.0);
    let fits = |(check, without): (&RoundCheck, &bool)| {
        check.is_finite() && (!without || is_nothing(check))
    };
    checks.len() == groups && checks.iter().zip(without_pieces).all(fits)
}

/// Whether two members hold the same result and project it alike.
fn agree(one: &Report, other: &Report) -> bool {
    let (of_one, of_other) = (&one.checks, &other.checks);
    let alike = |(one, other): (&RoundCheck, &RoundCheck)| {
        let slack = one.slack.min(other.slack);
        let mut both = one.result.iter().zip(&other.result);
        both.all(|(one, other)| (one - other).abs() <= slack)
    };
    equal_bits(&one.outcome, &other.outcome)
        && of_one.len() == of_other.len()
        && of_one.iter().zip(of_other).all(alike)
}

fn equal_bits(one: &RoundOutcome, other: &RoundOutcome) -> bool {
    one.hash == other.hash
        && one.proof == other.proof
        // All that is no number is alike, whatever the processor makes of it.
        && (one.square_norm.to_bits() == other.square_norm.to_bits()
            || one.square_norm.is_nan() && other.square_norm.is_nan())
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Era, Incarnation, PeerId, Step, Term, WeightGroup};
    use shoal_protocol::message::RoundMember;

    use super::*;

    /// A round of members with these weights.
    fn open(weights: &[u32], mend: Mend) -> OpenRound {
        let member = |(number, weight): (usize, &u32)| RoundMember {
            member: Member { peer: PeerId([number as u8; 32]), incarnation: Incarnation(1) },
            weight: *weight,
            island: None,
        };
        let members = weights.iter().enumerate().map(member).collect();
        let id = RoundId {
            era: Era(0),
            term: Term(1),
            step: Step(0),
            weights: WeightGroup(0),
            attempt: Attempt(0),
        };
        let group = Arc::new(RoundGroup { members, ..RoundGroup::default() });
        let round = Round { id, group, mended: Mended { mend, changed: BTreeSet::new() } };
        let (counted, outcomes) = (BTreeMap::new(), BTreeMap::new());
        OpenRound { round, proof: 0, counted, outcomes, torn: false }
    }

    #[test]
    fn only_groups_of_owners_that_reduce_nothing_in_a_whole_round_have_no_pieces() {
        let whole = |weights: &[u32], groups| open(weights, Mend(0)).without_pieces(groups);
        assert_eq!(whole(&[1, 1], 0), []);
        assert_eq!(whole(&[1, 0, 2], 3), [false, true, false]);
        // Where nobody has a weight, all reduce alike.
        assert_eq!(whole(&[0, 0], 2), [false, false]);
        // Pieces of a mended round may be those of members that are gone.
        assert_eq!(open(&[1, 0, 2], Mend(1)).without_pieces(3), [false, false, false]);
        // The owner of place 32 shares the group of place 0.
        let mut weights = vec![0; OWNER_GROUPS + 2];
        weights[OWNER_GROUPS] = 1;
        let without = whole(&weights, OWNER_GROUPS);
        assert!(!without[0] && without[1..].iter().all(|without| *without));
    }
}
