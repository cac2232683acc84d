//! The ed25519 key that identifies a peer, in a file that only its owner can read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use libp2p::identity::Keypair;
use libp2p::identity::ed25519::PublicKey;

use crate::ids::PeerId;
use crate::message::{Signature, Signatures};

/// A peer's key pair. Two running processes must never share one.
#[derive(Clone)]
pub struct Identity {
    keypair: Keypair,
    peer: PeerId,
}

/// Errors of loading or creating an identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Other users can read the key and impersonate the peer.
    #[error(
        "the identity file {} is open to other users (mode {mode:03o}): \
         `chmod 600` it, or delete it if somebody may have copied it",
        path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// The permission bits of the file.
        mode: u32,
    },
    /// The file is truncated, or is not an identity file.
    #[error(
        "{} is not an identity file: restore it, or delete it to become a new peer",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// The file system returned an error.
    #[error("cannot {action} the identity file {}: {source}", path.display())]
    Io {
        /// The failed operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// The limit of the file size; a protobuf-encoded ed25519 key pair has 68 bytes.
const LARGEST_FILE: u64 = 1024;

impl Identity {
    /// Loads the identity at `path`, or creates one there that only its owner can read.
    ///
    /// # Errors
    /// If other users can read the file, it holds no identity, or it cannot be read or written.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        match File::open(path) {
            Ok(file) => Self::load(path, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::create(path),
            Err(source) => Err(io_error("open", path)(source)),
        }
    }

    /// A new identity that is not stored.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self::from_keypair(Keypair::generate_ed25519()).expect("an ed25519 key was asked for")
    }

    /// The identity of a given secret, for reproducible examples.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of_seed(seed: [u8; 32]) -> Self {
        let keypair = Keypair::ed25519_from_bytes(seed).expect("32 bytes are a secret key");
        Self::from_keypair(keypair).expect("it is an ed25519 key")
    }

    /// The public id of the peer.
    #[must_use]
    pub fn peer_id(&self) -> PeerId {
        self.peer
    }

    pub(super) fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    /// Signs a message. Messages begin with their purpose, so that a signature never serves another
    /// purpose.
    pub(super) fn sign(&self, message: &[u8]) -> [u8; 64] {
        let signature = self.keypair.sign(message).expect("an ed25519 key signs anything");
        signature.try_into().expect("an ed25519 signature has 64 bytes")
    }

    /// 32 secret bytes for one purpose, the same in every incarnation of this peer.
    pub(super) fn derive_secret(&self, purpose: &'static str) -> [u8; 32] {
        let secret = self.keypair.derive_secret(purpose.as_bytes());
        secret.expect("an ed25519 key derives secrets")
    }

    fn from_keypair(keypair: Keypair) -> Option<Self> {
        let peer = peer_of(&keypair.public().to_peer_id())?;
        Some(Self { keypair, peer })
    }

    fn load(path: &Path, file: File) -> Result<Self, IdentityError> {
        let metadata = file.metadata().map_err(io_error("examine", path))?;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(IdentityError::Exposed { path: path.to_owned(), mode });
        }
        let mut bytes = Vec::new();
        file.take(LARGEST_FILE).read_to_end(&mut bytes).map_err(io_error("read", path))?;
        Keypair::from_protobuf_encoding(&bytes)
            .ok()
            .and_then(Self::from_keypair)
            .ok_or_else(|| IdentityError::Malformed { path: path.to_owned() })
    }

    fn create(path: &Path) -> Result<Self, IdentityError> {
        let identity = Self::ephemeral();
        let encoded = identity.keypair.to_protobuf_encoding();
        let encoded = encoded.expect("an ed25519 key has an encoding");
        let temporary = path.with_extension(format!("{}.part", std::process::id()));
        let written = (|| {
            let mut options = OpenOptions::new();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(&encoded)?;
            file.sync_all()?;
            fs::rename(&temporary, path)
        })();
        if written.is_err() {
            // Only the error of the write matters.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(io_error("write", path))?;
        Ok(identity)
    }
}

impl Signatures for Identity {
    fn sign(&self, message: &[u8]) -> Signature {
        Self::sign(self, message)
    }

    fn verify(&self, peer: PeerId, message: &[u8], signature: &Signature) -> bool {
        verifies(peer, message, signature)
    }
}

/// Whether a peer's key signed a message.
pub(super) fn verifies(peer: PeerId, message: &[u8], signature: &Signature) -> bool {
    PublicKey::try_from_bytes(&peer.0).is_ok_and(|key| key.verify(message, signature))
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({:?})", self.peer)
    }
}

/// Converts a libp2p peer id; `None` for keys other than ed25519, which no swarm has.
pub(super) fn peer_of(id: &libp2p::PeerId) -> Option<PeerId> {
    PeerId::from_multihash(&id.to_bytes()).ok()
}

/// Converts to a libp2p peer id; `None` if the 32 bytes are not a multihash, which cannot happen.
pub(super) fn libp2p_peer_of(id: PeerId) -> Option<libp2p::PeerId> {
    libp2p::PeerId::from_bytes(&id.to_multihash()).ok()
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    move |source| IdentityError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_survives_a_restart_and_is_private() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("identity");
        let created = Identity::load_or_create(&path).expect("created");
        let mode = fs::metadata(&path).expect("exists").permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        let loaded = Identity::load_or_create(&path).expect("loaded");
        assert_eq!(loaded.peer_id(), created.peer_id());
        assert_eq!(loaded.derive_secret("test"), created.derive_secret("test"));
        assert_eq!(fs::read_dir(directory.path()).expect("readable").count(), 1);
    }

    #[test]
    fn a_file_that_other_users_can_read_is_rejected() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("identity");
        Identity::load_or_create(&path).expect("created");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("own file");
        let error = Identity::load_or_create(&path).expect_err("exposed");
        assert!(matches!(error, IdentityError::Exposed { mode: 0o644, .. }), "{error}");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn a_damaged_identity_file_is_rejected() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("identity");
        Identity::load_or_create(&path).expect("created");
        let whole = fs::read(&path).expect("readable");
        for bytes in [&whole[..whole.len() - 1], b"", b"-----BEGIN", &[0xff; 4096]] {
            fs::write(&path, bytes).expect("own file");
            let error = Identity::load_or_create(&path).expect_err("damaged");
            assert!(matches!(error, IdentityError::Malformed { .. }), "{error}");
        }
    }

    #[test]
    fn only_its_own_key_makes_a_peers_signature() {
        let (identity, other) = (Identity::ephemeral(), Identity::ephemeral());
        let signature = Signatures::sign(&identity, b"a term");
        assert!(other.verify(identity.peer_id(), b"a term", &signature));
        assert!(!other.verify(identity.peer_id(), b"another", &signature));
        assert!(!other.verify(other.peer_id(), b"a term", &signature));
        assert!(!other.verify(PeerId([255; 32]), b"a term", &signature));
    }

    #[test]
    fn libp2p_prints_the_same_peer_id() {
        let identity = Identity::ephemeral();
        let theirs = identity.keypair().public().to_peer_id();
        assert_eq!(theirs.to_string(), identity.peer_id().to_string());
        assert_eq!(libp2p_peer_of(identity.peer_id()), Some(theirs));
    }
}
