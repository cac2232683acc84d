//! The all-reduce round of one weight group's replicas, and the proof that travels with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ids::{
    Attempt, ClaimKey, ContentHash, Era, Member, Mend, Stage, Step, Term, WeightGroup,
};
use crate::limits;

/// One attempt at the all-reduce of one weight group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, bincode::Encode, bincode::Decode)]
pub struct RoundId {
    /// The era.
    pub era: Era,
    /// The term of the coordinator that ordered the round.
    pub term: Term,
    /// The step whose gradients are summed.
    pub step: Step,
    /// The weights whose gradients are summed.
    pub weights: WeightGroup,
    /// The attempt.
    pub attempt: Attempt,
}

/// A round and its members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// The identifier of the round.
    pub id: RoundId,
    /// The members of the round.
    pub group: Arc<RoundGroup>,
    /// The latest mend of the round since it began.
    pub mended: Mended,
}

/// The state of a round that continues after it lost members.
///
/// The remaining members have redone the microbatches of the lost ones. They continue with the
/// partial results of the round: pieces that a remaining member has summed stay valid, because each
/// microbatch is in them once. The remaining members take over the parts of the vector that the
/// lost ones had.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Mended {
    /// The number of this mend; 0 when the round begins.
    pub mend: Mend,
    /// The members whose sums differ from those before this mend, by their positions in the round
    /// group. They send again all sums that they had sent until then and that are not added yet.
    pub changed: BTreeSet<u16>,
}

/// The members of a weight group's rounds. Few change from one round to the next, so messages carry
/// changes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RoundGroup {
    /// The number of this group, counted over all groups of these weights' rounds.
    pub number: u64,
    /// The replicas that add their sums, in order.
    pub members: Vec<RoundMember>,
    /// Newcomers that receive the result and add nothing, in order.
    pub listeners: Vec<Member>,
}

/// One replica in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundMember {
    /// The replica.
    pub member: Member,
    /// The size of its part of the vector is in proportion to this weight.
    pub weight: u32,
    /// The island of members with fast links to each other; `None` if it is alone.
    pub island: Option<u16>,
}

/// One entry of a round group: a replica or a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RoundGroupMember {
    /// The replica or listener.
    pub member: Member,
    /// The replica's weight; `None` for a listener.
    pub weight: Option<u32>,
    /// The replica's island, if it is in one with others.
    pub island: Option<u16>,
}

/// The difference between two round groups. A receiver that lacks the first requests the complete
/// group.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct RoundGroupChange {
    /// The number of the group that it starts from.
    pub since: u64,
    /// The number of the group that it produces; the same if nothing changes.
    pub number: u64,
    /// The members that are removed.
    pub gone: BTreeSet<Member>,
    /// The members that are added or changed.
    pub here: Vec<RoundGroupMember>,
}

impl RoundGroup {
    /// All entries: replicas, then listeners.
    pub fn all(&self) -> impl Iterator<Item = RoundGroupMember> + '_ {
        let replica = |part: &RoundMember| {
            let RoundMember { member, weight, island } = *part;
            RoundGroupMember { member, weight: Some(weight), island }
        };
        let listener =
            |member: &Member| RoundGroupMember { member: *member, weight: None, island: None };
        self.members.iter().map(replica).chain(self.listeners.iter().map(listener))
    }

    /// A group of these entries. The last of several entries of a member counts.
    #[must_use]
    pub fn of(number: u64, all: impl IntoIterator<Item = RoundGroupMember>) -> Self {
        let all: BTreeMap<Member, RoundGroupMember> =
            all.into_iter().map(|one| (one.member, one)).collect();
        let part = |one: &RoundGroupMember| {
            let RoundGroupMember { member, weight, island } = *one;
            weight.map(|weight| RoundMember { member, weight, island })
        };
        let members = all.values().filter_map(part).collect();
        let listens = |one: &RoundGroupMember| one.weight.is_none().then_some(one.member);
        let listeners = all.values().filter_map(listens).collect();
        Self { number, members, listeners }
    }

    /// The change from this group to a newer one.
    #[must_use]
    pub fn change_to(&self, newer: &Self) -> RoundGroupChange {
        let by_member = |group: &Self| -> BTreeMap<Member, RoundGroupMember> {
            group.all().map(|one| (one.member, one)).collect()
        };
        let (old, new) = (by_member(self), by_member(newer));
        let gone = old.keys().filter(|member| !new.contains_key(member)).copied().collect();
        let here = newer.all().filter(|one| old.get(&one.member) != Some(one)).collect();
        RoundGroupChange { since: self.number, number: newer.number, gone, here }
    }

    /// The group that a change produces; `None` if the change starts from another group, or makes one of more members
    /// than a run has.
    #[must_use]
    pub fn changed_by(&self, change: &RoundGroupChange) -> Option<Self> {
        let stay = self.all().filter(|one| !change.gone.contains(&one.member));
        let all = stay.chain(change.here.iter().copied());
        let changed = (change.since == self.number).then(|| Self::of(change.number, all));
        changed.filter(|group| group.all().count() <= limits::MEMBERS)
    }
}

