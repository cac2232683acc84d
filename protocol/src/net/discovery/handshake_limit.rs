//! Limits the number of simultaneous libp2p handshakes, in all and per host.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::task::{Context, Poll};
use std::time::Instant;

use libp2p::core::Endpoint;
use libp2p::core::transport::PortUse;
use libp2p::swarm::{
    ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, THandler, THandlerInEvent,
    THandlerOutEvent, ToSwarm, dummy,
};
use libp2p::{Multiaddr, PeerId};

use super::address::socket_address;
use crate::net::admission::{Gate, Reason};
use crate::net::connection_limits::{ConnectionLimiter, ConnectionLimits};

const LIMITS: ConnectionLimits = ConnectionLimits { all: 128, network: 48 };

/// The connection limits as a libp2p behaviour.
pub(super) struct HandshakeLimit {
    connection_limits: ConnectionLimiter,
    /// The places of the running handshakes.
    places: BTreeMap<ConnectionId, u64>,
    gate: Gate,
}

/// Not sent to the peer: the connection is dropped.
#[derive(Debug, thiserror::Error)]
#[error("the limit of simultaneous handshakes is reached")]
struct TooManyConnections;

impl HandshakeLimit {
    pub(super) fn new(gate: Gate) -> Self {
        Self { connection_limits: ConnectionLimiter::new(LIMITS), places: BTreeMap::new(), gate }
    }

    fn done(&mut self, connection: ConnectionId) {
        if let Some(number) = self.places.remove(&connection) {
            self.connection_limits.leave(number);
        }
    }
}

impl NetworkBehaviour for HandshakeLimit {
    type ConnectionHandler = dummy::ConnectionHandler;
    type ToSwarm = Infallible;

    fn handle_pending_inbound_connection(
        &mut self,
        connection: ConnectionId,
        _local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        let Some(address) = socket_address(remote) else { return Ok(()) };
        match self.connection_limits.enter(address.ip(), Instant::now()) {
            Ok(place) => {
                self.places.insert(connection, place.number);
                Ok(())
            }
            Err(_) => {
                let text = TooManyConnections.to_string();
                self.gate.turned_away(Reason::Flood, None, Some(address), text);
                Err(ConnectionDenied::new(TooManyConnections))
            }
        }
    }

    fn handle_established_inbound_connection(
        &mut self,
        _connection: ConnectionId,
        _peer: PeerId,
        _local: &Multiaddr,
        _remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(dummy::ConnectionHandler)
    }

    fn handle_established_outbound_connection(
        &mut self,
        _connection: ConnectionId,
        _peer: PeerId,
        _address: &Multiaddr,
        _role: Endpoint,
        _port: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(dummy::ConnectionHandler)
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        match event {
            FromSwarm::ConnectionEstablished(event) => self.done(event.connection_id),
            FromSwarm::ListenFailure(event) => self.done(event.connection_id),
            _ => {}
        }
    }

    fn on_connection_handler_event(
        &mut self,
        _peer: PeerId,
        _connection: ConnectionId,
        event: THandlerOutEvent<Self>,
    ) {
        match event {}
    }

    fn poll(
        &mut self,
        _context: &mut Context<'_>,
    ) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        Poll::Pending
    }
}
