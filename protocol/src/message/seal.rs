//! What a member signs of a tensor that it hands over.
//!
//! Two seals of one member for one tensor, with different hashes, prove to anyone that it handed over another tensor than
//! it stated. A seal that is not the member's proves nothing, so nobody takes a tensor with such a one.

use std::sync::Arc;

use super::{Handed, InputId, Recalled, Seal, Signatures};
use crate::ids::{ClaimKey, ContentHash, Era, Member, RunId};

/// Begins the signed bytes, so that no signature of another use of the key is valid here.
const HANDED: &[u8] = b"shoal tensor v1\0";

/// Seals with the key of one peer, and checks the seals of others, in one run.
#[derive(Debug, Clone)]
pub struct Sealer {
    run: RunId,
    pub(super) keys: Arc<dyn Signatures>,
}

impl Sealer {
    /// Seals in a run with this key.
    #[must_use]
    pub fn new(run: RunId, keys: Arc<dyn Signatures>) -> Self {
        Self { run, keys }
    }

    /// The seal of a tensor that this peer made.
    #[must_use]
    pub fn seal(&self, by: Member, era: Era, of: InputId, hash: ContentHash) -> Seal {
        let signature = self.keys.sign(&self.handed_bytes(by, era, of, hash));
        Seal { era, by, signature }
    }

    /// Whether a tensor's maker signed that it has this hash.
    #[must_use]
    pub fn is_sealed(&self, of: InputId, handed: &Handed) -> bool {
        let Handed { hash, seal: Seal { era, by, signature } } = handed;
        self.keys.verify(by.peer, &self.handed_bytes(*by, *era, of, *hash), signature)
    }

    /// Whether a tensor has the seal of this maker, in this era.
    #[must_use]
    pub fn is_sealed_by(&self, by: Member, era: Era, of: InputId, handed: &Handed) -> bool {
        (handed.seal.by, handed.seal.era) == (by, era) && self.is_sealed(of, handed)
    }

    /// The beginning of what a member signs in the run, for a purpose.
    pub(super) fn begin(&self, purpose: &[u8], by: Member) -> Vec<u8> {
        let mut bytes = purpose.to_vec();
        bytes.extend(self.run.0);
        write_member(&mut bytes, by);
        bytes
    }

    fn handed_bytes(&self, by: Member, era: Era, of: InputId, hash: ContentHash) -> Vec<u8> {
        let mut bytes = self.begin(HANDED, by);
        bytes.extend(era.0.to_le_bytes());
        write_key(&mut bytes, of.key);
        bytes.push(match of.input {
            Recalled::Activation => 0,
            Recalled::Gradient => 1,
        });
        bytes.extend(hash.0);
        bytes
    }
}

pub(super) fn write_member(bytes: &mut Vec<u8>, member: Member) {
    bytes.extend(member.peer.0);
    bytes.extend(member.incarnation.0.to_le_bytes());
}

fn write_key(bytes: &mut Vec<u8>, key: ClaimKey) {
    bytes.extend(key.step.0.to_le_bytes());
    bytes.extend(key.stage.0.to_le_bytes());
    bytes.extend(key.microbatch.0.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Incarnation, Microbatch, PeerId, Stage, Step};
    use crate::message::test_keys::Hashes;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(number.into()) }
    }

    fn sealer(number: u8, run: &[u8]) -> Sealer {
        Sealer::new(RunId::of(run), Arc::new(Hashes(member(number).peer)))
    }

    #[test]
    fn a_seal_is_of_one_tensor_of_one_member_in_one_era_of_one_run() {
        let key = ClaimKey { step: Step(5), stage: Stage(1), microbatch: Microbatch(2) };
        let of = InputId { key, input: Recalled::Activation };
        let (me, hash) = (member(1), ContentHash([7; 32]));
        let sealer = sealer(1, b"run");
        let seal = sealer.seal(me, Era(3), of, hash);
        let handed = Handed { hash, seal };
        assert!(sealer.is_sealed(of, &handed));
        let moved = |seal| Handed { seal, ..handed };
        let elsewhere = Member { incarnation: Incarnation(9), ..me };
        for (of, handed) in [
            (InputId { input: Recalled::Gradient, ..of }, handed),
            (InputId { key: key.downstream(), ..of }, handed),
            (of, Handed { hash: ContentHash([8; 32]), ..handed }),
            (of, moved(Seal { era: Era(4), ..seal })),
            (of, moved(Seal { by: member(2), ..seal })),
            (of, moved(Seal { by: elsewhere, ..seal })),
        ] {
            assert!(!sealer.is_sealed(of, &handed), "{of:?} {handed:?}");
        }
        assert!(!self::sealer(1, b"other").is_sealed(of, &handed));
    }
}
