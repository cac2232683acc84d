//! Dials a peer at all its addresses at once; greets the first that answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use quinn::{Connection, ConnectionError};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::Shared;
use super::error::{ConnectError, Refusal};
use super::handshake::{self, Reply};
use super::link::CloseCode;
use super::peer::{Dial, Peer, PeerGreeting, Session, State};
use super::relay;
use super::traffic::Kind;
use crate::ids::Member;
use crate::limits;
use crate::net::admission::UnixTime;

/// Time for which only the peer's own addresses are tried, before relayed paths are tried too.
const DETOUR_AFTER: Duration = Duration::from_secs(1);

/// A connection before the handshake, with its address.
type Answer = (Connection, SocketAddr);

/// Returns the connection to a peer, and dials if there is none. Only one dial of a peer runs at a
/// time. A second caller waits for it, and dials itself if it failed.
pub(super) async fn reach(
    shared: &Shared,
    peer: &Peer,
    addresses: &[SocketAddr],
) -> Result<Arc<Session>, ConnectError> {
    let mut state = peer.state.subscribe();
    let Some(turn) = turn(peer, &mut state).await else {
        return peer.session().ok_or(Refusal::AlreadyConnected.into());
    };
    let dialled = tokio::select! {
        biased;
        // A connection from the peer ends the local dial.
        _ = state.wait_for(State::is_settled) => Err(Refusal::AlreadyConnected.into()),
        () = shared.lifecycle.closing() => Err(ConnectError::Closing),
        dialled = timeout(limits::HANDSHAKE_TIMEOUT, dial(shared, peer, addresses, &turn)) => {
            dialled.unwrap_or(Err(ConnectError::TimedOut))
        }
    };
    // Any open connection will do, even if the local dial failed.
    dialled.or_else(|error| peer.session().ok_or(error))
}

/// Waits for the right to dial; `None` if a connection exists.
async fn turn<'a>(
    peer: &'a Peer,
    state: &mut tokio::sync::watch::Receiver<State>,
) -> Option<Turn<'a>> {
    loop {
        let mut connected = false;
        let mine = peer.state.send_if_modified(|state| {
            connected = state.open().is_some();
            let mine = !connected && state.dial == Dial::None;
            if mine {
                state.dial = Dial::Straight;
            }
            mine
        });
        if mine {
            return Some(Turn(peer));
        }
        if connected {
            return None;
        }
        // The sender lives in `peer`.
        let _ = state.wait_for(|state| state.open().is_some() || state.dial == Dial::None).await;
    }
}

/// The right to dial; dropping it ends the dial.
struct Turn<'a>(&'a Peer);

impl Turn<'_> {
    fn is_at(&self, dial: Dial) {
        self.0.state.send_modify(|state| state.dial = dial);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.is_at(Dial::None);
    }
}

async fn dial(
    shared: &Shared,
    peer: &Peer,
    addresses: &[SocketAddr],
    turn: &Turn<'_>,
) -> Result<Arc<Session>, ConnectError> {
    let mut attempts: FuturesUnordered<_> =
        addresses.iter().map(|&address| open(shared, peer, address)).collect();
    let mut failure = ConnectError::NoAddress { peer: peer.id };
    let straight = timeout(DETOUR_AFTER, first_answer(&mut attempts, &mut failure)).await;
    let answered = match straight {
        Ok(Some(answered)) => Some(answered),
        // All direct attempts failed, or none has succeeded yet.
        Ok(None) | Err(_) => {
            turn.is_at(Dial::Detour);
            let detours = shared.relay.paths_to(peer.id).into_iter();
            attempts.extend(detours.map(|path| open(shared, peer, path)));
            first_answer(&mut attempts, &mut failure).await
        }
    };
    drop(attempts);
    let (connection, address) = answered.ok_or(failure)?;
    if !relay::is_path(address) {
        turn.is_at(Dial::Greeting);
    }
    greet(shared, peer, connection, address).await
}

/// The first connection that succeeds. Of several failures, reports a final one if there is any,
/// else the first.
async fn first_answer(
    attempts: &mut FuturesUnordered<impl Future<Output = Result<Answer, ConnectError>>>,
    failure: &mut ConnectError,
) -> Option<Answer> {
    while let Some(attempt) = attempts.next().await {
        match attempt {
            Ok(answer) => return Some(answer),
            Err(error) => {
                let nothing = matches!(failure, ConnectError::NoAddress { .. });
                if nothing || error.is_final() {
                    *failure = error;
                }
            }
        }
    }
    None
}

/// Dials the own addresses of a peer that is reached through a relay. A direct connection replaces
/// the relayed one.
pub(super) async fn dial_direct(
    shared: &Shared,
    peer: &Peer,
    addresses: &[SocketAddr],
) -> Result<(), ConnectError> {
    let mut failure = ConnectError::NoAddress { peer: peer.id };
    let mut attempts: FuturesUnordered<_> =
        addresses.iter().map(|&address| open(shared, peer, address)).collect();
    let answered = first_answer(&mut attempts, &mut failure).await;
    let (connection, address) = answered.ok_or(failure)?;
    greet(shared, peer, connection, address).await.map(drop)
}

