//! The all-reduce of one stage's replicas, and the proof that travels with it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ids::{Attempt, ClaimKey, ContentHash, Era, Member, Mend, Stage, Step, Term};

/// One try at the all-reduce of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, bincode::Encode, bincode::Decode)]
pub struct RoundId {
    /// In which era.
    pub era: Era,
    /// Ordered by the coordinator of which term.
    pub term: Term,
    /// The step whose gradients are summed.
    pub step: Step,
    /// The stage.
    pub stage: Stage,
    /// The try.
    pub attempt: Attempt,
}

/// Who reduces with whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Which round.
    pub id: RoundId,
    /// Who takes part in it.
    pub group: Arc<RoundGroup>,
    /// What became of it since it began.
    pub mended: Mended,
}

/// Members of a round were gone, and what they had counted is done by those who are left: they go on with
/// what they have of it. Pieces that one of them has summed stay as they are, since each microbatch is in
/// them once; the parts of the vector that the others had are theirs now.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct Mended {
    /// For which time; it is none where the round begins.
    pub mend: Mend,
    /// Whose sums are not what they were before this time, by their places in the crew: what they sent until
    /// then, and was not summed yet, they send again.
    pub changed: BTreeSet<u16>,
}

/// Who takes part in a stage's rounds. From one to the next few come or go, so it is told as a change.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RoundGroup {
    /// Which one, of all that this stage's rounds ever had.
    pub number: u64,
    /// Every replica, in order.
    pub members: Vec<RoundMember>,
    /// Newcomers that hear the result and add nothing, in order.
    pub listeners: Vec<Member>,
}

/// One replica in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundMember {
    /// Who.
    pub member: Member,
    /// Its part of the vector is in proportion to this.
    pub weight: u32,
}

/// One of a crew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct RoundGroupMember {
    /// Who.
    pub member: Member,
    /// A replica's weight; none of who listens.
    pub weight: Option<u32>,
}

/// What makes another crew of one. Who has not the one that it begins from asks for the whole.
#[derive(Debug, Clone, PartialEq, Eq, Default, bincode::Encode, bincode::Decode)]
pub struct RoundGroupChange {
    /// The crew that it begins from.
    pub since: u64,
    /// The one that it makes of it; the same where nothing changes.
    pub number: u64,
    /// Who is in it no more.
    pub gone: BTreeSet<Member>,
    /// Who is new, or not what it was.
    pub here: Vec<RoundGroupMember>,
}

impl RoundGroup {
    /// Those who are in it.
    pub fn all(&self) -> impl Iterator<Item = RoundGroupMember> + '_ {
        let members = self.members.iter();
        let members =
            members.map(|part| RoundGroupMember { member: part.member, weight: Some(part.weight) });
        let listeners = self.listeners.iter();
        members.chain(listeners.map(|member| RoundGroupMember { member: *member, weight: None }))
    }

    /// The crew of these. Of who is named twice the last word counts.
    #[must_use]
    pub fn of(number: u64, all: impl IntoIterator<Item = RoundGroupMember>) -> Self {
        let all: BTreeMap<Member, Option<u32>> =
            all.into_iter().map(|one| (one.member, one.weight)).collect();
        let part = |(member, weight): (&Member, &Option<u32>)| {
            weight.map(|weight| RoundMember { member: *member, weight })
        };
        let members = all.iter().filter_map(part).collect();
        let listens =
            |(member, weight): (&Member, &Option<u32>)| weight.is_none().then_some(*member);
        let listeners = all.iter().filter_map(listens).collect();
        Self { number, members, listeners }
    }

    /// What leads from this crew to a newer one.
    #[must_use]
    pub fn change_to(&self, newer: &Self) -> RoundGroupChange {
        let by_member = |group: &Self| -> BTreeMap<Member, Option<u32>> {
            group.all().map(|one| (one.member, one.weight)).collect()
        };
        let (old, new) = (by_member(self), by_member(newer));
        let gone = old.keys().filter(|member| !new.contains_key(member)).copied().collect();
        let here = newer.all().filter(|one| old.get(&one.member) != Some(&one.weight)).collect();
        RoundGroupChange { since: self.number, number: newer.number, gone, here }
    }

    /// The crew that a change leads to; none where it begins from another.
    #[must_use]
    pub fn changed_by(&self, change: &RoundGroupChange) -> Option<Self> {
        let stay = self.all().filter(|one| !change.gone.contains(&one.member));
        let all = stay.chain(change.here.iter().copied());
        (change.since == self.number).then(|| Self::of(change.number, all))
    }
}

/// What a round came to; equal at all its members.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct RoundOutcome {
    /// Hash of the hashes of the mean gradient's blocks, of [`limits::ROUND_BLOCK_ELEMENTS`] elements
    /// each: a block is measured as soon as it is there.
    ///
    /// [`limits::ROUND_BLOCK_ELEMENTS`]: crate::limits::ROUND_BLOCK_ELEMENTS
    pub hash: ContentHash,
    /// Sum of its squares, added in an order that depends on nothing.
    pub square_norm: f64,
    /// Sum modulo 2^64 of the tags of the microbatches that were counted.
    pub proof: u64,
}

/// The pseudo-random word that stands for one counted microbatch in the proof that travels with
/// every round. The sum modulo 2^64 of a batch's tags is equal to that of another multiset of the
/// same keys only by a chance of 2^-64.
#[must_use]
pub fn proof_tag(key: ClaimKey) -> u64 {
    let mut tags = proof_tags(key.step, key.stage);
    tags.set_position(u64::from(key.microbatch.0) * TAG as u64);
    let mut tag = [0; TAG];
    tags.fill(&mut tag);
    u64::from_le_bytes(tag)
}

/// The sum of the tags of the first so many microbatches of a step at a stage, which every replica of
/// the stage needs: much less work than one tag after the other.
#[must_use]
pub fn proof_of_all(step: Step, stage: Stage, microbatches: u32) -> u64 {
    let mut tags = proof_tags(step, stage);
    let mut sum = 0u64;
    let mut left = microbatches as usize;
    let mut some = [0; TAG * 1024];
    while left > 0 {
        let count = left.min(some.len() / TAG);
        tags.fill(&mut some[..count * TAG]);
        let (words, _) = some[..count * TAG].as_chunks::<TAG>();
        sum = words.iter().fold(sum, |sum, tag| sum.wrapping_add(u64::from_le_bytes(*tag)));
        left -= count;
    }
    sum
}

/// Bytes of one tag.
const TAG: usize = 8;

/// The tags of a step at a stage, one microbatch's after the other's.
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
        let weight = prop::option::of(0u32..3);
        prop::collection::btree_map(0u8..40, weight, 0..40).prop_map(move |all| {
            let one = |(peer, weight): (u8, Option<u32>)| {
                let member = Member { peer: PeerId([peer; 32]), incarnation: Incarnation(1) };
                RoundGroupMember { member, weight }
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

    proptest! {
        #[test]
        fn a_change_makes_the_crew_that_it_leads_to(old in group(4), new in group(7)) {
            let change = old.change_to(&new);
            prop_assert_eq!(old.changed_by(&change), Some(new.clone()));
            prop_assert_eq!(new.changed_by(&change), None);
            let same = new.change_to(&new);
            prop_assert!(same.gone.is_empty() && same.here.is_empty());
            prop_assert_eq!(new.changed_by(&same), Some(new));
        }
    }
}
