//! How peers find one another: a libp2p node whose only task is to know who takes part in a run
//! and where they are.
//!
//! It listens on TCP ports of the same numbers as the transport's UDP ports, so one address serves
//! both. Who takes part in a run provides the run's id as a key in Kademlia and looks it up now and
//! then; whoever provides it is dialled, proves its id, and says where it listens.

mod actor;
mod address;
mod behaviour;
mod door;
mod guard;
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

/// Events that wait for the owner; commands that wait for the libp2p node.
const QUEUE: usize = 256;

/// How to look for peers.
#[derive(Debug, Clone)]
pub struct DiscoveryConfig {
    /// Where to listen (TCP): the addresses that the transport got.
    pub listen: Vec<SocketAddr>,
    /// Whether to look for peers on the local network by multicast.
    pub mdns: bool,
    /// Who may talk to us.
    pub gate: Gate,
}

/// What was found, or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiscoveryEvent {
    /// A peer that takes part in the run, or the one that we came through, and where its transport
    /// listens, the likeliest address first. Told again when the addresses change.
    Found {
        /// Who.
        peer: PeerId,
        /// Where.
        addresses: Vec<SocketAddr>,
    },
    /// The connection to a peer ended, and not because nothing used it: its process may have died.
    /// The system at the other end says so at once where there is one.
    Broken {
        /// Who.
        peer: PeerId,
    },
    /// Nobody answers at an address that was given.
    Unreachable {
        /// As it was given.
        address: PeerAddress,
        /// What happened.
        reason: String,
    },
    /// Somebody else answers at an address that was given.
    WrongPeer {
        /// As it was given.
        address: PeerAddress,
        /// Who answers there.
        found: PeerId,
    },
}

/// Why nobody can be looked for.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// Somebody else listens there.
    #[error("{address} (TCP) is in use: stop what listens there, or choose another port")]
    AddressInUse {
        /// Where.
        address: SocketAddr,
    },
    /// The system refused the socket.
    #[error("cannot listen on {address} (TCP): {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The library refused.
    #[error("cannot set up the search for peers: {reason}")]
    Setup {
        /// What it said.
        reason: String,
    },
}

/// A handle on the search; all clones are the same one. It ends when the last is dropped.
#[derive(Clone)]
pub struct Discovery {
    commands: mpsc::Sender<Command>,
    tracker: TaskTracker,
    stop: CancellationToken,
    _guard: Arc<DropGuard>,
}

impl Discovery {
    /// Begins to listen. Peers are looked for once [`Self::join`] or [`Self::bootstrap`] is called.
    ///
    /// # Errors
    /// When an address is in use or cannot be listened on.
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

    /// Joins the network through a peer that is already there. It is dialled now, and again
    /// whenever no peer is known any more. What comes of it is an event.
    pub async fn bootstrap(&self, through: PeerAddress) {
        // Without an actor there is nobody left to be interested.
        let _ = self.commands.send(Command::Bootstrap(through)).await;
    }

    /// Tells the network that we take part in `run`, and looks for others that do, until the end.
    pub async fn join(&self, run: RunId) {
        let _ = self.commands.send(Command::Join(run)).await;
    }

    /// Others reach us at this address too, in place of the one given before: a router has opened a port.
    pub async fn open_at(&self, address: SocketAddr) {
        let _ = self.commands.send(Command::OpenAt(address)).await;
    }

    /// Stops and frees the sockets.
    pub async fn close(&self) {
        self.stop.cancel();
        self.tracker.wait().await;
    }
}

/// libp2p lets several processes of one user listen on one port, and each would get a share of the
/// connections; an ordinary socket does not.
fn check_free(address: SocketAddr) -> Result<(), DiscoveryError> {
    match std::net::TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(source) if source.kind() == io::ErrorKind::AddrInUse => {
            Err(DiscoveryError::AddressInUse { address })
        }
        Err(source) => Err(DiscoveryError::Listen { address, source }),
    }
}
