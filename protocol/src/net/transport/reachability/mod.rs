//! Whether a peer's own UDP port is open to who it never sent to.
//!
//! A peer asks another, on a connection that leads straight there, to ring at its port: the other sends a few small
//! datagrams from a socket of their own, so that no router or firewall takes them for an answer. They go to the address
//! that the connection's handshake proved and to no other, to the port that the asker names and to the one that it is
//! seen at, and in sum they are smaller than the request was. What the asker hears of them at its own sockets
//! ([`bell`]) tells it what stands between.

mod rate_limit;
pub(super) mod socket;
pub(super) mod wire;

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use quinn::{Connection, RecvStream, SendStream};
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use super::class::Class;
use super::peer::Session;
use super::request::Kind as RequestKind;
use super::traffic::Kind;
use super::{Shared, endpoint};
use crate::ids::PeerId;
pub(super) use rate_limit::RateLimit;
use wire::{ANSWER, Answer, Nonce, Probe, REQUEST, RING, Request};

/// How long the other end may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pauses before each ring: a packet may be lost by chance.
const PAUSES: [Duration; 3] =
    [Duration::ZERO, Duration::from_millis(250), Duration::from_millis(500)];

/// How long rings are listened for once the other end has said that it rings.
const LISTEN: Duration = Duration::from_millis(2500);

/// Ports below belong to services of the system, which are not to be rung at.
const FIRST_PORT: u16 = 1024;

/// What came of being rung at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeReport {
    /// Who rang.
    pub by: PeerId,
    /// Where it rang from.
    pub from: IpAddr,
    /// The port that was asked for.
    pub port: u16,
    /// Where the other end sees this one.
    pub seen: SocketAddr,
    /// Which of the port asked for and the one seen were heard at.
    pub heard: BTreeSet<u16>,
}

/// Why nothing was learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// There is nobody to ask.
    #[error("there is no connection to that peer that leads straight there: connect first")]
    NotConnected,
    /// The other end was asked too often of late.
    #[error("that peer has rung often enough for now: ask another one, or later")]
    Busy,
    /// As many questions are open as may be.
    #[error("enough peers are being asked already: wait for their answers")]
    TooMany,
    /// The connection broke, or the answer is none.
    #[error("that peer does not answer the question: ask another one")]
    NoAnswer,
}

/// Asks the other end of a connection to ring at `port`; at the socket's own where none is given.
pub(super) async fn ask(
    shared: &Shared,
    session: &Session,
    port: Option<u16>,
) -> Result<ProbeReport, ProbeError> {
    if session.is_relayed() {
        return Err(ProbeError::NotConnected);
    }
    let own = endpoint::route(&shared.endpoints, session.address)
        .and_then(|endpoint| Some(endpoint.local_addr().ok()?.port()));
    let port = port.or(own).ok_or(ProbeError::NotConnected)?;
    let nonce = Nonce(shared.tls.random().ok_or(ProbeError::NoAnswer)?);
    let mut heard = shared.probes.listen(nonce).ok_or(ProbeError::TooMany)?;
    let asked = timeout(PATIENCE, put(shared, &session.connection, Request { nonce, port }));
    let seen = match asked.await {
        Ok(Some(Answer::Probes { seen })) => seen,
        Ok(Some(Answer::Busy)) => return Err(ProbeError::Busy),
        Ok(None) | Err(_) => return Err(ProbeError::NoAnswer),
    };
    // At the port itself is all that there is to know.
    let _ = timeout(LISTEN, heard.at(port)).await;
    let heard = heard.so_far().into_iter().filter(|at| [port, seen.port()].contains(at)).collect();
    Ok(ProbeReport { by: session.member.peer, from: session.address.ip(), port, seen, heard })
}

/// Sends the request and reads the answer.
async fn put(shared: &Shared, connection: &Connection, request: Request) -> Option<Answer> {
    let (mut send, mut recv) = connection.open_bi().await.ok()?;
    Class::Control.put(&send, 0);
    let bytes = RequestKind::Probe.before(&request.encode());
    send.write_all(&bytes).await.ok()?;
    send.finish().ok()?;
    shared.counters.sent(Kind::Control, bytes.len());
    let answer = recv.read_to_end(ANSWER).await.ok()?;
    shared.counters.received(Kind::Control, answer.len());
    Answer::decode(&answer)
}

/// Answers a request, and rings. A malformed one is dropped: who sent it gets no answer.
pub(super) async fn answer(
    shared: &Shared,
    session: &Session,
    mut send: SendStream,
    mut recv: RecvStream,
) {
    let mut request = [0; REQUEST];
    if recv.read_exact(&mut request).await.is_err() {
        return;
    }
    let Some(request) = Request::decode(&request) else { return };
    shared.counters.received(Kind::Control, REQUEST);
    let seen = session.address;
    // Through others nobody shows where it is.
    let may = !session.is_relayed() && shared.rate_limit.admits(seen.ip(), Instant::now());
    let answer = if may { Answer::Probes { seen } } else { Answer::Busy }.encode();
    Class::Control.put(&send, 0);
    if send.write_all(&answer).await.is_err() || send.finish().is_err() || !may {
        return;
    }
    shared.counters.sent(Kind::Control, answer.len());
    match probe(request, seen).await {
        Ok(sent) => shared.counters.sent(Kind::Control, sent),
        Err(error) => tracing::debug!(%seen, %error, "cannot ring"),
    }
}

/// Rings at a host, from a socket that nothing was ever sent from. Gives the bytes sent.
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
            // One that cannot be sent is one that is not heard.
            sent += socket.send_to(&Probe { nonce, port }.encode(), at).await.unwrap_or(0);
        }
    }
    Ok(sent)
}

/// Where it rings: where the asker is seen, and at the port that it names.
fn ports(named: u16, seen: SocketAddr) -> BTreeSet<u16> {
    let named = Some(named).filter(|port| *port >= FIRST_PORT);
    named.into_iter().chain([seen.port()]).collect()
}

/// With the headers of IPv6 and UDP all rings come to less than the request has without any.
const _: () = assert!(PAUSES.len() * 2 * (RING + 48) < REQUEST);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_of_the_system_are_not_rung_at() {
        let seen = |port: u16| SocketAddr::from(([192, 0, 2, 1], port));
        assert_eq!(ports(7410, seen(40_000)), BTreeSet::from([7410, 40_000]));
        assert_eq!(ports(53, seen(40_000)), BTreeSet::from([40_000]));
        assert_eq!(ports(443, seen(443)), BTreeSet::from([443]), "it is a peer's, as one sees");
    }
}
