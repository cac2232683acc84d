//! The coordinator's office: whose word counts as the coordinator's, from a peer's point of view.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, PeerId, Term};

/// The sender of a message that holds the office of coordinator. Only [`Office::admit`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InOffice(Member);

impl InOffice {
    /// The coordinator.
    #[must_use]
    pub fn member(self) -> Member {
        self.0
    }

    /// A sender whose office nobody checked: for a simulation without that rule, and for tests.
    pub(crate) fn unchecked(member: Member) -> Self {
        Self(member)
    }
}

/// What a peer knows of the office.
#[derive(Debug, Default)]
pub struct Office {
    /// The coordinator of the newest term, and that term.
    holder: Option<Member>,
    term: Term,
    /// The peers that may be elected, as far as this peer knows: none before its first membership.
    anchors: BTreeSet<PeerId>,
}

impl Office {
    /// The newest term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// Whether a peer may be elected.
    #[must_use]
    pub fn is_anchor(&self, peer: PeerId) -> bool {
        self.anchors.contains(&peer)
    }

    /// The peers that may be elected.
    #[must_use]
    pub fn anchors(&self) -> &BTreeSet<PeerId> {
        &self.anchors
    }

    /// Notes a peer that may be elected.
    pub fn add_anchor(&mut self, peer: PeerId) {
        self.anchors.insert(peer);
    }

    /// Decides whether a message is a coordinator's. A new term needs a sender that may be elected, or the peer that
    /// this one has asked to be admitted by, or was sent to by one that it had asked. Within a term only the first
    /// sender counts.
    pub fn admit(&mut self, from: Member, term: Term, asked: Option<PeerId>) -> Option<InOffice> {
        let may = self.is_anchor(from.peer) || asked == Some(from.peer);
        if term > self.term && may {
            (self.term, self.holder) = (term, Some(from));
        }
        (term == self.term && self.holder == Some(from)).then_some(InOffice(from))
    }

    /// Whether a peer may say who the coordinator is: the one that was asked, or another that may be elected. So no
    /// stranger sends this peer anywhere.
    #[must_use]
    pub fn may_redirect(&self, from: PeerId, asked: Option<PeerId>) -> bool {
        asked == Some(from) || self.is_anchor(from)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::Incarnation;

    use super::*;

    fn member(number: u8, life: u64) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(life) }
    }

    /// Peers 1 to 3 may be elected, 4 is another member; 1 has the office in term 5.
    fn office() -> Office {
        let mut office = Office::default();
        (1..=3).for_each(|number| office.add_anchor(PeerId([number; 32])));
        assert!(office.admit(member(1, 1), Term(5), None).is_some());
        office
    }

    #[test]
    fn a_new_term_needs_a_sender_that_may_be_elected() {
        let mut office = office();
        let asked = Some(PeerId([1; 32]));
        for stranger in [4, 9] {
            assert_eq!(office.admit(member(stranger, 1), Term(6), asked), None);
            assert_eq!(office.admit(member(stranger, 1), Term(5), asked), None);
        }
        assert!(office.admit(member(2, 1), Term(6), asked).is_some());
        assert_eq!(office.admit(member(1, 1), Term(5), asked), None, "its term is over");
        assert_eq!(office.admit(member(1, 1), Term(6), asked), None, "that term is another's");
        assert_eq!(office.admit(member(2, 2), Term(6), asked), None, "another life of it");
        assert_eq!(office.term(), Term(6));
    }

    #[test]
    fn a_newcomer_believes_the_peer_that_it_asked_and_no_other() {
        let (asked, other) = (member(7, 1), member(8, 1));
        let mut office = Office::default();
        assert_eq!(office.admit(other, Term(9), Some(asked.peer)), None);
        assert_eq!(office.admit(other, Term(9), None), None);
        assert!(office.admit(asked, Term(3), Some(asked.peer)).is_some());
        assert!(office.may_redirect(asked.peer, Some(asked.peer)));
        assert!(!office.may_redirect(other.peer, Some(asked.peer)));
    }

    #[test]
    fn only_those_asked_and_those_that_may_be_elected_say_who_coordinates() {
        let office = office();
        let redirects = |from: u8| office.may_redirect(PeerId([from; 32]), Some(PeerId([1; 32])));
        assert!(redirects(1) && redirects(3));
        assert!(!redirects(4) && !redirects(9));
    }
}
