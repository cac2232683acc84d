//! Accepts connections from peers that dial this one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::{Connection, Endpoint, Incoming, SendStream};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::Shared;
use super::error::Refusal;
use super::guests::NoPlace;
use super::handshake::{self, Hello, Reply, Unreadable};
use super::link::CloseCode;
use super::peer::{CROSSING, PeerGreeting, Session, Verdict};
use super::tls;
use super::traffic::Kind;
use crate::ids::{Member, PeerId};
use crate::limits;
use crate::net::admission::{Denied, Pass, Reason, Signed, UnixTime};
use crate::net::connection_limits::{ConnectionLimiter, ConnectionLimits};

/// Maximum number of simultaneous handshakes.
const HANDSHAKES: ConnectionLimits = ConnectionLimits { all: 128, network: 64 };

/// From this number of handshakes on, a dialler must prove its address by a QUIC retry before it
/// takes a place. The retry costs it one round trip, and stops senders with forged addresses.
const RETRY_FROM: usize = 32;

/// Time for a refused peer to read the reason.
const REFUSAL_LINGER: Duration = Duration::from_secs(2);

/// Accepts connections on one socket until the transport closes.
pub(super) async fn run(shared: Arc<Shared>, endpoint: Endpoint) {
    let connection_limits = Arc::new(Mutex::new(ConnectionLimiter::new(HANDSHAKES)));
    loop {
        let incoming = tokio::select! {
            () = shared.lifecycle.closed() => break,
            incoming = endpoint.accept() => incoming,
        };
        let Some(incoming) = incoming else { break };
        let address = incoming.remote_address();
        let mut limiter = connection_limits.lock().await;
        if limiter.len() >= RETRY_FROM && incoming.may_retry() {
            // Fails only if the dialler has already answered a retry.
            let _ = incoming.retry();
            continue;
        }
        let Ok(place) = limiter.enter(address.ip(), Instant::now()) else {
            incoming.refuse();
            let text = "the limit of simultaneous handshakes is reached".to_owned();
            shared.gate.turned_away(Reason::Flood, None, Some(address), text);
            continue;
        };
        drop(limiter);
        let (for_task, connection_limits) = (shared.clone(), connection_limits.clone());
        shared.lifecycle.spawn(async move {
            let handshake = handle(&for_task, incoming);
            let slow = tokio::select! {
                () = for_task.lifecycle.closed() => false,
                // A slower peer is dropped together with its connection.
                handled = timeout(limits::HANDSHAKE_TIMEOUT, handshake) => handled.is_err(),
                () = place.ended.cancelled() => true,
            };
            if slow {
                let text = "the handshake took too long".to_owned();
                for_task.gate.turned_away(Reason::Slow, None, Some(address), text);
            }
            connection_limits.lock().await.leave(place.number);
        });
    }
}

async fn handle(shared: &Arc<Shared>, incoming: Incoming) {
    let address = incoming.remote_address();
    let connection = match incoming.await {
        Ok(connection) => connection,
        Err(error) => {
            tracing::debug!(%address, %error, "a handshake failed");
            return;
        }
    };
    let Some(peer) = tls::peer_behind(connection.peer_identity()) else {
        // Unreachable: the TLS verifier accepts only peers.
        connection.close(CloseCode::Refused.into(), b"no identity");
        return;
    };
    let Ok((mut send, mut recv)) = connection.accept_bi().await else { return };
    let hello = match handshake::read_hello(&mut recv).await {
        Ok((hello, received)) => {
            shared.counters.received(Kind::Control, received);
            hello
        }
        Err(Unreadable::Version(theirs)) => {
            let refusal = Refusal::Version { ours: theirs, theirs: limits::PROTOCOL_VERSION };
            let reason = Reason::Version;
            shared.gate.turned_away(reason, Some(peer), Some(address), refusal.to_string());
            return refuse(shared, None, &connection, send).await;
        }
        Err(Unreadable::Malformed(reason)) => {
            let (counted, text) = (Reason::Malformed, reason.clone());
            shared.gate.turned_away(counted, Some(peer), Some(address), text);
            connection.close(CloseCode::Violation.into(), reason.as_bytes());
            return;
        }
        Err(Unreadable::Lost) => return,
    };
    let control = Arc::new(Mutex::new(None));
    // Held until the answer is written: only then may the link write.
    let mut slot = control.clone().lock_owned().await;
    let session = Arc::new(Session {
        connection: connection.clone(),
        control,
        member: Member { peer, incarnation: hello.incarnation },
        address,
        run: hello.run.clone(),
        greeting: PeerGreeting { pass: hello.pass.clone(), ..PeerGreeting::default() },
        number: hello.number,
        dialled: false,
        counted: Default::default(),
    });
    match settle(shared, &hello, &session).await {
        Ok(certificate) => {
            let welcome = shared.local.welcome(address, shared.gate.pass(), certificate);
            let sent = handshake::answer(Some(&welcome), &mut send).await;
            shared.counters.sent(Kind::Control, sent.unwrap_or_default());
            *slot = Some((send, recv));
        }
        Err(refusal) => {
            tracing::debug!(%peer, %address, %refusal, "refused a peer");
            if let Some(reason) = refusal.reason() {
                shared.gate.turned_away(reason, Some(peer), Some(address), refusal.to_string());
            }
            refuse(shared, Some(&Reply::Refused(refusal)), &connection, send).await;
        }
    }
}

