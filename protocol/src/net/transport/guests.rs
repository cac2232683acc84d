//! Guests: peers that are no members of the run, such as newcomers, readers of files and strangers.
//!
//! Room belongs to members. All guests together have a small share of memory, connections and entries in the
//! table of peers, and what they occupy gives way to others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use quinn::Connection;
use tokio::sync::Semaphore;

use super::link::CloseCode;
use crate::ids::PeerId;
use crate::limits;
use crate::net::connection_limits::{ConnectionLimits, network_of};

/// Connections that guests have dialled.
const CONNECTIONS: ConnectionLimits = ConnectionLimits { all: 256, network: 128 };

/// Time after which the connection of a guest may be closed to make room for another.
const GRACE: Duration = Duration::from_secs(5);

/// The connections of guests, and the room for their tensors.
pub(super) struct Guests {
    room: Arc<Semaphore>,
    dialled: Mutex<BTreeMap<PeerId, Guest>>,
}

struct Guest {
    network: IpAddr,
    since: Instant,
    connection: Connection,
}

/// No place is free, and none can be freed yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoPlace;

impl Guests {
    pub(super) fn new() -> Self {
        let room = Arc::new(Semaphore::new(limits::GUEST_ROOM.0 as usize));
        Self { room, dialled: Mutex::default() }
    }

    /// Room for the tensors of all guests.
    pub(super) fn room(&self) -> &Arc<Semaphore> {
        &self.room
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PeerId, Guest>> {
        // A poisoned lock is usable: its holders only insert and remove entries.
        self.dialled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection that a guest has dialled a place. Where there is none, the oldest of its network, or of all,
    /// is closed.
    pub(super) fn enter(
        &self,
        peer: PeerId,
        connection: &Connection,
        now: Instant,
        is_member: impl Fn(PeerId) -> bool,
    ) -> Result<(), NoPlace> {
        let network = network_of(connection.remote_address().ip());
        let mut dialled = self.lock();
        dialled.retain(|id, guest| {
            *id != peer && !is_member(*id) && guest.connection.close_reason().is_none()
        });
        let here = |guest: &Guest| guest.network == network;
        let alike = dialled.values().filter(|guest| here(guest)).count();
        if alike >= CONNECTIONS.network || dialled.len() >= CONNECTIONS.all {
            let of_network = alike >= CONNECTIONS.network;
            let others = dialled.iter().filter(|(_, guest)| !of_network || here(guest));
            let oldest = others.min_by_key(|(_, guest)| guest.since);
            let oldest =
                oldest.filter(|(_, guest)| now.saturating_duration_since(guest.since) > GRACE);
            let oldest = *oldest.ok_or(NoPlace)?.0;
            if let Some(guest) = dialled.remove(&oldest) {
                let reason = b"it is no member, and its place is needed";
                guest.connection.close(CloseCode::Done.into(), reason);
            }
        }
        dialled.insert(peer, Guest { network, since: now, connection: connection.clone() });
        Ok(())
    }
}
