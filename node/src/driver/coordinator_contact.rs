//! The coordinator, as far as this peer knows it: the receiver of its messages, and the sender of
//! those that it accepts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shoal_protocol::ids::{Incarnation, Member, PeerId, RunId, Term};
use shoal_protocol::message::{AnchorGroup, Signatures, TermProof, View};
use shoal_scheduler::office::{InOffice, NotBelieved, Office};

/// How long a member waits for an unreachable coordinator.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// Time for a coordinator to speak before another anchor is asked for it.
const SEEK: Duration = Duration::from_secs(3);

/// Knowledge of the run's coordinator and of the anchors that may become it.
#[derive(Debug, Default)]
pub(super) struct CoordinatorContact {
    /// The receiver of messages to the coordinator.
    coordinator: Option<Member>,
    office: Office,
    /// The newest known life of each peer, and whether it has ended.
    lives: BTreeMap<PeerId, (Incarnation, bool)>,
    /// The moment at which the coordinator became unreachable.
    unreachable_since: Option<Instant>,
    /// Whether this peer began without anyone to ask, as the founder of a run does.
    begins_alone: bool,
    /// When the next anchor is asked, while no coordinator has spoken.
    next_search: Option<Duration>,
}

impl CoordinatorContact {
    /// Begins with the coordinator that the peer joined through, if any.
    pub(super) fn new(coordinator: Option<Member>, office: Office) -> Self {
        Self { coordinator, office, begins_alone: coordinator.is_none(), ..Self::default() }
    }

    pub(super) fn coordinator(&self) -> Option<Member> {
        self.coordinator
    }

    pub(super) fn term(&self) -> Term {
        self.office.term()
    }

    /// Returns the peer that the anchors elected for the newest term.
    pub(super) fn elected_peer(&self) -> Option<PeerId> {
        self.office.elected()
    }

    /// Returns the proofs that lead another peer to the newest term.
    pub(super) fn proofs(&self) -> &[TermProof] {
        self.office.proofs()
    }

    /// Notes the anchors that this peer's own log names, if it is an anchor.
    pub(super) fn follow_log(&mut self, group: Option<AnchorGroup>) {
        self.office.follow_log(group);
    }

    /// Takes in proofs of a term.
    ///
    /// # Errors
    /// If they prove nothing to this peer.
    pub(super) fn learn(
        &mut self,
        from: PeerId,
        run_and_keys: (RunId, &dyn Signatures),
        proofs: Vec<TermProof>,
    ) -> Result<(), NotBelieved> {
        let asked = self.asked() == Some(from);
        self.office.learn(run_and_keys, proofs, asked)
    }

    /// The anchors elected this peer.
    pub(super) fn lead(&mut self, me: Member, proof: TermProof) {
        self.office.hold(me, proof);
        self.set(me);
    }

    /// Notes another proof of this peer's own term.
    pub(super) fn confirm(&mut self, proof: TermProof) {
        self.office.confirm(proof);
    }

    pub(super) fn is_anchor(&self, peer: PeerId) -> bool {
        self.office.is_anchor(peer)
    }

    /// Returns the end of the wait for an unreachable coordinator.
    pub(super) fn wait_ends(&self) -> Option<Instant> {
        self.unreachable_since.map(|since| since + PATIENCE)
    }

    /// Returns the time for which the coordinator has been unreachable.
    pub(super) fn unreachable_for(&self) -> Option<Duration> {
        self.unreachable_since.map(|since| since.elapsed())
    }

    /// Decides whether a message is the coordinator's, which then is reachable.
    pub(super) fn admit(&mut self, from: Member, term: Term) -> Option<InOffice> {
        let admitted = self.office.admit(from, term)?;
        self.set(from);
        Some(admitted)
    }

    /// Follows a peer's word on who the coordinator is, if that peer may say so. Returns whether it may.
    pub(super) fn redirect(&mut self, from: PeerId, coordinator: Member) -> bool {
        let may = self.office.may_redirect(from, self.asked());
        let lost = self.unreachable_since.is_some();
        if may && self.office.may_be_asked(coordinator.peer, lost) {
            self.set(coordinator);
        }
        may
    }

    /// The peer that messages to the coordinator go to.
    fn asked(&self) -> Option<PeerId> {
        self.coordinator.map(|member| member.peer)
    }

