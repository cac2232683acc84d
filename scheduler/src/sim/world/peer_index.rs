//! The index of a peer in its scenario, which its id encodes.

use shoal_protocol::ids::{Member, PeerId};

/// The id of the peer at an index.
pub(super) fn peer_id(index: usize) -> PeerId {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&(index as u64).to_le_bytes());
    PeerId(id)
}

/// The index of a peer in its scenario.
pub(in crate::sim) fn index_of(member: Member) -> usize {
    place_of(member.peer)
}

/// The index of the peer with an id.
pub(super) fn place_of(peer: PeerId) -> usize {
    let id = peer.0.first_chunk().expect("a peer id has 32 bytes");
    u64::from_le_bytes(*id) as usize
}
