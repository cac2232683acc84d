//! The proof that a majority of the anchors stands behind a coordinator's term.
//!
//! Each anchor that voted for a coordinator signs the run, the term, the coordinator and the group of anchors that it
//! was elected by. A peer that knows the group believes a term with the signatures of the group's majority. The same
//! signatures say which group follows, so a peer that knows an earlier group is led to the present one by the proofs in
//! between.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{PeerId, RunId, Term};

/// Voters of a group, both sets of a change included.
pub const GROUP_VOTERS: usize = 16;

/// Proofs in one message: the newest one and those of earlier groups.
pub const PROOFS: usize = 32;

/// Begins the signed bytes, so that no signature of another use of the key is valid for a term.
const PURPOSE: &[u8] = b"shoal term v1\0";

/// An ed25519 signature.
pub type Signature = [u8; 64];

/// Signs for one peer, and checks the signatures of others.
pub trait Signatures: std::fmt::Debug + Send + Sync {
    /// Signs bytes with the key of this peer.
    fn sign(&self, message: &[u8]) -> Signature;

    /// Whether a peer signed these bytes.
    fn verify(&self, peer: PeerId, message: &[u8], signature: &Signature) -> bool;
}

/// The anchors that elect a coordinator, at one point of the log.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct AnchorGroup {
    /// The number of the run's history.
    pub history: u16,
    /// The place in the log from which this group decides. It grows with every change.
    pub number: u64,
    /// The voters: one set, or two while the one is replaced by the other. A majority is one of each set.
    pub voters: Vec<BTreeSet<PeerId>>,
}

impl AnchorGroup {
    /// Whether these voters are a majority of the group.
    #[must_use]
    pub fn is_majority(&self, has: impl Fn(PeerId) -> bool) -> bool {
        let of = |set: &BTreeSet<PeerId>| set.iter().filter(|peer| has(**peer)).count();
        !self.voters.is_empty() && self.voters.iter().all(|set| 2 * of(set) > set.len())
    }

    /// Whether a peer is a voter.
    #[must_use]
    pub fn contains(&self, peer: PeerId) -> bool {
        self.voters.iter().any(|set| set.contains(&peer))
    }

    /// The order of groups in time.
    #[must_use]
    pub fn place(&self) -> (u16, u64) {
        (self.history, self.number)
    }

    fn fits(&self) -> bool {
        (1..=2).contains(&self.voters.len())
            && self.voters.iter().map(BTreeSet::len).sum::<usize>() <= GROUP_VOTERS
    }
}

/// What an anchor signs: that it stands behind a coordinator's term, in a group.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TermVote {
    /// The coordinator's term.
    pub term: Term,
    /// The peer that the anchors elected.
    pub coordinator: PeerId,
    /// The anchors.
    pub group: AnchorGroup,
}

impl TermVote {
    /// The bytes that an anchor signs.
    #[must_use]
    pub fn signed_bytes(&self, run: RunId) -> Vec<u8> {
        let mut bytes = PURPOSE.to_vec();
        bytes.extend(run.0);
        bytes.extend(self.term.0.to_le_bytes());
        bytes.extend(self.coordinator.0);
        bytes.extend(self.group.history.to_le_bytes());
        bytes.extend(self.group.number.to_le_bytes());
        for set in &self.group.voters {
            bytes.extend((set.len() as u64).to_le_bytes());
            set.iter().for_each(|peer| bytes.extend(peer.0));
        }
        bytes
    }
}

/// A term with the signatures of anchors, as received.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TermProof {
    /// What they signed.
    pub vote: TermVote,
    /// Their signatures.
    pub signatures: BTreeMap<PeerId, Signature>,
}

/// Why a proof proves nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProofError {
    /// The group has no voters, or more than a group may have.
    #[error("a proof of term {0} names no anchors, or more than {GROUP_VOTERS}")]
    Group(Term),
    /// A signature is not its peer's, or of a peer that is no voter.
    #[error("a proof of term {term} has a signature that is not that of anchor {peer}")]
    Forged {
        /// The term.
        term: Term,
        /// The anchor that the signature is said to be of.
        peer: PeerId,
    },
    /// The signatures are no majority of the group that the proof itself names.
    #[error("a proof of term {0} has no majority of its anchors")]
    Minority(Term),
}

impl TermProof {
    /// Checks the signatures and that they are a majority of the group that the proof names.
    ///
    /// # Errors
    /// If they are not, or one of them is forged.
    pub fn check(self, run: RunId, keys: &dyn Signatures) -> Result<Attested, ProofError> {
        let TermVote { term, ref group, .. } = self.vote;
        if !group.fits() || self.signatures.len() > GROUP_VOTERS {
            return Err(ProofError::Group(term));
        }
        if !group.is_majority(|peer| self.signatures.contains_key(&peer)) {
            return Err(ProofError::Minority(term));
        }
        let bytes = self.vote.signed_bytes(run);
        for (peer, signature) in &self.signatures {
            if !keys.verify(*peer, &bytes, signature) {
                return Err(ProofError::Forged { term, peer: *peer });
            }
        }
        Ok(Attested(self))
    }
}

