//! The QUIC endpoints of a transport: one on each UDP socket, and one on the relay.

use std::net::SocketAddr;
use std::sync::Arc;

use quinn::{ClientConfig, Connection, Endpoint, TransportConfig};

use super::endpoint::{self, Congestion};
use super::error::{ConnectError, TransportError};
use super::reachability::socket::{ProbeSocket, Probes};
use super::relay::{self, Relay};
use super::tls::Tls;
use crate::ids::PeerId;
use crate::net::identity::Identity;

/// TLS requires a server name; only the certificate identifies the other end.
const SERVER_NAME: &str = "shoal";

/// All endpoints, with the parameters of the connections that they dial.
pub(super) struct Endpoints {
    tls: Tls,
    direct: Vec<Endpoint>,
    /// The sockets of the direct endpoints.
    sockets: Vec<Arc<ProbeSocket>>,
    direct_config: Arc<TransportConfig>,
    /// QUIC over paths through relaying peers.
    relayed: Endpoint,
    relayed_config: Arc<TransportConfig>,
}

impl Endpoints {
    /// Listens on every address. The sockets pass `probes` the reachability probes that arrive.
    pub(super) fn bind(
        identity: &Identity,
        listen: &[SocketAddr],
        congestion: Congestion,
        relay: &Arc<Relay>,
        probes: &Arc<Probes>,
    ) -> Result<Self, TransportError> {
        if listen.is_empty() {
            return Err(TransportError::NoListenAddress);
        }
        let tls = Tls::new(identity)?;
        let direct_config = Arc::new(endpoint::quic(congestion));
        let accepted = Arc::new(endpoint::of_guests(endpoint::quic(congestion)));
        let bound = listen
            .iter()
            .map(|&address| endpoint::bind(address, identity, &tls, &accepted, probes))
            .collect::<Result<Vec<_>, _>>()?;
        let (direct, sockets) = bound.into_iter().unzip();
        let relayed_config = Arc::new(endpoint::relayed(congestion));
        let accepted = Arc::new(endpoint::of_guests(endpoint::relayed(congestion)));
        let relayed = endpoint::over(relay.clone(), identity, &tls, &accepted)?;
        Ok(Self { tls, direct, sockets, direct_config, relayed, relayed_config })
    }

    /// All endpoints. The relay endpoint comes first, because it must close before the ones that
    /// carry it.
    pub(super) fn all(&self) -> impl Iterator<Item = &Endpoint> {
        std::iter::once(&self.relayed).chain(&self.direct)
    }

    /// The endpoints on UDP sockets.
    pub(super) fn direct(&self) -> &[Endpoint] {
        &self.direct
    }

    /// Gives the ports back to the system. Connections that have yet to end lose every packet from here on.
    pub(super) fn release(&self) {
        self.sockets.iter().for_each(|socket| socket.release());
    }

    pub(super) fn local_addresses(&self) -> Vec<SocketAddr> {
        self.direct.iter().filter_map(|endpoint| endpoint.local_addr().ok()).collect()
    }

    /// The local port from which `address` is dialled.
    pub(super) fn local_port_to(&self, address: SocketAddr) -> Option<u16> {
        Some(endpoint::route(&self.direct, address)?.local_addr().ok()?.port())
    }

    /// Random secret bytes; `None` if the system has no entropy.
    pub(super) fn random<const N: usize>(&self) -> Option<[u8; N]> {
        self.tls.random()
    }

    /// Dials a peer at an address, which may stand for a path through another peer.
    pub(super) async fn connect(
        &self,
        peer: PeerId,
        address: SocketAddr,
    ) -> Result<Connection, ConnectError> {
        let (endpoint, quic) = if relay::is_path(address) {
            (&self.relayed, &self.relayed_config)
        } else {
            let endpoint = endpoint::route(&self.direct, address);
            (endpoint.ok_or(ConnectError::NoSocket { address })?, &self.direct_config)
        };
        let (tls, verifier) = self.tls.client(peer);
        let mut config = ClientConfig::new(tls);
        config.transport_config(quic.clone());
        let unreachable = |reason: String| match verifier.stranger() {
            Some(found) => ConnectError::WrongPeer { address, expected: peer, found },
            None => ConnectError::Unreachable { address, reason },
        };
        let connecting = endpoint
            .connect_with(config, address, SERVER_NAME)
            .map_err(|error| unreachable(error.to_string()))?;
        connecting.await.map_err(|error| unreachable(error.to_string()))
    }
}