/// Decides about a hello. If it is accepted, its connection becomes the current one.
async fn settle(
    shared: &Arc<Shared>,
    hello: &Hello,
    session: &Arc<Session>,
) -> Result<Option<Signed>, Refusal> {
    let id = session.member.peer;
    if id == shared.local.id() {
        return Err(Refusal::OwnIdentity);
    }
    if shared.lifecycle.is_closing() {
        return Err(Refusal::Closing);
    }
    if let (Some(theirs), Some(ours)) = (shared.local.run(), &hello.run)
        && theirs.id != ours.id
    {
        return Err(Refusal::OtherRun { ours: ours.id, theirs: theirs.id });
    }
    let certificate = admit(shared, hello, id).await?;
    let is_member = |peer| shared.relay.is_member(peer);
    if !is_member(id) {
        let entered = shared.guests.enter(id, &session.connection, Instant::now(), is_member);
        entered.map_err(|NoPlace| Refusal::Full)?;
    }
    let peer = shared.peer(id).ok_or(Refusal::Full)?;
    let mut state = peer.state.subscribe();
    let mut crossing_over = false;
    loop {
        match peer.decide(shared.local.id(), hello, session, crossing_over) {
            Verdict::Accepted => return Ok(certificate),
            Verdict::Refused(refusal) => return Err(refusal),
            Verdict::Wait => {
                let relayed = session.is_relayed();
                let decided =
                    state.wait_for(|state| !state.is_dialling(relayed) || state.open().is_some());
                crossing_over = timeout(CROSSING, decided).await.is_err();
            }
        }
    }
}

/// Checks the admission of a peer. The issuer gives it a certificate for its ticket, or in place of
/// an old one.
async fn admit(
    shared: &Arc<Shared>,
    hello: &Hello,
    peer: PeerId,
) -> Result<Option<Signed>, Refusal> {
    let (gate, now) = (&shared.gate, UnixTime::now());
    let Some(ticket) = hello.ticket.clone() else {
        gate.admit(peer, &hello.pass, now)?;
        return Ok(gate.renewal(peer, now));
    };
    let desk = gate.clone();
    // The use is on the disk before the certificate is issued.
    let redeemed = tokio::task::spawn_blocking(move || desk.claim(&ticket, peer, now)).await;
    let certificate = redeemed.unwrap_or(Err(Denied::NotRecorded))?;
    let pass = Pass {
        certificate: Some(certificate.clone()),
        access_list: hello.pass.access_list.clone(),
    };
    gate.admit(peer, &pass, now)?;
    Ok(Some(certificate))
}

/// Sends the refusal, and gives the peer time to read it.
async fn refuse(
    shared: &Shared,
    reply: Option<&Reply>,
    connection: &Connection,
    mut send: SendStream,
) {
    if let Some(sent) = handshake::answer(reply, &mut send).await {
        shared.counters.sent(Kind::Control, sent);
        // The peer closes the connection once it has read the answer.
        let _ = send.finish();
        let _ = timeout(REFUSAL_LINGER, connection.closed()).await;
    }
    connection.close(CloseCode::Refused.into(), b"refused");
}
