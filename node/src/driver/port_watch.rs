//! Has peers ring at this one's port, and hears what comes of it.

use std::net::SocketAddr;
use std::time::Instant;

use shoal_protocol::ids::PeerId;
use shoal_protocol::net::transport::{ProbeReport, Transport};
use shoal_protocol::units::Moment;
use tokio::task::JoinSet;

use super::Driver;
use super::setup::Network;
use crate::events::RunEvent;
use crate::network::outward_ip;
use crate::port_map::PortMap;
use crate::reachability::{Action, Input, Scout};
use crate::status::own_port::OwnPort;

/// What asks around. Questions end with it.
pub(super) struct PortWatch {
    clock: Instant,
    scout: Scout,
    with: Option<(Transport, PortMap)>,
    /// What a router passes on, as far as was noticed.
    passed_on: Option<SocketAddr>,
    asks: JoinSet<(PeerId, Option<ProbeReport>)>,
    /// Found, and to be told.
    news: Option<OwnPort>,
    /// What was told last.
    told: OwnPort,
}

impl PortWatch {
    /// That of a peer, which has none where it is alone.
    pub(super) fn of(network: Option<&Network>) -> Self {
        Self {
            clock: Instant::now(),
            scout: Scout::new(outward_ip()),
            with: network.map(|network| (network.transport.clone(), network.port_map.clone())),
            passed_on: None,
            asks: JoinSet::new(),
            news: None,
            told: OwnPort::Unknown,
        }
    }

    /// How the port stands, as far as is known.
    pub(super) fn found(&self) -> OwnPort {
        self.told
    }

    /// A peer is connected; straight where there is an address. Who is on the same machine knows nothing.
    pub(super) fn connected(&mut self, peer: PeerId, address: Option<SocketAddr>) {
        let far = address.is_some_and(|address| !address.ip().is_loopback());
        self.take(if far { Input::Near(peer) } else { Input::Gone(peer) });
    }

    /// It is no more.
    pub(super) fn disconnected(&mut self, peer: PeerId) {
        self.take(Input::Gone(peer));
    }

    fn take(&mut self, input: Input) {
        for action in self.scout.handle(Moment(self.clock.elapsed()), input) {
            match action {
                Action::Tell(port) => self.news = Some(port),
                Action::Ask(peer) => {
                    let Some((transport, _)) = &self.with else { continue };
                    let (transport, port) = (transport.clone(), self.passed_on.map(|at| at.port()));
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

    /// Waits until the port stands otherwise than it did. May be given up and called again.
    pub(super) async fn next(&mut self) -> OwnPort {
        loop {
            if let Some(news) = self.news.take() {
                self.told = news;
                return news;
            }
            let again = self.scout.next_timeout().map(|moment| self.clock + moment.0);
            let moved = async {
                match &mut self.with {
                    Some((_, port_map)) => port_map.other_than(self.passed_on).await,
                    None => std::future::pending().await,
                }
            };
            let input = tokio::select! {
                Some(asked) = self.asks.join_next() => match asked {
                    Ok((peer, probe_report)) => Input::Asked(peer, probe_report),
                    // It panicked; another look begins in a while.
                    Err(_) => continue,
                },
                () = moved => {
                    self.passed_on = self.with.as_ref().and_then(|(_, port_map)| port_map.address());
                    Input::Moved
                }
                () = super::sleep_to(again) => Input::Tick,
            };
            self.take(input);
        }
    }
}

impl Driver<'_> {
    /// Tells how the peer's own port stands.
    pub(super) fn port_stands(&mut self, port: OwnPort) {
        self.meters.own_port(&port);
        self.note(&RunEvent::OwnPort(port));
    }
}
