//! The coordinator's office: whose word counts as the coordinator's, from a peer's point of view.
//!
//! A term is believed with the signatures of a majority of the anchors that this peer knows of. The same proof names the
//! anchors that follow them, so this peer goes on with those. A peer that knows no anchors yet believes the proof that
//! the peer it asked shows.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, PeerId, RunId, Term};
use shoal_protocol::message::{
    AnchorGroup, Attested, PROOFS, ProofError, Signatures, TermProof, TermVote,
};

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

/// Why a proof of a term is not believed, although its signatures are good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unproven {
    /// The signers are no majority of the anchors that this peer knows of.
    #[error("no majority of the known anchors stands behind term {0}")]
    Strangers(Term),
    /// This peer knows no anchors, and did not ask the sender.
    #[error("a proof of term {0} comes from a peer that was not asked")]
    NotAsked(Term),
    /// The term has another coordinator.
    #[error("term {0} has another coordinator")]
    Rival(Term),
}

/// Why proofs of a term are not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotBelieved {
    /// One of them proves nothing to anyone.
    #[error(transparent)]
    Invalid(#[from] ProofError),
    /// One of them proves nothing to this peer.
    #[error(transparent)]
    Unproven(#[from] Unproven),
}

/// What a peer knows of the office.
#[derive(Debug, Default)]
pub struct Office {
    /// The newest term that is proved.
    term: Term,
    /// The peer that the anchors elected for it.
    elected: Option<PeerId>,
    /// The life of it that spoke first.
    holder: Option<Member>,
    /// The anchors that decide the next term.
    group: Option<AnchorGroup>,
    /// The anchors that this peer's own log names, if it is an anchor.
    own_log: Option<AnchorGroup>,
    /// The newest proof of each of the newest groups, for peers that know an earlier one.
    proofs: Vec<TermProof>,
    /// The issuer of the run, whose signature stands for any majority.
    issuer: Option<PeerId>,
    /// The peers that may be elected, as far as this peer knows: none before its first membership.
    anchors: BTreeSet<PeerId>,
}

impl Office {
    /// The office of a run with this issuer, if it has one. `group` are the anchors that this peer's own log names.
    #[must_use]
    pub fn new(issuer: Option<PeerId>, group: Option<AnchorGroup>) -> Self {
        Self { issuer, group, ..Self::default() }
    }

    /// The newest term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// The peer that the anchors elected for the newest term; `None` before the first.
    #[must_use]
    pub fn elected(&self) -> Option<PeerId> {
        self.elected
    }

    /// The proofs that lead another peer to the newest term, oldest first.
    #[must_use]
    pub fn proofs(&self) -> &[TermProof] {
        &self.proofs
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

    /// Notes the anchors that this peer's own log names now. The log may know of a change whose proof never came, because
    /// the coordinator died with it.
    pub fn follow_log(&mut self, group: Option<AnchorGroup>) {
        self.own_log = group;
    }

    /// Whether a proof would say something new. Others need not be checked.
    fn is_new(&self, vote: &TermVote) -> bool {
        let known = self.group.as_ref().map(AnchorGroup::place);
        vote.term > self.term || (vote.term == self.term && Some(vote.group.place()) > known)
    }

    /// Takes in proofs as received, oldest first. What they prove to this peer is known from then on; those of groups
    /// before the one that it knows prove nothing to it.
    ///
    /// # Errors
    /// If a proof is forged, or the newest one says something new and is not believed.
    pub fn learn(
        &mut self,
        (run, keys): (RunId, &dyn Signatures),
        mut proofs: Vec<TermProof>,
        asked: bool,
    ) -> Result<(), NotBelieved> {
        proofs.truncate(PROOFS);
        if self.group.is_none() && asked {
            let Some(newest) = proofs.pop() else { return Ok(()) };
            self.believe(&newest.check(run, keys)?, asked)?;
            self.keep_earlier(proofs);
            return Ok(());
        }
        let mut newest = Ok(());
        for proof in proofs {
            newest = Ok(());
            if self.is_new(&proof.vote) {
                // Signatures cost time, so only those are checked that could prove something.
                let named = |peer| proof.signatures.contains_key(&peer);
                newest = self.follows(&proof.vote, asked, named);
                if newest.is_ok() {
                    newest = self.believe(&proof.check(run, keys)?, asked);
                }
            }
        }
        Ok(newest?)
    }

    /// Believes a term that a majority of the known anchors stands behind, or the issuer of the run. `asked` says
    /// whether the sender is the peer that this one asked, which counts while it knows no anchors. The sender of a
    /// proof does not matter otherwise.
    ///
    /// # Errors
    /// If nothing proves it to this peer; then it knows what it knew before.
    fn believe(&mut self, proof: &Attested, asked: bool) -> Result<(), Unproven> {
        let vote = proof.vote();
        if self.is_new(vote) {
            self.follows(vote, asked, |peer| proof.is_signed_by(peer))?;
            self.begin(vote.term, vote.coordinator);
            self.keep(proof.proof().clone());
        }
        Ok(())
    }

    /// Whether a newer term follows from what this peer knows, with the signatures of these peers.
    fn follows(
        &self,
        vote: &TermVote,
        asked: bool,
        signed: impl Fn(PeerId) -> bool,
    ) -> Result<(), Unproven> {
        if vote.term == self.term && self.elected != Some(vote.coordinator) {
            return Err(Unproven::Rival(vote.term));
        }
        match &self.group {
            None if !asked => return Err(Unproven::NotAsked(vote.term)),
            None => {}
            Some(known) => {
                let by_issuer = self.issuer.is_some_and(&signed);
                let later = self.own_log.as_ref().filter(|own| own.place() > known.place());
                let by_majority = [Some(known), later]
                    .into_iter()
                    .flatten()
                    .any(|known| vote.group.place() >= known.place() && known.is_majority(&signed));
                if !by_issuer && !by_majority {
                    return Err(Unproven::Strangers(vote.term));
                }
            }
        }
        Ok(())
    }

    /// The anchors elected this peer, as its own log says.
    pub fn hold(&mut self, me: Member, proof: TermProof) {
        self.begin(proof.vote.term, me.peer);
        self.holder = Some(me);
        self.keep(proof);
    }

    /// Notes another proof of this peer's own term: of more anchors, or of the group that follows.
    pub fn confirm(&mut self, proof: TermProof) {
        if proof.vote.term == self.term && self.elected == Some(proof.vote.coordinator) {
            self.keep(proof);
        }
    }

    /// Takes a term as proved: for a simulation without that rule.
    pub(crate) fn assume(&mut self, coordinator: Member, term: Term) {
        self.begin(term, coordinator.peer);
        self.holder = Some(coordinator);
    }

    fn begin(&mut self, term: Term, coordinator: PeerId) {
        if term > self.term {
            self.holder = None;
        }
        (self.term, self.elected) = (term, Some(coordinator));
    }

    /// Keeps a proof: of each group the first, which the group before it signed, and of the last group the newest.
    fn keep(&mut self, proof: TermProof) {
        self.group = Some(proof.vote.group.clone());
        // The issuer may begin anew from an earlier place of the log.
        let place = proof.vote.group.place();
        self.proofs.retain(|known| known.vote.group.place() <= place);
        match self.proofs.as_mut_slice() {
            [.., last] if last.vote == proof.vote => {
                *last = proof;
                return;
            }
            [.., first, last] if first.vote.group == last.vote.group => drop(self.proofs.pop()),
            _ => {}
        }
        self.proofs.push(proof);
        let surplus = self.proofs.len().saturating_sub(PROOFS);
        self.proofs.drain(..surplus);
    }

    /// Keeps proofs of earlier groups for other peers. They prove nothing to this one.
    fn keep_earlier(&mut self, proofs: Vec<TermProof>) {
        let Some(first) = self.proofs.first().map(|proof| proof.vote.group.place()) else { return };
        let earlier = proofs.into_iter().filter(|proof| proof.vote.group.place() < first);
        let mut earlier: Vec<TermProof> = earlier.take(PROOFS - self.proofs.len()).collect();
        earlier.append(&mut self.proofs);
        self.proofs = earlier;
    }

    /// Decides whether a message is a coordinator's: of the peer that the anchors elected for the newest term, and of
    /// the life of it that spoke first.
    pub fn admit(&mut self, from: Member, term: Term) -> Option<InOffice> {
        if term != self.term || self.elected != Some(from.peer) {
            return None;
        }
        (*self.holder.get_or_insert(from) == from).then_some(InOffice(from))
    }

    /// Whether a peer may say who the coordinator is: the one that was asked, or another that may be elected. So no
    /// stranger sends this peer anywhere.
    #[must_use]
    pub fn may_redirect(&self, from: PeerId, asked: Option<PeerId>) -> bool {
        asked == Some(from) || self.is_anchor(from)
    }

    /// Whether messages may go to another peer on such a word: to the one that was elected, or to any while the
    /// coordinator is `lost` or no anchors are known.
    #[must_use]
    pub fn may_be_asked(&self, other: PeerId, lost: bool) -> bool {
        lost || self.group.is_none() || self.elected == Some(other)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shoal_protocol::ids::Incarnation;

    use super::*;
    use crate::sim::HashKeys;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn member(number: u8, life: u64) -> Member {
        Member { peer: peer(number), incarnation: Incarnation(life) }
    }

    /// A proof that these peers signed: the group with this number elected a coordinator.
    fn proof(term: u64, coordinator: u8, group: (u64, &[u8]), signers: &[u8]) -> Attested {
        let run = RunId::of(b"run");
        let voters = vec![group.1.iter().copied().map(peer).collect()];
        let group = AnchorGroup { history: 0, number: group.0, voters };
        let vote = TermVote { term: Term(term), coordinator: peer(coordinator), group };
        let bytes = vote.signed_bytes(run);
        let signature = |number: &u8| (peer(*number), HashKeys::sign_as(peer(*number), &bytes));
        let signatures: BTreeMap<_, _> = signers.iter().map(signature).collect();
        TermProof { vote, signatures }.check(run, &HashKeys(peer(0))).expect("a majority signed")
    }

    const ANCHORS: (u64, &[u8]) = (1, &[1, 2, 3]);

    /// Peers 1 to 3 are the anchors, 4 is another member; 1 has the office in term 5.
    fn office() -> Office {
        let mut office = Office::default();
        (1..=3).for_each(|number| office.add_anchor(peer(number)));
        office.believe(&proof(5, 1, ANCHORS, &[1, 3]), true).expect("it was asked");
        assert!(office.admit(member(1, 1), Term(5)).is_some());
        office
    }

    #[test]
    fn a_new_term_needs_a_majority_of_the_anchors() {
        let mut office = office();
        for (number, term) in [(2, 6), (4, 6), (9, 6), (2, 5), (4, 5)] {
            assert_eq!(office.admit(member(number, 1), Term(term)), None, "nothing proves it");
        }
        // An anchor that says that it alone is the group, or is one with peers that are none.
        for (group, signers) in [(&[2_u8][..], &[2_u8][..]), (&[2, 4, 9], &[2, 4, 9])] {
            let lie = proof(6, 2, (7, group), signers);
            assert_eq!(office.believe(&lie, true), Err(Unproven::Strangers(Term(6))));
        }
        assert_eq!(office.admit(member(2, 1), Term(6)), None);
        office.believe(&proof(6, 2, ANCHORS, &[2, 3]), false).expect("a majority");
        assert!(office.admit(member(2, 1), Term(6)).is_some());
        assert_eq!(office.admit(member(1, 1), Term(5)), None, "its term is over");
        assert_eq!(office.admit(member(1, 1), Term(6)), None, "that term is another's");
        assert_eq!(office.admit(member(2, 2), Term(6)), None, "another life of it");
        let rival = proof(6, 3, (9, &[1, 2, 3]), &[1, 2, 3]);
        assert_eq!(office.believe(&rival, true), Err(Unproven::Rival(Term(6))));
        let past = proof(5, 1, ANCHORS, &[1, 2, 3]);
        assert!(!office.is_new(past.vote()) && office.believe(&past, true).is_ok());
        assert_eq!((office.term(), office.elected()), (Term(6), Some(peer(2))));
    }

    #[test]
    fn a_peer_that_slept_is_led_from_group_to_group() {
        let mut awake = office();
        // 3 is replaced by 4, then 1 by 5, then 2 by 6.
        let proofs = [
            proof(5, 1, (2, &[1, 2, 4]), &[1, 2, 4]),
            proof(6, 2, (3, &[2, 4, 5]), &[2, 4]),
            proof(7, 5, (4, &[4, 5, 6]), &[4, 5, 6]),
        ];
        for proof in &proofs {
            awake.believe(proof, false).expect("a majority of the group before signed it");
        }
        let places = awake.proofs().iter().map(|proof| proof.vote.group.number);
        assert_eq!(places.collect::<Vec<_>>(), [1, 2, 3, 4]);
        let mut slept = office();
        assert_eq!(slept.believe(&proofs[2], false), Err(Unproven::Strangers(Term(7))));
        for proof in &proofs {
            slept.believe(proof, false).expect("in order");
        }
        assert_eq!((slept.term(), slept.elected()), (Term(7), Some(peer(5))));
        assert!(slept.admit(member(5, 1), Term(7)).is_some());
        // The anchors of the past decide nothing any more.
        let past = proof(8, 1, ANCHORS, &[1, 2, 3]);
        assert_eq!(slept.believe(&past, true), Err(Unproven::Strangers(Term(8))));
    }

    #[test]
    fn an_anchor_goes_on_with_the_group_of_its_own_log() {
        let mut office = office();
        // The proof of this change never came.
        let next = proof(9, 5, (40, &[4, 5, 6]), &[5, 6]);
        assert_eq!(office.believe(&next, false), Err(Unproven::Strangers(Term(9))));
        let group = |number, voters: &[u8]| {
            let voters = vec![voters.iter().copied().map(peer).collect()];
            Some(AnchorGroup { history: 0, number, voters })
        };
        office.follow_log(group(1, &[4, 5, 6]));
        assert!(office.believe(&next, false).is_err(), "an older log proves nothing");
        office.follow_log(group(41, &[4, 5, 6]));
        assert!(office.believe(&next, false).is_err(), "the group is older than the log's");
        office.follow_log(group(40, &[4, 5, 6]));
        assert_eq!(office.believe(&next, false), Ok(()));
        assert_eq!(office.elected(), Some(peer(5)));
    }

    #[test]
    fn the_issuer_of_the_run_stands_for_a_majority_that_is_gone() {
        let alone = proof(9, 1, (8, &[1]), &[1]);
        let known =
            AnchorGroup { history: 0, number: 2, voters: vec![[peer(1), peer(2), peer(3)].into()] };
        let mut office = Office::new(Some(peer(1)), Some(known.clone()));
        office.believe(&alone, false).expect("the issuer signed it");
        for issuer in [None, Some(peer(2))] {
            let mut office = Office::new(issuer, Some(known.clone()));
            assert_eq!(office.believe(&alone, true), Err(Unproven::Strangers(Term(9))));
        }
    }

    #[test]
    fn a_newcomer_believes_the_peer_that_it_asked_and_no_other() {
        let mut office = Office::default();
        let term = proof(3, 7, (1, &[7]), &[7]);
        assert_eq!(office.believe(&term, false), Err(Unproven::NotAsked(Term(3))));
        assert_eq!(office.admit(member(7, 1), Term(3)), None);
        office.believe(&term, true).expect("it was asked");
        assert!(office.admit(member(7, 1), Term(3)).is_some());
        assert!(office.may_redirect(peer(7), Some(peer(7))));
        assert!(!office.may_redirect(peer(8), Some(peer(7))));
        // What it is told of earlier groups is for others.
        let earlier = proof(1, 6, (0, &[6]), &[6]).proof().clone();
        office.keep_earlier(vec![earlier.clone(), term.proof().clone()]);
        assert_eq!(office.proofs(), [earlier, term.proof().clone()]);
        assert!(office.may_be_asked(peer(7), false) && office.may_be_asked(peer(8), true));
        assert!(!office.may_be_asked(peer(8), false));
    }

    #[test]
    fn the_first_proof_of_each_group_is_kept_and_the_newest_of_the_last() {
        let mut office = office();
        for proof in [
            proof(6, 2, ANCHORS, &[2, 3]),
            proof(7, 1, ANCHORS, &[1, 2]),
            proof(7, 1, (2, &[1, 2, 4]), &[1, 2]),
            proof(8, 4, (2, &[1, 2, 4]), &[1, 4]),
        ] {
            office.believe(&proof, false).expect("a majority");
        }
        let kept = |office: &Office| -> Vec<(u64, u64)> {
            let each = office.proofs().iter();
            each.map(|proof| (proof.vote.term.0, proof.vote.group.number)).collect()
        };
        assert_eq!(kept(&office), [(5, 1), (7, 2), (8, 2)]);
        // More signatures of the same term replace the earlier ones.
        let more = proof(8, 4, (2, &[1, 2, 4]), &[1, 2, 4]).proof().clone();
        office.confirm(more.clone());
        assert_eq!((kept(&office).len(), office.proofs().last()), (3, Some(&more)));
        let sleeper = &mut self::office();
        let keys = (RunId::of(b"run"), &HashKeys(peer(0)) as &dyn Signatures);
        sleeper.learn(keys, office.proofs().to_vec(), false).expect("led from one to the next");
        assert_eq!((sleeper.term(), sleeper.elected()), (Term(8), Some(peer(4))));
        // A peer that starts with the group of its log is shown the earlier ones too.
        let known = office.proofs()[1].vote.group.clone();
        let mut restarted = Office::new(None, Some(known));
        restarted.learn(keys, office.proofs().to_vec(), false).expect("the newest counts");
        assert_eq!((restarted.term(), restarted.elected()), (Term(8), Some(peer(4))));
        // A proof that names no majority is not even checked.
        let mut strange = more.clone();
        strange.vote.term = Term(9);
        strange.signatures = [(peer(7), [0; 64])].into();
        let learned = sleeper.learn(keys, vec![strange], true);
        assert_eq!(learned, Err(NotBelieved::Unproven(Unproven::Strangers(Term(9)))));
        let mut forged = more;
        forged.vote.term = Term(9);
        let learned = sleeper.learn(keys, vec![forged], true);
        assert!(matches!(learned, Err(NotBelieved::Invalid(ProofError::Forged { .. }))));
    }

    #[test]
    fn only_the_newest_proofs_are_kept() {
        let mut office = Office::default();
        let last = PROOFS as u64 + 9;
        for number in 0..=last {
            office.believe(&proof(1, 1, (number, &[1]), &[1]), true).expect("the same anchor");
        }
        let newest = office.proofs().last().map(|proof| proof.vote.group.number);
        assert_eq!((office.proofs().len(), newest), (PROOFS, Some(last)));
    }

    #[test]
    fn only_those_asked_and_those_that_may_be_elected_say_who_coordinates() {
        let office = office();
        let redirects = |from: u8| office.may_redirect(peer(from), Some(peer(1)));
        assert!(redirects(1) && redirects(3));
        assert!(!redirects(4) && !redirects(9));
    }
}