    /// Sets the coordinator, which is reachable.
    pub(super) fn set(&mut self, member: Member) {
        self.coordinator = Some(member);
        self.unreachable_since = None;
    }

    /// Notes that the anchors elected this peer.
    pub(super) fn elected(&mut self, peer: PeerId) {
        if let Some((incarnation, _)) = self.lives.get(&peer) {
            self.coordinator = Some(Member { peer, incarnation: *incarnation });
        }
    }

    /// Notes a connection to this life of a peer. Returns an earlier life of it, if one was known.
    pub(super) fn connected(&mut self, member: Member) -> Option<Member> {
        let Member { peer, incarnation } = member;
        let before = self.lives.insert(peer, (incarnation, false));
        if self.coordinator.is_some_and(|known| known.peer == peer) {
            self.coordinator = Some(member);
        }
        let before = before.map(|(incarnation, _)| Member { peer, incarnation });
        before.filter(|before| before.incarnation < incarnation)
    }

    /// Notes the lives of members, and the anchors among them.
    pub(super) fn members_changed(&mut self, view: &View) {
        for record in &view.members {
            let Member { peer, incarnation } = record.member;
            let known = self.lives.entry(peer).or_insert((incarnation, false));
            if incarnation > known.0 {
                *known = (incarnation, false);
            }
            if record.duties.anchor {
                self.office.add_anchor(peer);
            }
        }
    }

    /// Notes that a peer is unreachable. Returns whether it was the coordinator; messages then go to
    /// another anchor.
    pub(super) fn lost(&mut self, member: Member, me: Member) -> bool {
        if let Some(known) = self.lives.get_mut(&member.peer)
            && known.0 == member.incarnation
        {
            known.1 = true;
        }
        let coordinated = self.coordinator.is_some_and(|known| known.peer == member.peer);
        if coordinated {
            self.unreachable_since.get_or_insert_with(Instant::now);
            self.try_next_anchor(me);
        }
        coordinated
    }

    /// Sends messages to the next anchor, in the order of ids. One that is not the coordinator
    /// answers with the address of the one that is.
    pub(super) fn try_next_anchor(&mut self, me: Member) {
        let current = self.asked();
        let others = || self.office.anchors().iter().copied().filter(|peer| *peer != me.peer);
        let next = others().find(|peer| current.is_none_or(|current| *peer > current));
        if let Some(peer) = next.or_else(|| others().next()) {
            self.elected(peer);
        }
    }

    /// Asks the next anchor for the coordinator while none has spoken. `now` is the time since any fixed moment. The other
    /// anchors may have gone on without this one; then no leader sends it anything.
    pub(super) fn seek(&mut self, me: Member, now: Duration) {
        if !self.begins_alone || self.office.term() != Term(0) {
            return;
        }
        let due = *self.next_search.get_or_insert(now + SEEK);
        if now >= due {
            self.next_search = Some(now + SEEK);
            self.try_next_anchor(me);
        }
    }

    /// Returns the lives that are known to have ended.
    pub(super) fn ended_lives(&self) -> Vec<Member> {
        let ended = self.lives.iter().filter(|(_, (_, ended))| *ended);
        ended
            .map(|(peer, (incarnation, _))| Member { peer: *peer, incarnation: *incarnation })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Stage, StageSpan};
    use shoal_protocol::message::{AnchorGroup, Duties, MemberRecord, TermVote};
    use shoal_scheduler::sim::HashKeys;

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    /// A record of one of peers 1 to 4, of which 4 is no anchor.
    fn record(number: u8) -> MemberRecord {
        MemberRecord {
            duties: Duties { anchor: number < 4, archive: false },
            ..MemberRecord::plain(member(number), StageSpan::one(Stage(0)))
        }
    }

    /// Anchors 1 to 3 elect one of them; these of them sign.
    fn elects(
        contact: &mut CoordinatorContact,
        coordinator: u8,
        term: u64,
        signers: &[u8],
    ) -> bool {
        let run = RunId::of(b"run");
        let voters = vec![[1, 2, 3].map(|number| member(number).peer).into()];
        let group = AnchorGroup { history: 0, number: 1, voters };
        let coordinator = member(coordinator).peer;
        let vote = TermVote { term: Term(term), coordinator, group };
        let bytes = vote.signed_bytes(run);
        let peers = signers.iter().map(|number| member(*number).peer);
        let signatures = peers.map(|peer| (peer, HashKeys::sign_as(peer, &bytes))).collect();
        let proofs = vec![TermProof { vote, signatures }];
        contact.learn(member(9).peer, (run, &HashKeys(member(4).peer)), proofs).is_ok()
    }

