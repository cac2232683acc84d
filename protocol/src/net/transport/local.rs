//! The state of this peer: its id and incarnation, and its run.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use super::event::Run;
use super::handshake::{Hello, Reply};
use crate::ids::{Incarnation, PeerId};
use crate::limits;
use crate::manifest::Manifest;
use crate::net::admission::{Pass, Signed, UnixTime};
use crate::units::Bytes;

/// This peer, as its hellos and welcomes describe it.
pub(super) struct LocalPeer {
    id: PeerId,
    incarnation: Incarnation,
    run: RwLock<Option<Run>>,
    /// Maximum bytes of the tensors of one message.
    largest_message: AtomicU64,
    /// The number of the next connection that this peer dials.
    next_number: AtomicU64,
}

impl LocalPeer {
    pub(super) fn new(id: PeerId, incarnation: Incarnation, run: Option<Run>) -> Self {
        let largest_message = AtomicU64::new(largest_message(run.as_ref()).0);
        let next_number = AtomicU64::new(0);
        Self { id, incarnation, run: RwLock::new(run), largest_message, next_number }
    }

    pub(super) fn id(&self) -> PeerId {
        self.id
    }

    pub(super) fn run(&self) -> Option<Run> {
        self.run.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_run(&self, run: Run) {
        let largest = largest_message(Some(&run));
        self.largest_message.store(largest.0, Ordering::Relaxed);
        *self.run.write().unwrap_or_else(PoisonError::into_inner) = Some(run);
    }

    /// Maximum bytes of the tensors of one message.
    pub(super) fn largest_message(&self) -> Bytes {
        Bytes(self.largest_message.load(Ordering::Relaxed))
    }

    /// The hello of a connection that this peer dials. `lost` is [`Hello::lost`].
    pub(super) fn hello(&self, lost: Option<u64>, pass: Pass, ticket: Option<Signed>) -> Hello {
        Hello {
            incarnation: self.incarnation,
            run: self.run(),
            number: self.next_number.fetch_add(1, Ordering::Relaxed),
            lost,
            pass,
            ticket,
        }
    }

    /// The answer to an accepted hello from the address `seen`.
    pub(super) fn welcome(
        &self,
        seen: SocketAddr,
        pass: Pass,
        certificate: Option<Signed>,
    ) -> Reply {
        Reply::Welcome {
            incarnation: self.incarnation,
            run: self.run(),
            pass,
            certificate,
            clock: UnixTime::now(),
            seen,
        }
    }
}

/// Maximum bytes of the tensors of one message in a run. Without a valid manifest, the general
/// limit applies.
fn largest_message(run: Option<&Run>) -> Bytes {
    let manifest = run.and_then(|run| Manifest::from_bytes(&run.manifest).ok());
    manifest.map_or(limits::TENSOR_MESSAGE, |manifest| manifest.largest_message())
}
