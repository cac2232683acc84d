//! A statement with a signature over exactly the bytes that are sent.

use super::denied::{Denied, Document};
use crate::ids::PeerId;
use crate::net::identity::{Identity, verifies};
use crate::wire;

/// Bytes of an ed25519 signature.
const SIGNATURE: usize = 64;

/// A type of signed statement.
pub trait Statement: bincode::Encode + bincode::Decode<()> {
    /// The kind of statement, for error messages.
    const PAPER: Document;
    /// Prefix of the signed bytes. It differs between statement types, so that no signature of
    /// another use of the key is valid for this one.
    const PURPOSE: &'static [u8];
}

/// A signed statement as received: the signature, and the signed bytes. It is never encoded again.
#[derive(Clone, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Signed(Vec<u8>);

impl Signed {
    /// Signs a statement.
    #[must_use]
    pub fn of<T: Statement>(value: &T, identity: &Identity) -> Self {
        let body = wire::encode(value).expect("a statement is within the limit of a message");
        let signature: [u8; SIGNATURE] = identity.sign(&message::<T>(&body));
        Self([&signature[..], &body].concat())
    }

    /// The statement, if this key signed it.
    ///
    /// # Errors
    /// [`Denied::Forged`] if this key did not sign it.
    pub fn open<T: Statement>(&self, key: PeerId) -> Result<T, Denied> {
        let forged = Denied::Forged { document: T::PAPER };
        let Some((signature, body)) = self.0.split_first_chunk::<SIGNATURE>() else {
            return Err(forged);
        };
        if verifies(key, &message::<T>(body), signature) { self.peek() } else { Err(forged) }
    }

    /// The statement, without a check of the signature.
    ///
    /// # Errors
    /// [`Denied::Forged`] if the bytes do not encode such a statement.
    pub fn peek<T: Statement>(&self) -> Result<T, Denied> {
        let body = self.0.get(SIGNATURE..).unwrap_or_default();
        wire::decode(body).map_err(|_| Denied::Forged { document: T::PAPER })
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