/// A proof whose signatures were checked: a majority of the anchors that it names stands behind its term. Only
/// [`TermProof::check`] makes one. Whether those anchors are the run's is for its receiver to decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attested(TermProof);

impl Attested {
    /// The checked proof.
    #[must_use]
    pub fn proof(&self) -> &TermProof {
        &self.0
    }

    /// What the anchors signed.
    #[must_use]
    pub fn vote(&self) -> &TermVote {
        &self.0.vote
    }

    /// Whether a peer signed it.
    #[must_use]
    pub fn is_signed_by(&self, peer: PeerId) -> bool {
        self.0.signatures.contains_key(&peer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::test_keys::Hashes;
    use crate::wire;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 32])
    }

    fn run() -> RunId {
        RunId::of(b"run")
    }

    fn proof(voters: &[&[u8]], signers: &[u8]) -> TermProof {
        let set = |numbers: &&[u8]| numbers.iter().copied().map(peer).collect();
        let group = AnchorGroup { history: 0, number: 7, voters: voters.iter().map(set).collect() };
        let vote = TermVote { term: Term(4), coordinator: peer(1), group };
        let bytes = vote.signed_bytes(run());
        let sign = |number: &u8| (peer(*number), Hashes(peer(*number)).sign(&bytes));
        let signatures = signers.iter().map(sign).collect();
        TermProof { vote, signatures }
    }

    fn checked(proof: TermProof) -> Result<Attested, ProofError> {
        proof.check(run(), &Hashes(peer(0)))
    }

    #[test]
    fn a_majority_of_the_named_anchors_must_have_signed() {
        assert!(checked(proof(&[&[1]], &[1])).is_ok());
        assert!(checked(proof(&[&[1, 2, 3]], &[1, 3])).is_ok());
        for (voters, signers) in [
            (&[&[1_u8, 2, 3][..]][..], &[1_u8][..]),
            (&[&[1, 2]], &[1]),
            (&[&[1, 2, 3]], &[1, 8, 9]),
            (&[&[1, 2, 3], &[3, 4, 5]], &[1, 2, 3]),
        ] {
            assert_eq!(checked(proof(voters, signers)), Err(ProofError::Minority(Term(4))));
        }
        assert!(checked(proof(&[&[1, 2, 3], &[3, 4, 5]], &[1, 3, 4])).is_ok());
    }

    #[test]
    fn a_group_has_voters_and_no_more_than_the_limit() {
        let many: Vec<u8> = (1..=GROUP_VOTERS as u8 + 1).collect();
        for voters in [&[][..], &[&many[..]], &[&[1], &[1], &[1]]] {
            assert_eq!(checked(proof(voters, &many[1..])), Err(ProofError::Group(Term(4))));
        }
    }

    #[test]
    fn every_part_of_a_proof_is_signed() {
        let forged = |change: fn(&mut TermProof)| {
            let mut proof = proof(&[&[1, 2, 3]], &[1, 2]);
            change(&mut proof);
            let checked = proof.check(run(), &Hashes(peer(0)));
            assert!(matches!(checked, Err(ProofError::Forged { .. })), "{checked:?}");
        };
        forged(|proof| proof.vote.term = Term(5));
        forged(|proof| proof.vote.coordinator = peer(2));
        forged(|proof| proof.vote.group.history = 1);
        forged(|proof| proof.vote.group.number = 8);
        forged(|proof| proof.vote.group.voters[0] = [peer(1), peer(2), peer(4)].into());
        forged(|proof| proof.vote.group.voters = vec![[peer(1), peer(2)].into(); 2]);
        forged(|proof| proof.signatures.extend([(peer(2), [0; 64])]));
        let other = proof(&[&[1]], &[1]).check(RunId::of(b"other"), &Hashes(peer(0)));
        assert!(matches!(other, Err(ProofError::Forged { .. })));
    }

    proptest! {
        #[test]
        fn a_proof_reads_back(
            voters in prop::collection::vec(prop::collection::btree_set(0_u8..20, 0..9), 0..4),
            signers in prop::collection::vec(0_u8..20, 0..9),
        ) {
            let lists: Vec<Vec<u8>> = voters.iter().map(|set| set.iter().copied().collect()).collect();
            let lists: Vec<&[u8]> = lists.iter().map(Vec::as_slice).collect();
            let proof = proof(&lists, &signers);
            let bytes = wire::encode(&proof).expect("small");
            prop_assert_eq!(&wire::decode::<TermProof>(&bytes).expect("whole"), &proof);
            // Whatever it says, it is checked without a panic, and counts only with a majority.
            let signed = |peer: PeerId| proof.signatures.contains_key(&peer);
            let whole = proof.vote.group.is_majority(signed);
            prop_assert!(whole || checked(proof.clone()).is_err());
        }
    }
}
