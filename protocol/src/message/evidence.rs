//! Evidence: what shows that a peer's work was wrong, so that anyone can judge it who has the log.

use super::seal::write_member;
use super::{AuditId, Handed, InputId, Seal, Sealer, Signature, WorkDigest};
use crate::ids::{Member, PeerId, Stage, Step};

/// A peer is out of the run for good.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Conviction {
    /// The peer.
    pub peer: PeerId,
    /// The step of the work.
    pub step: Step,
    /// The stage of the work.
    pub stage: Stage,
    /// The newest version of the weights that nothing of the peer's is in. The run goes back to a checkpoint of it,
    /// or of an earlier one.
    pub back: Step,
    /// What shows it.
    pub evidence: Evidence,
}

/// What shows that a peer's work was wrong.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum Evidence {
    /// It signed two hashes of one tensor.
    Handed {
        /// The tensor.
        of: InputId,
        /// What it stated.
        stated: Handed,
        /// What it sent.
        sent: Handed,
    },
    /// It stated a tensor that its maker did not sign.
    Unsealed {
        /// The tensor.
        of: InputId,
        /// What the peer stated.
        stated: Option<Handed>,
        /// What the member at the other end stated.
        other: Option<Handed>,
    },
    /// Most replicas that computed the work came to something else.
    Computed {
        /// The audit.
        id: AuditId,
        /// What the member stated.
        stated: WorkDigest,
        /// What the replicas found.
        found: Vec<SignedFinding>,
    },
}

/// What a replica came to, signed by it.
#[derive(Debug, Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SignedFinding {
    /// The replica.
    pub by: Member,
    /// What it came to.
    pub digest: WorkDigest,
    /// Its signature.
    pub signature: Signature,
}

impl Evidence {
    /// What the peer did, as the end of a sentence that begins with it.
    #[must_use]
    pub fn charge(&self) -> &'static str {
        match self {
            Self::Handed { .. } => {
                "signed two different contents of one tensor that it handed over"
            }
            Self::Unsealed { .. } => "stated a tensor that its maker did not sign",
            Self::Computed { .. } => {
                "came to something else than most like replicas did from the same inputs"
            }
        }
    }
}

/// Begins the signed bytes of a finding.
const FOUND: &[u8] = b"shoal audit v1\0";

impl Sealer {
    /// Signs what an audit of this peer's found.
    #[must_use]
    pub fn sign_finding(&self, by: Member, id: &AuditId, digest: &WorkDigest) -> Signature {
        self.keys.sign(&self.found_bytes(by, id, digest))
    }

    /// Whether a member signed that it found this.
    #[must_use]
    pub fn is_finding(
        &self,
        by: Member,
        (id, digest): (&AuditId, &WorkDigest),
        signature: &Signature,
    ) -> bool {
        self.keys.verify(by.peer, &self.found_bytes(by, id, digest), signature)
    }

    fn found_bytes(&self, by: Member, id: &AuditId, digest: &WorkDigest) -> Vec<u8> {
        let AuditId { era, term, step, stage, of } = id;
        let mut bytes = self.begin(FOUND, by);
        bytes.extend(era.0.to_le_bytes());
        bytes.extend(term.0.to_le_bytes());
        bytes.extend(step.0.to_le_bytes());
        bytes.extend(stage.0.to_le_bytes());
        write_member(&mut bytes, *of);
        bytes.extend(digest.taken.0);
        bytes.extend(digest.made.0);
        digest.sums.iter().for_each(|print| bytes.extend(print.0.to_le_bytes()));
        bytes
    }
}

/// What a conviction rests on, for whoever checks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Two signatures of the peer itself, which contradict each other.
    OwnSignatures,
    /// Signed findings of most replicas: so many of all voices, of which one is what the member stated.
    Findings {
        /// Replicas that came to the same.
        agree: usize,
        /// All voices.
        voices: usize,
    },
    /// What the coordinator says that the peer stated.
    Coordinator,
}

/// Why evidence shows nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvidenceError {
    /// A seal of a tensor is not the peer's, or of another era than the other one.
    #[error("a seal of the tensor is not {0}'s own")]
    Seal(PeerId),
    /// Both seals are of the same content.
    #[error("both seals are of the same content")]
    Same,
    /// What the peer stated is sealed by its maker.
    #[error("what the peer stated has its maker's seal")]
    Sealed,
    /// A finding is not signed by its replica.
    #[error("the finding of {0} is not signed by it")]
    Finding(Member),
    /// The peer is in the majority, or has no part in the audit.
    #[error("most replicas do not contradict the peer")]
    NotContradicted,
}

