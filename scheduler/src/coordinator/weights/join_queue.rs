//! The queue of members that wait for their turn to fetch weights.

use std::collections::BTreeMap;

use shoal_protocol::ids::Member;

/// Members in the order of their arrival, each once.
#[derive(Debug, Default)]
pub(super) struct JoinQueue {
    places: BTreeMap<Member, u64>,
    members: BTreeMap<u64, Member>,
    next: u64,
}

impl JoinQueue {
    /// Appends a member, unless it is in the queue.
    pub(super) fn push(&mut self, member: Member) {
        if !self.contains(member) {
            self.places.insert(member, self.next);
            self.members.insert(self.next, member);
            self.next += 1;
        }
    }

    pub(super) fn remove(&mut self, member: Member) {
        if let Some(place) = self.places.remove(&member) {
            self.members.remove(&place);
        }
    }

    pub(super) fn contains(&self, member: Member) -> bool {
        self.places.contains_key(&member)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// All members, in order of arrival.
    pub(super) fn into_members(self) -> impl Iterator<Item = Member> {
        self.members.into_values()
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    #[test]
    fn a_repeated_push_keeps_the_place_and_a_removed_member_returns_at_the_end() {
        let member = |number| Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) };
        let mut queue = JoinQueue::default();
        for number in [3, 1, 2, 3] {
            queue.push(member(number));
        }
        queue.remove(member(1));
        assert!(!queue.contains(member(1)) && queue.contains(member(2)));
        queue.push(member(1));
        queue.remove(member(9));
        let left: Vec<Member> = queue.into_members().collect();
        assert_eq!(left, [3, 2, 1].map(member));
    }
}
