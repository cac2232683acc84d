//! Peer discovery: a libp2p node that finds the peers of a run and their addresses.
//!
//! The node listens on TCP ports with the same numbers as the transport's UDP ports, so one address
//! serves both. A peer of a run provides the run's id as a key in Kademlia, and looks it up at
//! intervals. It dials each provider, which proves its id and announces its listen addresses.

mod actor;
mod address;
mod behaviour;
mod guard;
mod handshake_limit;
mod schedule;
mod store;
#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub use address::{AddressError, Host, PeerAddress};

use crate::ids::{PeerId, RunId};
use crate::net::admission::Gate;
use crate::net::identity::Identity;
use actor::{Actor, Command};

/// Capacity of the event channel and of the command channel.
const QUEUE: usize = 256;

/// The configuration of discovery.
#[derive(Debug, Clone)]
pub struct DiscoveryConfig {
    /// The TCP addresses to listen on: those that the transport has bound.
    pub listen: Vec<SocketAddr>,
    /// Whether to search the local network by multicast.
    pub mdns: bool,
    /// Checks the admission of other peers.
    pub gate: Gate,
}

/// A result of discovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiscoveryEvent {
    /// A peer that takes part in the run, or the one that this peer joined through, and the
    /// addresses of its transport, the likeliest first. Repeated when the addresses change.
    Found {
        /// The peer.
        peer: PeerId,
        /// The addresses of its transport.
        addresses: Vec<SocketAddr>,
    },
    /// The connection to a peer broke, other than by the idle timeout: its process may have died.
    /// The operating system at the other end usually reports that at once.
    Broken {
        /// The peer.
        peer: PeerId,
    },
    /// No peer answers at a given address.
    Unreachable {
        /// The given address.
        address: PeerAddress,
        /// The cause, as text.
        reason: String,
    },
    /// Another peer answers at a given address.
    WrongPeer {
        /// The given address.
        address: PeerAddress,
        /// The peer that answered.
        found: PeerId,
    },
}

/// Errors of starting discovery.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// Another process listens on the address.
    #[error("{address} (TCP) is in use: stop what listens there, or choose another port")]
    AddressInUse {
        /// The address in use.
        address: SocketAddr,
    },
    /// The operating system refused the socket.
    #[error("cannot listen on {address} (TCP): {source}")]
    Listen {
        /// The address to listen on.
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The library returned an error.
    #[error("cannot set up peer discovery: {reason}")]
    Setup {
        /// The error of the library.
        reason: String,
    },
}

/// A handle on discovery; all clones share it. Discovery ends when the last clone is dropped.
#[derive(Clone)]
pub struct Discovery {
    commands: mpsc::Sender<Command>,
    tracker: TaskTracker,
    stop: CancellationToken,
    _guard: Arc<DropGuard>,
}

impl Discovery {
    /// Begins to listen. The search starts with [`Self::join`] or [`Self::bootstrap`].
    ///
    /// # Errors
    /// If an address is in use or cannot be listened on.
    pub fn start(
        identity: &Identity,
        config: &DiscoveryConfig,
    ) -> Result<(Self, mpsc::Receiver<DiscoveryEvent>), DiscoveryError> {
        let mut swarm = behaviour::swarm(identity.keypair(), config.mdns, config.gate.clone())?;
        for &address in &config.listen {
            check_free(address)?;
            swarm.listen_on(address::multiaddr(address)).map_err(|error| {
                DiscoveryError::Listen { address, source: io::Error::other(error.to_string()) }
            })?;
        }
        let (commands, inbox) = mpsc::channel(QUEUE);
        let (events, receiver) = mpsc::channel(QUEUE);
        let stop = CancellationToken::new();
        let tracker = TaskTracker::new();
        let actor = Actor::new(swarm, events, config.gate.clone());
        tracker.spawn(actor.run(inbox, stop.clone()));
        tracker.close();
        let guard = Arc::new(stop.clone().drop_guard());
        Ok((Self { commands, tracker, stop, _guard: guard }, receiver))
    }

    /// Joins the network through a peer that is already in it. Dials the peer at once, and again
    /// whenever no connection is left. The result is an event.
    pub async fn bootstrap(&self, through: PeerAddress) {
        // Fails only if the actor has stopped.
        let _ = self.commands.send(Command::Bootstrap(through)).await;
    }

    /// Publishes that this peer takes part in `run`, and searches for other peers of the run.
    pub async fn join(&self, run: RunId) {
        let _ = self.commands.send(Command::Join(run)).await;
    }

    /// Announces this address too, in place of the former one: a router forwards it to this peer.
    pub async fn open_at(&self, address: SocketAddr) {
        let _ = self.commands.send(Command::OpenAt(address)).await;
    }

    /// Stops and frees the sockets.
    pub async fn close(&self) {
        self.stop.cancel();
        self.tracker.wait().await;
    }
}

/// Checks that no other process listens on the address. libp2p lets several processes of one user
/// listen on one port and share its connections; an ordinary socket does not.
fn check_free(address: SocketAddr) -> Result<(), DiscoveryError> {
    match std::net::TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(source) if source.kind() == io::ErrorKind::AddrInUse => {
            Err(DiscoveryError::AddressInUse { address })
        }
        Err(source) => Err(DiscoveryError::Listen { address, source }),
    }
}