impl Conviction {
    /// Checks the evidence, with the key of any peer of the run.
    ///
    /// # Errors
    /// If it shows nothing.
    pub fn check(&self, sealer: &Sealer) -> Result<Basis, EvidenceError> {
        match &self.evidence {
            Evidence::Handed { of, stated, sent } => {
                let Seal { by, era, .. } = stated.seal;
                let is_own = |handed| sealer.is_sealed_by(by, era, *of, handed);
                if by.peer != self.peer || !is_own(stated) || !is_own(sent) {
                    return Err(EvidenceError::Seal(self.peer));
                }
                if stated.hash == sent.hash {
                    return Err(EvidenceError::Same);
                }
                Ok(Basis::OwnSignatures)
            }
            Evidence::Unsealed { of, stated, other } => {
                let hash = |handed: &Option<Handed>| handed.map(|handed| handed.hash);
                match stated {
                    Some(_) if hash(stated) == hash(other) => Err(EvidenceError::Same),
                    Some(stated) if sealer.is_sealed(*of, stated) => Err(EvidenceError::Sealed),
                    _ => Ok(Basis::Coordinator),
                }
            }
            Evidence::Computed { id, stated, found } => self.count(sealer, id, stated, found),
        }
    }

    /// Counts the voices for and against the peer.
    fn count(
        &self,
        sealer: &Sealer,
        id: &AuditId,
        stated: &WorkDigest,
        found: &[SignedFinding],
    ) -> Result<Basis, EvidenceError> {
        for SignedFinding { by, digest, signature } in found {
            if !sealer.is_finding(*by, (id, digest), signature) {
                return Err(EvidenceError::Finding(*by));
            }
        }
        // What was computed from other inputs says nothing.
        let found = found.iter().filter(|one| one.digest.taken == stated.taken);
        let found: Vec<&SignedFinding> = found.collect();
        let own = match found.iter().find(|one| one.by.peer == self.peer) {
            _ if id.of.peer == self.peer => stated,
            Some(one) => &one.digest,
            None => return Err(EvidenceError::NotContradicted),
        };
        let all = || found.iter().map(|one| &one.digest).chain([stated]);
        let voices = all().count();
        let most = all().map(|one| (all().filter(|other| *other == one).count(), one));
        let (agree, most) = most.max_by_key(|(agree, _)| *agree).expect("the statement is one");
        match 2 * agree > voices {
            true if most == own => Err(EvidenceError::NotContradicted),
            true => Ok(Basis::Findings { agree, voices }),
            // Without a majority the coordinator's own finding decided.
            false if all().all(|one| one == own) => Err(EvidenceError::NotContradicted),
            false => Ok(Basis::Coordinator),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ids::{
        ClaimKey, ContentHash, Era, Incarnation, Microbatch, RunId, Stage, Step, Term,
    };
    use crate::message::test_keys::Hashes;
    use crate::message::{Recalled, SumsPrint};

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(number.into()) }
    }

    fn sealer(number: u8) -> Sealer {
        Sealer::new(RunId::of(b"run"), Arc::new(Hashes(member(number).peer)))
    }

    const KEY: ClaimKey = ClaimKey { step: Step(5), stage: Stage(1), microbatch: Microbatch(2) };
    const TENSOR: InputId = InputId { key: KEY, input: Recalled::Activation };

    fn handed(by: u8, hash: u8, era: u32) -> Handed {
        let hash = ContentHash([hash; 32]);
        Handed { hash, seal: sealer(by).seal(member(by), Era(era), TENSOR, hash) }
    }

    fn checked(peer: u8, evidence: Evidence) -> Result<Basis, EvidenceError> {
        let peer = member(peer).peer;
        let conviction =
            Conviction { peer, step: KEY.step, stage: KEY.stage, back: Step(0), evidence };
        conviction.check(&sealer(9))
    }

