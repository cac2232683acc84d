//! Functions shared by the measuring programs.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;

use shoal_protocol::ids::Incarnation;
use shoal_protocol::net::Identity;
use shoal_protocol::net::admission::Gate;
use shoal_protocol::net::transport::{
    Congestion, FileSource, Transport, TransportConfig, TransportError, TransportEvent,
};
use tokio::sync::mpsc;

/// A peer without a run, with a new identity.
pub(crate) fn bind(
    listen: SocketAddr,
    congestion: Congestion,
    files: Arc<dyn FileSource>,
) -> Result<(Transport, mpsc::Receiver<TransportEvent>), TransportError> {
    let (incarnation, gate) = (Incarnation(1), Gate::default());
    let config = TransportConfig { incarnation, run: None, congestion, files, gate };
    Transport::bind(&Identity::ephemeral(), &[listen], config)
}

/// Receives and discards events until this process's input ends, then closes the transport.
pub(crate) async fn take_until_input_ends(
    transport: &Transport,
    mut events: mpsc::Receiver<TransportEvent>,
) {
    let mut members = BTreeSet::new();
    let mut input = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    loop {
        tokio::select! {
            event = events.recv() => match event {
                // Only members have room for large tensors.
                Some(TransportEvent::Connected { member, .. }) => {
                    members.insert(member.peer);
                    transport.set_members(members.iter().copied());
                }
                Some(_) => {}
                None => break,
            },
            _ = &mut input => break,
        }
    }
    transport.close().await;
}
