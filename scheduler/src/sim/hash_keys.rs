//! Signatures of simulated peers: no key is needed, since no simulated peer computes another's.

use std::sync::Arc;

use shoal_protocol::ids::{ContentHash, PeerId};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Sealer, Signature, Signatures};

/// Signs for one simulated peer, by a hash of the peer and the message.
#[derive(Debug, Clone, Copy)]
pub struct HashKeys(pub PeerId);

impl HashKeys {
    /// The signature of a peer.
    #[must_use]
    pub fn sign_as(peer: PeerId, message: &[u8]) -> Signature {
        let hash = ContentHash::of(&[&peer.0[..], message].concat());
        let mut signature = [0; 64];
        signature[..32].copy_from_slice(&hash.0);
        signature
    }

    /// Seals of this peer in a run.
    #[must_use]
    pub fn sealer(self, manifest: &Manifest) -> Sealer {
        Sealer::new(manifest.run_id(), Arc::new(self))
    }
}

impl Signatures for HashKeys {
    fn sign(&self, message: &[u8]) -> Signature {
        Self::sign_as(self.0, message)
    }

    fn verify(&self, peer: PeerId, message: &[u8], signature: &Signature) -> bool {
        Self::sign_as(peer, message) == *signature
    }
}
