//! Who keeps the run, as far as this peer knows: whom its words for the coordinator go to, and whose
//! words it obeys.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use shoal_protocol::ids::{Incarnation, Member, PeerId, Term};
use shoal_protocol::message::View;

/// How long a member waits for a coordinator to be heard again.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// What a peer knows of the run's keeper.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    /// Whom its words go to.
    member: Option<Member>,
    /// Whom it obeys, and the term of that one's office: no earlier one is heard any more.
    obeyed: Option<Member>,
    term: Term,
    /// Who may be the coordinator.
    anchors: BTreeSet<PeerId>,
    /// The newest life that was seen of each peer, and whether it is known to be over.
    lives: BTreeMap<PeerId, (Incarnation, bool)>,
    /// Since when the keeper cannot be reached.
    lost: Option<Instant>,
}

impl Keeper {
    /// Begins with who is said to keep the run.
    pub(super) fn new(member: Option<Member>) -> Self {
        Self { member, ..Self::default() }
    }

    pub(super) fn member(&self) -> Option<Member> {
        self.member
    }

    pub(super) fn term(&self) -> Term {
        self.term
    }

    pub(super) fn is_anchor(&self, peer: PeerId) -> bool {
        self.anchors.contains(&peer)
    }

    /// Until when it is waited for.
    pub(super) fn patience_ends(&self) -> Option<Instant> {
        self.lost.map(|lost| lost + PATIENCE)
    }

    /// For how long it cannot be reached by now.
    pub(super) fn missed_for(&self) -> Option<Duration> {
        self.lost.map(|lost| lost.elapsed())
    }

    /// A coordinator's word came. Returns whether it is obeyed: of a later term than any before, from
    /// who may have such an office, or of the same one.
    pub(super) fn obeys(&mut self, from: Member, term: Term) -> bool {
        let said_to_be = self.member.is_some_and(|member| member.peer == from.peer);
        let may = said_to_be || self.anchors.is_empty() || self.anchors.contains(&from.peer);
        let newer = term > self.term && may;
        if newer {
            (self.term, self.obeyed) = (term, Some(from));
        }
        let obeyed = newer || (term == self.term && self.obeyed == Some(from));
        if obeyed {
            self.is(from);
        }
        obeyed
    }

    /// This one keeps the run.
    pub(super) fn is(&mut self, member: Member) {
        self.member = Some(member);
        self.lost = None;
    }

    /// An anchor was chosen by the others.
    pub(super) fn leads(&mut self, peer: PeerId) {
        if let Some((incarnation, _)) = self.lives.get(&peer) {
            self.member = Some(Member { peer, incarnation: *incarnation });
        }
    }

    /// A connection to this life of a peer was made. Returns the one before, if it was known.
    pub(super) fn met(&mut self, member: Member) -> Option<Member> {
        let Member { peer, incarnation } = member;
        let before = self.lives.insert(peer, (incarnation, false));
        if self.member.is_some_and(|known| known.peer == peer) {
            self.member = Some(member);
        }
        let before = before.map(|(incarnation, _)| Member { peer, incarnation });
        before.filter(|before| before.incarnation < incarnation)
    }

    /// Who is a member now.
    pub(super) fn view(&mut self, view: &View) {
        for record in &view.members {
            let Member { peer, incarnation } = record.member;
            let known = self.lives.entry(peer).or_insert((incarnation, false));
            if incarnation > known.0 {
                *known = (incarnation, false);
            }
            if record.duties.anchor {
                self.anchors.insert(peer);
            }
        }
    }

    /// A peer cannot be reached any more. Returns whether it was the keeper.
    pub(super) fn lost(&mut self, member: Member, me: Member) -> bool {
        if let Some(known) = self.lives.get_mut(&member.peer)
            && known.0 == member.incarnation
        {
            known.1 = true;
        }
        let kept = self.member.is_some_and(|keeper| keeper.peer == member.peer);
        if kept {
            self.lost.get_or_insert_with(Instant::now);
            self.choose_other(me);
        }
        kept
    }

    /// Asks the next of those who may keep the run. Who does not will say who does.
    pub(super) fn choose_other(&mut self, me: Member) {
        let now = self.member.map(|member| member.peer);
        let others = || self.anchors.iter().copied().filter(|peer| *peer != me.peer);
        let next = others().find(|peer| now.is_none_or(|now| *peer > now));
        if let Some(peer) = next.or_else(|| others().next()) {
            self.leads(peer);
        }
    }

    /// Lives that are over.
    pub(super) fn gone(&self) -> Vec<Member> {
        let over = self.lives.iter().filter(|(_, (_, over))| *over);
        over.map(|(peer, (incarnation, _))| Member { peer: *peer, incarnation: *incarnation })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Stage, StageSpan};
    use shoal_protocol::message::{Duties, MemberRecord};

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    /// Peers 1 to 3 may keep the run, 4 may not; 1 does.
    fn keeper() -> Keeper {
        let record = |number| MemberRecord {
            member: member(number),
            span: StageSpan::one(Stage(0)),
            addresses: Vec::new(),
            serving: true,
            duties: Duties { anchor: number < 4, archive: false },
            mobile: false,
            moves: None,
        };
        let mut keeper = Keeper::new(Some(member(1)));
        let members = (1..=4).map(record).map(Into::into).collect();
        keeper.view(&View { number: 1, members });
        assert!(keeper.obeys(member(1), Term(5)));
        keeper
    }

    #[test]
    fn a_later_terms_coordinator_is_obeyed_and_no_earlier_one() {
        let mut keeper = keeper();
        assert!(keeper.obeys(member(2), Term(6)));
        assert!(!keeper.obeys(member(1), Term(5)), "its term is over");
        assert!(!keeper.obeys(member(1), Term(6)), "that term is another's");
        assert!(!keeper.obeys(member(4), Term(7)), "it is no anchor");
        assert_eq!((keeper.member(), keeper.term()), (Some(member(2)), Term(6)));
    }

    #[test]
    fn who_lost_the_keeper_asks_the_other_anchors_in_turn() {
        let mut keeper = keeper();
        let me = member(4);
        assert!(!keeper.lost(member(3), me), "that was not the keeper");
        assert_eq!(keeper.patience_ends(), None);
        assert!(keeper.lost(member(1), me));
        assert_eq!(keeper.member(), Some(member(2)));
        assert!(keeper.lost(member(2), me) && keeper.patience_ends().is_some());
        assert_eq!(keeper.member(), Some(member(3)));
        assert_eq!(keeper.gone(), [member(1), member(2), member(3)]);
        // It comes back as another life.
        let again = Member { incarnation: Incarnation(2), ..member(3) };
        assert_eq!(keeper.met(again), Some(member(3)));
        assert_eq!(keeper.member(), Some(again));
        assert!(keeper.obeys(again, Term(6)) && keeper.patience_ends().is_none());
    }
}