/// The result of a round; equal at all its members.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct RoundOutcome {
    /// Hash of the hashes of the mean gradient's blocks, of [`limits::ROUND_BLOCK_ELEMENTS`]
    /// elements each. A block is hashed as soon as it arrives.
    ///
    /// [`limits::ROUND_BLOCK_ELEMENTS`]: crate::limits::ROUND_BLOCK_ELEMENTS
    pub hash: ContentHash,
    /// Sum of the squared elements, added in a fixed order.
    pub square_norm: f64,
    /// Sum modulo 2^64 of the tags of the microbatches that were counted.
    pub proof: u64,
}

/// The pseudo-random number that stands for one counted microbatch in the proof that travels with
/// every round. The sum modulo 2^64 of a batch's tags equals that of another multiset of the same
/// keys only with probability 2^-64.
#[must_use]
pub fn proof_tag(key: ClaimKey) -> u64 {
    let mut tags = proof_tags(key.step, key.stage);
    tags.set_position(u64::from(key.microbatch.0) * TAG as u64);
    let mut tag = [0; TAG];
    tags.fill(&mut tag);
    u64::from_le_bytes(tag)
}

/// The sum of the tags of the first `microbatches` microbatches of a step at a stage. Every replica
/// of the stage needs it. Costs far less than computing the tags one by one.
#[must_use]
pub fn proof_of_all(step: Step, stage: Stage, microbatches: u32) -> u64 {
    let mut tags = proof_tags(step, stage);
    let mut sum = 0u64;
    let mut left = microbatches as usize;
    let mut some = [0; TAG * 1024];
    while left > 0 {
        let count = left.min(some.len() / TAG);
        tags.fill(&mut some[..count * TAG]);
        let (chunk_tags, _) = some[..count * TAG].as_chunks::<TAG>();
        sum = chunk_tags.iter().fold(sum, |sum, tag| sum.wrapping_add(u64::from_le_bytes(*tag)));
        left -= count;
    }
    sum
}

/// Bytes of one tag.
const TAG: usize = 8;

/// The tags of a step at a stage, in order of microbatches.
fn proof_tags(step: Step, stage: Stage) -> blake3::OutputReader {
    let mut hasher = blake3::Hasher::new_derive_key("shoal proof tags v2");
    hasher.update(&step.0.to_le_bytes());
    hasher.update(&stage.0.to_le_bytes());
    hasher.finalize_xof()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::{Incarnation, Microbatch, PeerId};

    fn group(number: u64) -> impl Strategy<Value = RoundGroup> {
        let part = prop::option::of((0u32..3, prop::option::of(0u16..3)));
        prop::collection::btree_map(0u8..40, part, 0..40).prop_map(move |all| {
            let one = |(peer, part): (u8, Option<(u32, Option<u16>)>)| {
                let member = Member { peer: PeerId([peer; 32]), incarnation: Incarnation(1) };
                let (weight, island) = part.unzip();
                RoundGroupMember { member, weight, island: island.flatten() }
            };
            RoundGroup::of(number, all.into_iter().map(one))
        })
    }

    #[test]
    fn all_tags_sum_to_the_sum_of_each() {
        let (step, stage) = (Step(7), Stage(2));
        for count in [0, 1, 7, 1024, 1025, 3000] {
            let tag = |number| proof_tag(ClaimKey { step, stage, microbatch: Microbatch(number) });
            let each = (0..count).map(tag).fold(0, u64::wrapping_add);
            assert_eq!(proof_of_all(step, stage, count), each, "{count}");
        }
    }

    #[test]
    fn a_group_of_more_members_than_a_run_has_is_refused() {
        let one = |number: u32| {
            let mut peer = [0; 32];
            peer[..4].copy_from_slice(&number.to_be_bytes());
            let member = Member { peer: PeerId(peer), incarnation: Incarnation(1) };
            RoundGroupMember { member, weight: None, island: None }
        };
        let most = limits::MEMBERS as u32;
        let full = RoundGroup::of(1, (0..most).map(one));
        let gone = BTreeSet::new();
        let again = RoundGroupChange { since: 1, number: 2, gone, here: vec![one(0)] };
        assert!(full.changed_by(&again).is_some());
        let more = RoundGroupChange { here: vec![one(most)], ..again };
        assert_eq!(full.changed_by(&more), None);
    }

    proptest! {
        #[test]
        fn a_change_produces_the_round_group_it_leads_to(old in group(4), new in group(7)) {
            let change = old.change_to(&new);
            prop_assert_eq!(old.changed_by(&change), Some(new.clone()));
            prop_assert_eq!(new.changed_by(&change), None);
            let same = new.change_to(&new);
            prop_assert!(same.gone.is_empty() && same.here.is_empty());
            prop_assert_eq!(new.changed_by(&same), Some(new));
        }
    }
}