/// Sends packets to a peer's addresses while that peer dials this one, so that routers let the
/// peer's packets in. Connections that result at this end are dropped.
pub(super) async fn punch(shared: &Shared, peer: &Peer, addresses: &[SocketAddr]) {
    let attempts = join_all(addresses.iter().map(|&address| open(shared, peer, address)));
    // The results do not matter.
    drop(attempts.await);
}

async fn open(shared: &Shared, peer: &Peer, address: SocketAddr) -> Result<Answer, ConnectError> {
    let opened = timeout(limits::CONNECTION_TIMEOUT, shared.endpoints.connect(peer.id, address));
    let silent =
        |_| ConnectError::Unreachable { address, reason: ConnectionError::TimedOut.to_string() };
    Ok((opened.await.map_err(silent)??, address))
}

async fn greet(
    shared: &Shared,
    peer: &Peer,
    connection: Connection,
    address: SocketAddr,
) -> Result<Arc<Session>, ConnectError> {
    let guard = CloseUnlessKept(Some(connection.clone()));
    let gate = &shared.gate;
    let hello = shared.local.hello(peer.lost(), gate.pass(), gate.ticket_for(peer.id));
    let lost =
        |error: ConnectionError| ConnectError::Unreachable { address, reason: error.to_string() };
    let (mut send, mut recv) = connection.open_bi().await.map_err(lost)?;
    let (reply, sent, received) = handshake::greet(&hello, &mut send, &mut recv).await?;
    shared.counters.sent(Kind::Control, sent);
    shared.counters.received(Kind::Control, received);
    let (incarnation, run, greeting) = match reply {
        Reply::Welcome { incarnation, run, pass, certificate, clock, seen } => (
            incarnation,
            run,
            PeerGreeting { pass, certificate, clock: Some(clock), seen: Some(seen) },
        ),
        Reply::Refused(refusal) => return Err(refusal.into()),
    };
    if let Err(denied) = gate.admit(peer.id, &greeting.pass, UnixTime::now()) {
        gate.turned_away((&denied).into(), Some(peer.id), Some(address), denied.to_string());
        return Err(ConnectError::UnknownPeer { peer: peer.id, address, denied: denied.into() });
    }
    if let Some(certificate) = &greeting.certificate {
        gate.hold(certificate.clone());
    }
    let session = Arc::new(Session {
        connection,
        control: Arc::new(Mutex::new(Some((send, recv)))),
        member: Member { peer: peer.id, incarnation },
        address,
        run,
        greeting,
        number: hello.number,
        dialled: true,
        counted: Default::default(),
    });
    let kept = peer.adopt(session.clone())?;
    if Arc::ptr_eq(&kept, &session) {
        guard.keep();
    }
    Ok(kept)
}

/// A connection that is closed on drop unless it is kept.
struct CloseUnlessKept(Option<Connection>);

impl CloseUnlessKept {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseUnlessKept {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.close(CloseCode::Unused.into(), b"another connection is used");
        }
    }
}

/// Delays between dials: they grow, and differ between pairs of peers.
pub(super) struct Backoff {
    delay: Duration,
    spent: Duration,
    seed: blake3::Hasher,
}

/// The first delay between two dials.
const FIRST: Duration = Duration::from_millis(50);

/// The maximum delay between two dials.
const LONGEST: Duration = Duration::from_secs(2);

/// A peer counts as unreachable after delays of this sum.
const PATIENCE: Duration = Duration::from_secs(20);

impl Backoff {
    /// `seed` makes the delays of different pairs of peers differ.
    pub(super) fn new(seed: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(seed);
        Self { delay: FIRST, spent: Duration::ZERO, seed: hasher }
    }

    /// The next delay: between half and all of an exponentially growing one. `None` when it is time
    /// to give up.
    pub(super) fn next(&mut self) -> Option<Duration> {
        if self.spent >= PATIENCE {
            return None;
        }
        self.seed.update(b"next");
        let share = 0.5 + f64::from(self.seed.finalize().as_bytes()[0]) / 512.0;
        let delay = self.delay.mul_f64(share);
        self.delay = (self.delay * 2).min(LONGEST);
        self.spent += delay;
        Some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_limit_and_end() {
        let delays: Vec<Duration> = {
            let mut backoff = Backoff::new(b"pair");
            std::iter::from_fn(|| backoff.next()).collect()
        };
        assert!(delays[0] >= FIRST / 2 && delays[0] <= FIRST);
        assert!(delays.iter().all(|&delay| delay <= LONGEST));
        let last = delays[delays.len() - 1];
        assert!(last >= LONGEST / 2);
        let spent: Duration = delays.iter().sum();
        assert!(spent >= PATIENCE && spent - last < PATIENCE);
        let mut other = Backoff::new(b"other pair");
        assert_ne!(other.next(), Some(delays[0]));
    }
}