    #[test]
    fn a_finding_is_of_one_audit() {
        let (era, term, step, stage) = (Era(1), Term(2), Step(3), Stage(4));
        let id = AuditId { era, term, step, stage, of: member(5) };
        let [taken, made] = [6, 7].map(|byte| ContentHash([byte; 32]));
        let digest = WorkDigest { taken, made, sums: vec![SumsPrint(8)] };
        let sealer = sealer(1);
        let signature = sealer.sign_finding(member(1), &id, &digest);
        assert!(sealer.is_finding(member(1), (&id, &digest), &signature));
        let other = AuditId { of: member(6), ..id };
        assert!(!sealer.is_finding(member(1), (&other, &digest), &signature));
        let other = WorkDigest { sums: vec![SumsPrint(9)], ..digest.clone() };
        assert!(!sealer.is_finding(member(1), (&id, &other), &signature));
        assert!(!sealer.is_finding(member(2), (&id, &digest), &signature));
    }

    #[test]
    fn two_seals_of_one_peer_for_one_tensor_convict_it() {
        let (one, other) = (handed(1, 1, 0), handed(1, 2, 0));
        let of = |stated, sent| Evidence::Handed { of: TENSOR, stated, sent };
        assert_eq!(checked(1, of(one, other)), Ok(Basis::OwnSignatures));
        assert_eq!(checked(1, of(one, one)), Err(EvidenceError::Same));
        let own = Err(EvidenceError::Seal(member(1).peer));
        assert_eq!(checked(1, of(one, handed(2, 2, 0))), own, "another peer's");
        assert_eq!(checked(1, of(one, handed(1, 2, 1))), own, "of another era");
        assert_eq!(checked(1, of(one, Handed { hash: one.hash, ..other })), own, "forged");
        assert!(checked(2, of(one, other)).is_err());
    }

    #[test]
    fn a_statement_without_a_seal_convicts_its_peer_by_the_word_of_the_coordinator() {
        let of = |stated| Evidence::Unsealed { of: TENSOR, stated, other: Some(handed(1, 1, 0)) };
        assert_eq!(checked(2, of(None)), Ok(Basis::Coordinator));
        let forged = Handed { hash: ContentHash([3; 32]), ..handed(1, 1, 0) };
        assert_eq!(checked(2, of(Some(forged))), Ok(Basis::Coordinator));
        assert_eq!(checked(2, of(Some(handed(1, 2, 0)))), Err(EvidenceError::Sealed));
        assert_eq!(checked(2, of(Some(handed(1, 1, 0)))), Err(EvidenceError::Same));
        let nothing = Evidence::Unsealed { of: TENSOR, stated: None, other: None };
        assert_eq!(checked(1, nothing), Ok(Basis::Coordinator), "both state nothing");
    }

    #[test]
    fn most_signed_findings_convict_whoever_came_to_something_else() {
        let (era, term) = (Era(0), Term(1));
        let id = AuditId { era, term, step: KEY.step, stage: KEY.stage, of: member(1) };
        let digest = |sums| WorkDigest {
            taken: ContentHash([0; 32]),
            made: ContentHash([1; 32]),
            sums: vec![SumsPrint(sums)],
        };
        let found = |by: u8, sums| {
            let (by, digest) = (member(by), digest(sums));
            let signature = sealer(by.peer.0[0]).sign_finding(by, &id, &digest);
            SignedFinding { by, digest, signature }
        };
        let of = |found| Evidence::Computed { id, stated: digest(1), found };
        let against = || of(vec![found(2, 2), found(3, 2)]);
        assert_eq!(checked(1, against()), Ok(Basis::Findings { agree: 2, voices: 3 }));
        assert_eq!(checked(2, against()), Err(EvidenceError::NotContradicted));
        assert_eq!(checked(4, against()), Err(EvidenceError::NotContradicted));
        let with = of(vec![found(2, 2), found(3, 1)]);
        assert_eq!(checked(2, with), Ok(Basis::Findings { agree: 2, voices: 3 }));
        assert_eq!(checked(1, of(vec![found(2, 2)])), Ok(Basis::Coordinator), "one against one");
        assert_eq!(checked(1, of(Vec::new())), Err(EvidenceError::NotContradicted));
        let mut forged = found(2, 2);
        forged.by = member(3);
        let forged = of(vec![forged, found(4, 2)]);
        assert_eq!(checked(1, forged), Err(EvidenceError::Finding(member(3))));
    }
}
