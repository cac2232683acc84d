//! The ed25519 key by which a peer is known, kept in a file that only its owner reads.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use libp2p::identity::Keypair;

use crate::ids::PeerId;

/// A peer's key pair. Two running processes must never share one.
#[derive(Clone)]
pub struct Identity {
    keypair: Keypair,
    peer: PeerId,
}

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Others could act in this peer's name.
    #[error(
        "the identity file {} is open to other users (mode {mode:03o}): \
         `chmod 600` it, or delete it if somebody may have copied it",
        path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Cut short, or something else altogether.
    #[error(
        "{} is not an identity file: restore it, or delete it to become a new peer",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("cannot {action} the identity file {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A protobuf-encoded ed25519 key pair has 68 bytes; nothing longer is read.
const LARGEST_FILE: u64 = 1024;

impl Identity {
    /// Reads the identity at `path`, or makes a new one there, readable by its owner alone.
    ///
    /// # Errors
    /// When the file can be read by others, holds no identity, or cannot be read or written.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        match File::open(path) {
            Ok(file) => Self::load(path, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::create(path),
            Err(source) => Err(io_error("open", path)(source)),
        }
    }

    /// A new identity that is written nowhere.
    #[must_use]
    pub fn ephemeral() -> Self {
        Self::from_keypair(Keypair::generate_ed25519()).expect("an ed25519 key was asked for")
    }

    /// The identity of a secret, for examples that are the same each time.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn of_seed(seed: [u8; 32]) -> Self {
        let keypair = Keypair::ed25519_from_bytes(seed).expect("32 bytes are a secret key");
        Self::from_keypair(keypair).expect("it is an ed25519 key")
    }

    /// Whose identity it is.
    #[must_use]
    pub fn peer_id(&self) -> PeerId {
        self.peer
    }

    pub(super) fn keypair(&self) -> &Keypair {
        &self.keypair
    }

    /// Signs bytes. What they are begins with what they are for, so that one signature never serves another
    /// purpose.
    pub(super) fn sign(&self, message: &[u8]) -> [u8; 64] {
        let signature = self.keypair.sign(message).expect("an ed25519 key signs anything");
        signature.try_into().expect("an ed25519 signature has 64 bytes")
    }

    /// 32 secret bytes for one purpose, the same in every life of this peer.
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
            // The error that matters is the one of the write.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(io_error("write", path))?;
        Ok(identity)
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Identity({:?})", self.peer)
    }
}

/// Our name for a libp2p peer; `None` for keys other than ed25519, which no swarm has.
pub(super) fn peer_of(id: &libp2p::PeerId) -> Option<PeerId> {
    PeerId::from_multihash(&id.to_bytes()).ok()
}

/// libp2p's name for a peer; `None` when the 32 bytes are no multihash, which cannot be.
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
    fn an_identity_outlives_its_process_and_is_private() {
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
    fn a_file_open_to_others_is_refused() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("identity");
        Identity::load_or_create(&path).expect("created");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("own file");
        let error = Identity::load_or_create(&path).expect_err("exposed");
        assert!(matches!(error, IdentityError::Exposed { mode: 0o644, .. }), "{error}");
        assert!(error.to_string().contains("chmod 600"), "{error}");
    }

    #[test]
    fn anything_else_is_no_identity() {
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
    fn libp2p_knows_the_peer_by_the_same_name() {
        let identity = Identity::ephemeral();
        let theirs = identity.keypair().public().to_peer_id();
        assert_eq!(theirs.to_string(), identity.peer_id().to_string());
        assert_eq!(libp2p_peer_of(identity.peer_id()), Some(theirs));
    }
}
