//! Closes the connections of peers that are no longer admitted.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::Shared;
use super::link::CloseCode;
use crate::net::admission::UnixTime;

/// Interval between checks of all peers without a change at the gate, because certificates expire.
const CHECK_EVERY: Duration = Duration::from_secs(30);

/// Runs until the transport closes.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut changes = shared.gate.changes();
    loop {
        tokio::select! {
            () = shared.lifecycle.closed() => return,
            // The gate lives as long as the transport.
            _ = timeout(CHECK_EVERY, changes.changed()) => {}
        }
        let now = UnixTime::now();
        for peer in shared.peers.all() {
            let Some(session) = peer.session() else { continue };
            if let Err(denied) = shared.gate.stands(peer.id, now) {
                let (text, address) = (denied.to_string(), Some(session.address));
                session.connection.close(CloseCode::Refused.into(), text.as_bytes());
                peer.send_queue.clear();
                shared.gate.turned_away((&denied).into(), Some(peer.id), address, text);
            }
        }
    }
}
