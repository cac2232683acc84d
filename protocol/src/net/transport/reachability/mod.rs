//! Tests whether a peer's UDP port accepts packets from addresses that it never sent to.
//!
//! A peer asks another, on a direct connection, to probe its port. The other peer sends a few small
//! datagrams from a new socket, so that no router or firewall treats them as answers. It sends them
//! only to the address that the connection's handshake proved: to the port that the requester
//! names, and to the port at which the requester is seen. Together they are smaller than the
//! request. The probes that arrive at the requester's sockets ([`socket`]) show how its router
//! filters.

mod rate_limit;
pub(super) mod socket;
pub(super) mod wire;

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::{Connection, RecvStream, SendStream};
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use super::class::Class;
use super::endpoints::Endpoints;
use super::peer::Session;
use super::request::Kind as RequestKind;
use super::traffic::{Counters, Kind};
use crate::ids::PeerId;
use rate_limit::RateLimit;
use socket::Probes;
use wire::{ANSWER, Answer, Nonce, PROBE, Probe, REQUEST, Request};

/// Time limit of the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pauses before each probe; several probes are sent because packets may be lost.
const PAUSES: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(250), Duration::from_millis(500)];

/// Time to wait for probes after the other end has announced them.
const LISTEN: Duration = Duration::from_millis(2500);

/// Lower ports belong to system services, and are not probed.
const FIRST_PORT: u16 = 1024;

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeReport {
    /// The probing peer.
    pub by: PeerId,
    /// The address that the probes came from.
    pub from: IpAddr,
    /// The requested port.
    pub port: u16,
    /// The address at which the other end sees this peer.
    pub seen: SocketAddr,
    /// The ports at which probes arrived: the requested port, the seen one, or both.
    pub heard: BTreeSet<u16>,
}

/// The reason why a probe failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// There is no direct connection to the peer.
    #[error("there is no direct connection to that peer: connect first")]
    NotConnected,
    /// The other end has reached its limit of probes.
    #[error("that peer has reached its limit of probes: ask another one, or retry later")]
    Busy,
    /// The limit of simultaneous requests is reached.
    #[error("too many probes are in progress: wait for their results")]
    TooMany,
    /// The connection broke, or the answer is malformed.
    #[error("that peer did not answer the probe request: ask another one")]
    NoAnswer,
}

/// The probes of this peer: those that it asked for, and those that it sends for others.
#[derive(Debug, Default)]
pub(super) struct Reachability {
    probes: Arc<Probes>,
    rate_limit: RateLimit,
}

impl Reachability {
    /// The expected probes, which the sockets record.
    pub(super) fn probes(&self) -> &Arc<Probes> {
        &self.probes
    }

    /// Asks the other end of a connection to probe `port`, or by default the port of the local
    /// socket.
    pub(super) async fn ask(
        &self,
        endpoints: &Endpoints,
        counters: &Counters,
        session: &Session,
        port: Option<u16>,
    ) -> Result<ProbeReport, ProbeError> {
        if session.is_relayed() {
            return Err(ProbeError::NotConnected);
        }
        let own = endpoints.local_port_to(session.address);
        let port = port.or(own).ok_or(ProbeError::NotConnected)?;
        let nonce = Nonce(endpoints.random().ok_or(ProbeError::NoAnswer)?);
        let mut probes = self.probes.listen(nonce).ok_or(ProbeError::TooMany)?;
        let request = Request { nonce, port };
        let asked = timeout(PATIENCE, exchange(counters, &session.connection, request));
        let seen = match asked.await {
            Ok(Some(Answer::Probes { seen })) => seen,
            Ok(Some(Answer::Busy)) => return Err(ProbeError::Busy),
            Ok(None) | Err(_) => return Err(ProbeError::NoAnswer),
        };
        // Only the requested port matters for the result.
        let _ = timeout(LISTEN, probes.at(port)).await;
        let heard =
            probes.ports().into_iter().filter(|at| [port, seen.port()].contains(at)).collect();
        Ok(ProbeReport { by: session.member.peer, from: session.address.ip(), port, seen, heard })
    }

    /// Answers a request and sends the probes. A malformed request gets no answer.
    pub(super) async fn answer(
        &self,
        counters: &Counters,
        session: &Session,
        mut send: SendStream,
        mut recv: RecvStream,
    ) {
        let mut request = [0; REQUEST];
        if recv.read_exact(&mut request).await.is_err() {
            return;
        }
        let Some(request) = Request::decode(&request) else { return };
        counters.received(Kind::Control, REQUEST);
        let seen = session.address;
        // The address of a relayed peer is not proved.
        let may = !session.is_relayed() && self.rate_limit.admits(seen.ip(), Instant::now());
        let answer = if may { Answer::Probes { seen } } else { Answer::Busy }.encode();
        Class::Control.prioritize(&send, 0);
        if send.write_all(&answer).await.is_err() || send.finish().is_err() || !may {
            return;
        }
        counters.sent(Kind::Control, answer.len());
        match probe(request, seen).await {
            Ok(sent) => counters.sent(Kind::Control, sent),
            Err(error) => tracing::debug!(%seen, %error, "cannot send probes"),
        }
    }
}

/// Sends the request and reads the answer.
async fn exchange(
    counters: &Counters,
    connection: &Connection,
    request: Request,
) -> Option<Answer> {
    let (mut send, mut recv) = connection.open_bi().await.ok()?;
    Class::Control.prioritize(&send, 0);
    let bytes = RequestKind::Probe.encode(&request.encode());
    send.write_all(&bytes).await.ok()?;
    send.finish().ok()?;
    counters.sent(Kind::Control, bytes.len());
    let answer = recv.read_to_end(ANSWER).await.ok()?;
    counters.received(Kind::Control, answer.len());
    Answer::decode(&answer)
}

/// Sends probes to a host from a new socket; returns the number of bytes sent.
async fn probe(Request { nonce, port }: Request, seen: SocketAddr) -> io::Result<usize> {
    let anywhere: IpAddr = match seen {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((anywhere, 0)).await?;
    let mut sent = 0;
    for pause in PAUSES {
        sleep(pause).await;
        for port in ports(port, seen) {
            let mut at = seen;
            at.set_port(port);
            // A probe that cannot be sent counts as one that does not arrive.
            sent += socket.send_to(&Probe { nonce, port }.encode(), at).await.unwrap_or(0);
        }
    }
    Ok(sent)
}

/// The ports to probe: the one at which the requester is seen, and the one that it names.
fn ports(named: u16, seen: SocketAddr) -> BTreeSet<u16> {
    let named = Some(named).filter(|port| *port >= FIRST_PORT);
    named.into_iter().chain([seen.port()]).collect()
}

/// All probes with IPv6 and UDP headers are smaller than the request without headers.
const _: () = assert!(PAUSES.len() * 2 * (PROBE + 48) < REQUEST);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_of_system_services_are_not_probed() {
        let seen = |port: u16| SocketAddr::from(([192, 0, 2, 1], port));
        assert_eq!(ports(7410, seen(40_000)), BTreeSet::from([7410, 40_000]));
        assert_eq!(ports(53, seen(40_000)), BTreeSet::from([40_000]));
        assert_eq!(ports(443, seen(443)), BTreeSet::from([443]), "a peer uses this port");
    }
}
