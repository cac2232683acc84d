//! The known peers, connected or not.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::peer::{Peer, Session};
use crate::ids::PeerId;
use crate::limits;

/// Maximum number of known peers.
const PEERS: usize = 2 * limits::MEMBERS;

/// All known peers by their ids.
#[derive(Default)]
pub(super) struct Peers(Mutex<BTreeMap<PeerId, Arc<Peer>>>);

impl Peers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PeerId, Arc<Peer>>> {
        // A poisoned lock is usable: its holders only look up and insert.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, id: PeerId) -> Option<Arc<Peer>> {
        self.lock().get(&id).cloned()
    }

    /// The peer of this id; calls `start` with it if it was unknown. `None` if there are too many
    /// peers.
    pub(super) fn get_or_insert(
        &self,
        id: PeerId,
        start: impl FnOnce(Arc<Peer>),
    ) -> Option<Arc<Peer>> {
        let mut peers = self.lock();
        if let Some(peer) = peers.get(&id) {
            return Some(peer.clone());
        }
        if peers.len() >= PEERS {
            return None;
        }
        let peer = Arc::new(Peer::new(id));
        peers.insert(id, peer.clone());
        start(peer.clone());
        Some(peer)
    }

    /// All peers, in order.
    pub(super) fn all(&self) -> Vec<Arc<Peer>> {
        self.lock().values().cloned().collect()
    }

    /// The open connection to a peer.
    pub(super) fn session(&self, id: PeerId) -> Option<Arc<Session>> {
        self.get(id)?.session()
    }

    /// The open connections, in the order of the peers.
    pub(super) fn sessions(&self) -> Vec<Arc<Session>> {
        self.lock().values().filter_map(|peer| peer.session()).collect()
    }
}
