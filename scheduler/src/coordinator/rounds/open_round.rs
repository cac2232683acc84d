//! One round: its members, the microbatches that they have counted, and their results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_protocol::ids::{Attempt, Member, Mend, Microbatch, Stage};
use shoal_protocol::message::{
    FromCoordinator, Mended, Round, RoundGroup, RoundGroupChange, RoundGroupMember, RoundId,
    RoundOutcome,
};

use super::super::{Out, send};
use crate::paging;
use crate::round::place_in;

/// A round that is open.
#[derive(Debug)]
pub(super) struct OpenRound {
    pub(super) round: Round,
    /// The sum of the tags of the whole batch.
    pub(super) proof: u64,
    /// The microbatches that the replicas' accumulators must hold.
    pub(super) counted: BTreeMap<Member, Vec<(Stage, Microbatch)>>,
    /// The replicas' results.
    pub(super) outcomes: BTreeMap<Member, RoundOutcome>,
    /// Whether a replica is gone: the round is mended once others have done its work.
    pub(super) torn: bool,
}

/// How far the replicas of a round agree on its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Agreement {
    /// Results are still to come.
    Partial,
    /// All have the same.
    Whole,
    /// More than half have the same, and these members others.
    Minority(Vec<Member>),
    /// No result has more than half of them.
    Split,
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

    /// Whether a member reduces a part.
    pub(super) fn has_replica(&self, member: Member) -> bool {
        place_in(&self.round, member).is_some()
    }

    /// Takes a replica's result.
    ///
    /// # Errors
    /// When a microbatch was lost or counted twice, by the replica's own proof.
    pub(super) fn record(&mut self, from: Member, outcome: RoundOutcome) -> Result<(), String> {
        let RoundId { step, weights, .. } = self.round.id;
        if outcome.proof != self.proof {
            return Err(format!(
                "{from} proves {:#018x} instead of {:#018x} for step {}, weight group {}: a microbatch \
                 was lost or counted twice",
                outcome.proof, self.proof, step, weights
            ));
        }
        self.outcomes.insert(from, outcome);
        Ok(())
    }

    /// How far the replicas agree.
    pub(super) fn agreement(&self) -> Agreement {
        if !self.is_complete() {
            return Agreement::Partial;
        }
        let (_, first) = self.result();
        if self.outcomes.values().all(|one| equal_bits(one, &first)) {
            return Agreement::Whole;
        }
        let with = |one: &RoundOutcome| {
            self.outcomes.values().filter(|other| equal_bits(one, other)).count()
        };
        let most = self.outcomes.values().max_by_key(|one| with(one)).unwrap_or(&first);
        let differs =
            |(member, one): (&Member, &RoundOutcome)| (!equal_bits(one, most)).then_some(*member);
        let minority: Vec<Member> = self.outcomes.iter().filter_map(differs).collect();
        if 2 * minority.len() < self.outcomes.len() {
            Agreement::Minority(minority)
        } else {
            Agreement::Split
        }
    }

    /// The replicas whose result is lacking, if others have theirs.
    pub(super) fn lacking(&self) -> Vec<Member> {
        let replicas = self.round.group.members.iter().map(|part| part.member);
        let lacking = replicas.filter(|member| !self.outcomes.contains_key(member));
        lacking.filter(|_| !self.outcomes.is_empty()).collect()
    }

    /// The attempt and the result of a complete round.
    pub(super) fn result(&self) -> (Attempt, RoundOutcome) {
        let outcome = self.outcomes.values().next().expect("a round has members");
        (self.round.id.attempt, *outcome)
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

fn equal_bits(one: &RoundOutcome, other: &RoundOutcome) -> bool {
    one.hash == other.hash
        && one.proof == other.proof
        && one.square_norm.to_bits() == other.square_norm.to_bits()
}
