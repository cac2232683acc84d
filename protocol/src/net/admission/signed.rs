//! A statement and the signature over exactly the bytes that travel.

use libp2p::identity::ed25519::PublicKey;

use super::denied::{Denied, Paper};
use crate::ids::PeerId;
use crate::net::identity::Identity;
use crate::wire;

/// Bytes of an ed25519 signature.
const SIGNATURE: usize = 64;

/// Something that is signed.
pub trait Statement: bincode::Encode + bincode::Decode<()> {
    /// What it is, in messages. A signature over one kind is none over another.
    const PAPER: Paper;
    /// What goes before its bytes when they are signed, so that no other use of the key gives a
    /// signature that passes for this one.
    const PURPOSE: &'static [u8];
}

/// A statement as it was signed: the signature, and the bytes that it is over, never an encoding made anew.
#[derive(Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Signed(Vec<u8>);

impl Signed {
    /// Signs a statement.
    #[must_use]
    pub fn of<T: Statement>(value: &T, identity: &Identity) -> Self {
        let body = wire::encode(value).expect("a statement is kept under the cap of a message");
        let signature: [u8; SIGNATURE] = identity.sign(&message::<T>(&body));
        Self([&signature[..], &body].concat())
    }

    /// The statement, if this key signed it.
    ///
    /// # Errors
    /// [`Denied::Forged`] when another key did, or none.
    pub fn open<T: Statement>(&self, key: PeerId) -> Result<T, Denied> {
        let forged = Denied::Forged { paper: T::PAPER };
        let Some((signature, body)) = self.0.split_first_chunk::<SIGNATURE>() else {
            return Err(forged);
        };
        let known = PublicKey::try_from_bytes(&key.0);
        let good = known.is_ok_and(|key| key.verify(&message::<T>(body), signature));
        if good { self.peek() } else { Err(forged) }
    }

    /// What it says, whoever signed it.
    ///
    /// # Errors
    /// [`Denied::Forged`] when it says nothing of the kind.
    pub fn peek<T: Statement>(&self) -> Result<T, Denied> {
        let body = self.0.get(SIGNATURE..).unwrap_or_default();
        wire::decode(body).map_err(|_| Denied::Forged { paper: T::PAPER })
    }
}

fn message<T: Statement>(body: &[u8]) -> Vec<u8> {
    [T::PURPOSE, body].concat()
}

impl std::fmt::Debug for Signed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signed({} bytes)", self.0.len())
    }
}
