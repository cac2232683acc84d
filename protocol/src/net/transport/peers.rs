//! The known peers, connected or not.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::peer::{Peer, Session};
use crate::ids::PeerId;
use crate::limits;

/// Maximum number of known peers that are no members. Those that nothing connects and nothing waits for are
/// forgotten before others are turned away.
const GUESTS: usize = 4096;

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
    /// peers. `members` are the number of members, and the test for one.
    pub(super) fn get_or_insert(
        &self,
        id: PeerId,
        (members, is_member): (usize, impl Fn(PeerId) -> bool),
        start: impl FnOnce(Arc<Peer>),
    ) -> Option<Arc<Peer>> {
        let mut peers = self.lock();
        if let Some(peer) = peers.get(&id) {
            return Some(peer.clone());
        }
        let most = PEERS.min(members + GUESTS);
        if peers.len() >= most {
            peers.retain(|id, peer| is_member(*id) || !peer.retire_if_idle());
        }
        if peers.len() >= most && !is_member(id) || peers.len() >= PEERS {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> PeerId {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_be_bytes());
        PeerId(id)
    }

    #[test]
    fn strangers_that_came_and_went_are_forgotten_and_members_are_not() {
        let peers = Peers::default();
        let is_member = |peer: PeerId| peer == id(0) || peer == id(1);
        let mut began = 0;
        let mut get = |number| peers.get_or_insert(id(number), (2, is_member), |_| began += 1);
        let member = get(0).expect("a place");
        let waited_for = get(2).expect("a place");
        assert!(waited_for.send_queue.push_control(bytes::Bytes::from_static(b"waits")));
        for number in 3..40_000 {
            assert!(get(number).is_some(), "{number} identities, and nobody gets in any more");
        }
        assert!(get(1).is_some());
        assert!(peers.all().len() <= GUESTS + 2, "{}", peers.all().len());
        for (number, peer) in [(0, member), (2, waited_for)] {
            let known = peers.get(id(number)).expect("it is a member, or something waits for it");
            assert!(Arc::ptr_eq(&known, &peer) && !known.is_retired());
        }
        assert_eq!(began, 40_000);
    }
}
