//! Who waits for its turn, in the order in which it came.

use std::collections::BTreeMap;

use shoal_protocol::ids::Member;

/// Members in the order in which they came, each once.
#[derive(Debug, Default)]
pub(super) struct Queue {
    places: BTreeMap<Member, u64>,
    members: BTreeMap<u64, Member>,
    next: u64,
}

impl Queue {
    /// A member comes last, if it is not there yet.
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

    /// All of them, the first to come first.
    pub(super) fn into_members(self) -> impl Iterator<Item = Member> {
        self.members.into_values()
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    #[test]
    fn who_comes_twice_keeps_its_place_and_who_went_comes_last() {
        let member = |number| Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) };
        let mut queue = Queue::default();
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
