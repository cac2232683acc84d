//! Watches the reachability of this peer's own port: asks other peers to probe it, and reports the
//! result.

use std::net::SocketAddr;
use std::time::Instant;

use shoal_formats::own_port::OwnPort;
use shoal_protocol::ids::PeerId;
use shoal_protocol::net::transport::{ProbeReport, Transport};
use shoal_protocol::units::Moment;
use tokio::task::JoinSet;

use super::setup::Network;
use super::timers::sleep_to;
use crate::outward_ip::outward_ip;
use crate::port_map::PortMap;
use crate::reachability::{Action, Input, Scout};

/// Asks peers for probes. Open requests end with this value.
pub(super) struct PortWatch {
    clock: Instant,
    scout: Scout,
    with: Option<(Transport, PortMap)>,
    /// The address that a router forwards, when it was looked up last.
    forwarded: Option<SocketAddr>,
    asks: JoinSet<(PeerId, Option<ProbeReport>)>,
    /// A result that was not returned yet.
    found: Option<OwnPort>,
    /// The result that was returned last.
    announced: OwnPort,
}

impl PortWatch {
    /// Makes the watch of a peer. A peer that is alone has no port.
    pub(super) fn of(network: Option<&Network>) -> Self {
        Self {
            clock: Instant::now(),
            scout: Scout::new(outward_ip()),
            with: network.map(|network| (network.transport.clone(), network.port_map.clone())),
            forwarded: None,
            asks: JoinSet::new(),
            found: None,
            announced: OwnPort::Unknown,
        }
    }

    /// Returns the last known reachability.
    pub(super) fn last(&self) -> OwnPort {
        self.announced
    }

    /// Notes a connection; a direct one has an address. A peer on the same machine cannot judge.
    pub(super) fn connected(&mut self, peer: PeerId, address: Option<SocketAddr>) {
        let far = address.is_some_and(|address| !address.ip().is_loopback());
        self.take(if far { Input::Near(peer) } else { Input::Gone(peer) });
    }

    /// Notes the end of a connection.
    pub(super) fn disconnected(&mut self, peer: PeerId) {
        self.take(Input::Gone(peer));
    }

    fn take(&mut self, input: Input) {
        for action in self.scout.handle(Moment(self.clock.elapsed()), input) {
            match action {
                Action::Tell(port) => self.found = Some(port),
                Action::Ask(peer) => {
                    let Some((transport, _)) = &self.with else { continue };
                    let (transport, port) = (transport.clone(), self.forwarded.map(|at| at.port()));
                    self.asks.spawn(async move {
                        let probe_report = transport.request_probe(peer, port).await;
                        if let Err(error) = &probe_report {
                            tracing::debug!(peer = %peer.short(), %error, "does not ring here");
                        }
                        (peer, probe_report.ok())
                    });
                }
            }
        }
    }

    /// Waits for a change of the reachability. Safe to cancel.
    pub(super) async fn next(&mut self) -> OwnPort {
        loop {
            if let Some(found) = self.found.take() {
                self.announced = found;
                return found;
            }
            let again = self.scout.next_timeout().map(|moment| self.clock + moment.0);
            let moved = async {
                match &mut self.with {
                    Some((_, port_map)) => port_map.other_than(self.forwarded).await,
                    None => std::future::pending().await,
                }
            };
            let input = tokio::select! {
                Some(asked) = self.asks.join_next() => match asked {
                    Ok((peer, probe_report)) => Input::Asked(peer, probe_report),
                    // The request panicked; another one follows.
                    Err(_) => continue,
                },
                () = moved => {
                    self.forwarded = self.with.as_ref().and_then(|(_, port_map)| port_map.address());
                    Input::Moved
                }
                () = sleep_to(again) => Input::Tick,
            };
            self.take(input);
        }
    }
}