    fn group() -> Option<AnchorGroup> {
        let voters = vec![[1, 2, 3].map(|number| member(number).peer).into()];
        Some(AnchorGroup { history: 0, number: 1, voters })
    }

    /// Peers 1 to 3 are anchors, 4 is not; 1 is the coordinator.
    fn contact() -> CoordinatorContact {
        let mut contact = CoordinatorContact::new(Some(member(1)), Office::new(None, group()));
        let members = (1..=4).map(record).map(Into::into).collect();
        contact.members_changed(&View { number: 1, members });
        assert!(elects(&mut contact, 1, 5, &[1, 2]));
        assert!(contact.admit(member(1), Term(5)).is_some());
        contact
    }

    #[test]
    fn messages_go_to_the_coordinator_of_the_newest_term_and_nowhere_a_stranger_says() {
        let mut contact = contact();
        assert!(contact.admit(member(2), Term(6)).is_none(), "nothing proves it");
        assert!(!elects(&mut contact, 2, 6, &[2]), "one of three");
        assert!(elects(&mut contact, 2, 6, &[2, 3]));
        assert!(contact.admit(member(2), Term(6)).is_some());
        assert!(contact.admit(member(4), Term(7)).is_none(), "it is no anchor");
        assert!(contact.redirect(member(1).peer, member(3)));
        assert_eq!(contact.coordinator(), Some(member(2)), "that one was not elected");
        for stranger in [4, 9] {
            assert!(!contact.redirect(member(stranger).peer, member(9)));
        }
        assert_eq!((contact.coordinator(), contact.term()), (Some(member(2)), Term(6)));
        assert!(elects(&mut contact, 3, 7, &[1, 2, 3]));
        assert!(contact.redirect(member(2).peer, member(3)));
        assert_eq!(contact.coordinator(), Some(member(3)));
    }

    #[test]
    fn an_anchor_that_the_others_dropped_asks_them_in_turn_until_a_coordinator_speaks() {
        let view = View { number: 1, members: (1..=3).map(record).map(Into::into).collect() };
        let mut contact = CoordinatorContact::new(None, Office::new(None, group()));
        contact.members_changed(&view);
        let me = member(2);
        let mut asked = |seconds| {
            contact.seek(me, Duration::from_secs(seconds));
            contact.coordinator()
        };
        assert_eq!([asked(100), asked(102)], [None, None], "an election takes a moment");
        assert_eq!([asked(103), asked(105)], [Some(member(1)); 2]);
        assert_eq!([asked(106), asked(109)], [Some(member(3)), Some(member(1))]);
        assert!(elects(&mut contact, 3, 4, &[1, 3]));
        assert!(contact.redirect(member(1).peer, member(3)));
        assert!(contact.admit(member(3), Term(4)).is_some());
        contact.seek(me, Duration::from_secs(200));
        assert_eq!(contact.coordinator(), Some(member(3)));
    }

    #[test]
    fn a_peer_that_lost_the_coordinator_asks_the_other_anchors_in_turn() {
        let mut contact = contact();
        let me = member(4);
        assert!(!contact.lost(member(3), me), "that was not the coordinator");
        assert_eq!(contact.wait_ends(), None);
        assert!(contact.lost(member(1), me));
        assert_eq!(contact.coordinator(), Some(member(2)));
        assert!(contact.lost(member(2), me) && contact.wait_ends().is_some());
        assert_eq!(contact.coordinator(), Some(member(3)));
        assert_eq!(contact.ended_lives(), [member(1), member(2), member(3)]);
        // It comes back in another life.
        let again = Member { incarnation: Incarnation(2), ..member(3) };
        assert_eq!(contact.connected(again), Some(member(3)));
        assert_eq!(contact.coordinator(), Some(again));
        assert!(elects(&mut contact, 3, 6, &[2, 3]));
        assert!(contact.admit(again, Term(6)).is_some() && contact.wait_ends().is_none());
    }
}
