//! The link task of one peer. It connects when there is something to send, serves one connection
//! after the other, and sends events to the owner.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use quinn::{ConnectionError, RecvStream, SendStream, VarInt};
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, timeout, timeout_at};

use super::class::Class;
use super::dial::{self, Backoff};
use super::error::{ConnectError, DisconnectReason};
use super::event::{TensorMessage, TransportEvent};
use super::file_server::Service;
use super::peer::{Peer, Session};
use super::reassembly::{ReadFailure, Reassembly};
use super::request::Kind as RequestKind;
use super::send_queue::{MessageNumber, TensorJob};
use super::sending::{self, LANES};
use super::traffic::Kind;
use super::{Shared, control, endpoint, tensor};
use crate::limits;

/// Time limit for the other end to receive the queued messages on close.
const FLUSH: Duration = Duration::from_secs(5);

/// Interval between searches for a direct path while the connection is relayed.
const SEEK_EVERY: Duration = Duration::from_secs(60);

/// Duration of one turn, in which one end dials and the other sends packets to open its router.
/// Long enough for two retransmissions of a lost packet, which QUIC sends after one and two more
/// seconds.
const TURN: Duration = Duration::from_secs(4);

/// Looks at the incomplete messages of a connection before those that were silent throughout are given up.
const LOOKS: u32 = 4;

/// Silence after which packets are sent, whatever there is to say. A keep-alive would have been answered by then.
const SILENT: Duration =
    limits::CONNECTION_TIMEOUT.saturating_mul(2).checked_div(5).expect("a part of it");

/// These packets in the time after which a silent connection is broken.
const NUDGES: u32 = 20;

/// The reason of a close, as sent to the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseCode {
    /// The sender leaves.
    Done = 0,
    /// The hello was refused.
    Refused = 1,
    /// Another connection to the same peer is in use.
    Unused = 2,
    /// The other end broke the protocol.
    Violation = 3,
    /// The other end receives too slowly.
    Stuck = 4,
    /// The other end was silent for too long.
    Silent = 5,
}

impl From<CloseCode> for VarInt {
    fn from(code: CloseCode) -> Self {
        Self::from_u32(code as u32)
    }
}

/// Serves `peer` until the transport closes.
pub(super) async fn run(shared: Arc<Shared>, peer: Arc<Peer>) {
    while let Some(session) = next_session(&shared, &peer).await {
        let member = session.member;
        let connected = TransportEvent::Connected {
            member,
            address: (!session.is_relayed()).then_some(session.address),
            run: session.run.as_ref().map(|run| run.id),
        };
        if emit(&shared, connected).await.is_break() {
            close(&session, &DisconnectReason::Closing);
            break;
        }
        let reason = serve(&shared, &peer, &session).await;
        if reason == DisconnectReason::QueueFull {
            peer.send_queue.clear();
        } else {
            peer.send_queue.requeue_in_flight();
        }
        peer.ended(&session);
        tracing::debug!(%member, %reason, "disconnected");
        if emit(&shared, TransportEvent::Disconnected { member, reason }).await.is_break() {
            break;
        }
    }
    peer.send_queue.clear();
    peer.link_ended();
}

/// Sends an event to the owner; breaks if the owner has dropped the receiver.
async fn emit(shared: &Shared, event: TransportEvent) -> ControlFlow<()> {
    tokio::select! {
        biased;
        sent = shared.events.send(event) => match sent {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        },
        () = shared.lifecycle.closed() => ControlFlow::Break(()),
    }
}

/// The next connection to serve; `None` when the transport closes.
async fn next_session(shared: &Shared, peer: &Peer) -> Option<Arc<Session>> {
    let pair = [shared.local.id().0, peer.id.0].concat();
    let mut backoff = Backoff::new(&pair);
    let mut state = peer.state.subscribe();
    loop {
        if let Some(session) = peer.current() {
            return Some(session);
        }
        if peer.is_retired() {
            return None;
        }
        state.mark_unchanged();
        tokio::select! {
            () = shared.lifecycle.closing() => return None,
            _ = state.changed() => continue,
            () = peer.send_queue.filled() => {}
        }
        let addresses = peer.state.borrow().addresses.clone();
        let error = match dial::reach(shared, peer, &addresses).await {
            Ok(_) => continue,
            Err(error) => error,
        };
        let delay = if error.is_final() { None } else { backoff.next() };
        let Some(delay) = delay else {
            backoff = Backoff::new(&pair);
            give_up(shared, peer, error).await;
            continue;
        };
        tracing::debug!(peer = %peer.id, %error, ?delay, "cannot connect");
        tokio::select! {
            () = shared.lifecycle.closing() => return None,
            () = tokio::time::sleep(delay) => {}
            // A new address, or a connection from the peer.
            _ = state.wait_for(|state| state.open().is_some() || state.addresses != addresses) => {}
        }
    }
}

async fn give_up(shared: &Shared, peer: &Peer, error: ConnectError) {
    if error == ConnectError::Closing {
        return;
    }
    peer.send_queue.clear();
    tracing::info!(peer = %peer.id, %error, "unreachable");
    // If the receiver is dropped, the link ends at its next event.
    let _ = emit(shared, TransportEvent::Unreachable { peer: peer.id, error }).await;
}

/// State shared by the tasks of one connection.
#[derive(Clone)]
struct Context {
    shared: Arc<Shared>,
    peer: Arc<Peer>,
    session: Arc<Session>,
}

/// Serves one connection until it ends, and returns the reason.
async fn serve(shared: &Arc<Shared>, peer: &Arc<Peer>, session: &Arc<Session>) -> DisconnectReason {
    let Some((send, recv)) = session.control.lock().await.take() else {
        return DisconnectReason::Lost("the answer to the hello could not be sent".to_owned());
    };
    let context = Context { shared: shared.clone(), peer: peer.clone(), session: session.clone() };
    if shared.relay.is_member(peer.id) {
        endpoint::entitle(&session.connection);
    }
    peer.send_queue.connected();
    peer.rate().connection_lost();
    peer.file_rate().connection_lost();
    let mut writers = JoinSet::new();
    writers.spawn(write_control(context.clone(), send));
    writers.spawn(write_tensors(context.clone()));
    writers.spawn(watch_silence(context.clone()));
    if !session.is_relayed() {
        shared.relay.connected(peer.id, session.connection.clone());
        writers.spawn(relay_datagrams(context.clone()));
    } else {
        writers.spawn(seek_direct(context.clone()));
    }
    let mut readers = JoinSet::new();
    readers.spawn(read_control(context.clone(), recv));
    readers.spawn(read_tensors(context.clone()));
    readers.spawn(serve_requests(context.clone()));

    let reason = tokio::select! {
        // Closing comes first: the writers then end by themselves.
        biased;
        () = shared.lifecycle.closing() => {
            // Messages that are not received within the limit are lost.
            let _ = timeout(FLUSH, flush(peer, &mut writers)).await;
            DisconnectReason::Closing
        }
        Some(ended) = writers.join_next() => ended.unwrap_or_else(failed),
        Some(ended) = readers.join_next() => ended.unwrap_or_else(failed),
        () = peer.replaced(session) => DisconnectReason::Replaced,
        () = peer.send_queue.stuck() => DisconnectReason::QueueFull,
    };
    shared.relay.disconnected(peer.id, &session.connection);
    close(session, &reason);
    writers.shutdown().await;
    let left_by_peer = matches!(
        reason,
        DisconnectReason::Left | DisconnectReason::Lost(_) | DisconnectReason::ClosedByPeer(_)
    );
    if left_by_peer {
        // Data that arrived before the end is still processed.
        tokio::select! {
            () = async { while readers.join_next().await.is_some() {} } => {}
            () = shared.lifecycle.closed() => {}
        }
    }
    readers.shutdown().await;
    session.path(&shared.counters);
    reason
}

/// Waits until the peer has received everything: only then do tensors leave the queue, and only
/// then does the control writer end.
async fn flush(peer: &Peer, writers: &mut JoinSet<DisconnectReason>) {
    peer.send_queue.emptied().await;
    writers.join_next().await;
}

/// A panic in a task ends its connection and nothing else.
fn failed(error: JoinError) -> DisconnectReason {
    tracing::error!(%error, "a task of a connection failed");
    DisconnectReason::Lost(format!("internal error: {error}"))
}

fn close(session: &Session, reason: &DisconnectReason) {
    let code = match reason {
        DisconnectReason::Violation(_) => CloseCode::Violation,
        DisconnectReason::QueueFull => CloseCode::Stuck,
        DisconnectReason::Replaced => CloseCode::Unused,
        DisconnectReason::Lost(_) => CloseCode::Silent,
        DisconnectReason::Closing | DisconnectReason::Left | DisconnectReason::ClosedByPeer(_) => {
            CloseCode::Done
        }
    };
    let text = match reason {
        DisconnectReason::Violation(violation) => violation.to_string(),
        other => other.to_string(),
    };
    session.connection.close(code.into(), text.as_bytes());
}

/// Maps the end of a connection to its reason.
fn reason_of(error: &ConnectionError) -> DisconnectReason {
    let ConnectionError::ApplicationClosed(close) = error else {
        return DisconnectReason::Lost(error.to_string());
    };
    match close.error_code {
        code if code == CloseCode::Done.into() => DisconnectReason::Left,
        code if code == CloseCode::Unused.into() => DisconnectReason::Replaced,
        // The other end's text, escaped for the log.
        _ => DisconnectReason::ClosedByPeer(
            String::from_utf8_lossy(&close.reason).escape_debug().take(200).collect(),
        ),
    }
}

impl Context {
    /// Waits for the end of the connection, which explains the failure of a stream.
    async fn end(&self) -> DisconnectReason {
        reason_of(&self.session.connection.closed().await)
    }
}

async fn write_control(context: Context, mut stream: SendStream) -> DisconnectReason {
    Class::Control.prioritize(&stream, 0);
    let Context { shared, peer, .. } = &context;
    loop {
        let batch = tokio::select! {
            // Queued messages are sent before the close.
            biased;
            batch = peer.send_queue.control() => batch,
            () = shared.lifecycle.closing() => break,
        };
        let mut chunks = Vec::with_capacity(2 * batch.len());
        for message in batch {
            chunks.push(Bytes::copy_from_slice(&control::prefix(&message)));
            chunks.push(message);
        }
        let total = chunks.len();
        let mut rest = &mut chunks[..];
        let mut whole_messages = 0;
        while !rest.is_empty() {
            let Ok(written) = stream.write_chunks(rest).await else {
                return context.end().await;
            };
            shared.counters.sent(Kind::Control, written.bytes);
            // Written chunks become empty; the chunks of empty messages are empty from the start.
            let whole = rest.iter().take_while(|chunk| chunk.is_empty()).count();
            rest = &mut rest[whole..];
            let messages = (total - rest.len()) / 2;
            peer.send_queue.control_written(messages - whole_messages);
            whole_messages = messages;
        }
    }
    // Neither fails on a working stream; on a broken one, the connection is gone.
    let _ = stream.finish();
    let _ = stream.stopped().await;
    DisconnectReason::Closing
}

/// Receives datagrams to relay to other peers, and datagrams relayed by others.
async fn relay_datagrams(context: Context) -> DisconnectReason {
    loop {
        match context.session.connection.read_datagram().await {
            Ok(datagram) => {
                let Context { shared, peer, .. } = &context;
                shared.relay.datagram(peer.id, &datagram, &shared.counters);
            }
            // The readers report the reason once they have read everything that came before.
            Err(_) => std::future::pending::<()>().await,
        }
    }
}

/// Ends a connection that is silent, and sends packets over it before, so that lost ones do not look like a death.
///
/// QUIC repeats a lost packet at intervals that double: where a third of all packets are lost, the few of five seconds
/// may all be. So these packets do not wait for others (empty datagrams, whose arrival is acknowledged), and more time
/// passes where the connection has lost many.
async fn watch_silence(context: Context) -> DisconnectReason {
    let connection = &context.session.connection;
    let mut received = (connection.stats().udp_rx.datagrams, Instant::now());
    let mut looks = tokio::time::interval(limits::CONNECTION_TIMEOUT / NUDGES);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let stats = connection.stats();
        let silent = received.1.elapsed();
        if stats.udp_rx.datagrams != received.0 {
            received = (stats.udp_rx.datagrams, Instant::now());
        } else if silent > longest_silence(stats.path.lost_packets, stats.path.sent_packets) {
            return DisconnectReason::Lost(ConnectionError::TimedOut.to_string());
        } else if silent > SILENT {
            // Without room for it others are on their way.
            let _ = connection.send_datagram(Bytes::new());
        }
    }
}

/// The silence that ends a connection of which so many packets are lost. Each tenth that is lost adds as much as there
/// is without losses.
fn longest_silence(lost: u64, sent: u64) -> Duration {
    let share = if sent == 0 { 0.0 } else { lost as f64 / sent as f64 };
    let longest = limits::CONNECTION_TIMEOUT.mul_f64(1.0 + 10.0 * share);
    longest.min(limits::LOSSY_CONNECTION_TIMEOUT)
}

/// Repeatedly tries to replace a relayed connection by a direct one. The two ends take turns: one
/// dials while the other sends packets to the dialler, because some routers accept packets only
/// from addresses that packets were sent to. The roles alternate because the router of one end may
/// not work this way.
async fn seek_direct(context: Context) -> DisconnectReason {
    let Context { shared, peer, session } = &context;
    let mut state = peer.state.subscribe();
    loop {
        let addresses = state.borrow_and_update().addresses.clone();
        for dials in [session.dialled, !session.dialled] {
            // Both ends keep the length of each turn, whatever its result. A success ends the
            // link's service of this connection, and with it this task.
            let end = tokio::time::Instant::now() + TURN;
            let attempt = async {
                if !dials {
                    dial::punch(shared, peer, &addresses).await;
                } else if let Err(error) = dial::dial_direct(shared, peer, &addresses).await {
                    tracing::debug!(peer = %peer.id, %error, "no direct path yet");
                }
                std::future::pending::<()>().await;
            };
            let _ = timeout_at(end, attempt).await;
        }
        let moved = state.wait_for(|state| state.addresses != addresses);
        let _ = timeout(SEEK_EVERY, moved).await;
    }
}

async fn write_tensors(context: Context) -> DisconnectReason {
    let lanes = Semaphore::new(LANES);
    let mut under_way = FuturesUnordered::new();
    loop {
        tokio::select! {
            // The queue yields as many messages at once as have streams.
            (number, job) = context.peer.send_queue.tensor() => {
                under_way.push(write_tensor(&context, &lanes, number, job));
            }
            Some(written) = under_way.next() => if let ControlFlow::Break(()) = written {
                return context.end().await;
            }
        }
    }
}

/// Breaks if the connection is lost.
async fn write_tensor(
    context: &Context,
    lanes: &Semaphore,
    number: MessageNumber,
    job: TensorJob,
) -> ControlFlow<()> {
    let connection = &context.session.connection;
    let _training = context.shared.upload_limit.begin_tensor();
    context.peer.rate().began(Instant::now());
    let arrived = match sending::send(connection, lanes, number, &job).await {
        Ok(bytes) => {
            context.shared.counters.sent(Kind::Tensor, bytes);
            bytes
        }
        Err(error) if tensor::is_lost(&error) => return ControlFlow::Break(()),
        // The peer stopped the stream.
        Err(_) => 0,
    };
    context.peer.rate().ended(Instant::now(), arrived, connection.rtt());
    let class = job.class;
    drop(job);
    context.peer.send_queue.tensor_done(number, class);
    ControlFlow::Continue(())
}

async fn read_control(context: Context, mut stream: RecvStream) -> DisconnectReason {
    let member = context.session.member;
    loop {
        let bytes = match control::read(&mut stream).await {
            Ok(bytes) => bytes,
            Err(control::ReadFailure::Violation(violation)) => return violation.into(),
            // The peer leaves, and closes the connection once all its data is read.
            Err(control::ReadFailure::End | control::ReadFailure::Lost) => {
                return context.end().await;
            }
        };
        context.shared.counters.received(Kind::Control, control::PREFIX + bytes.len());
        if context.shared.events.send(TransportEvent::Control { member, bytes }).await.is_err() {
            return DisconnectReason::Closing;
        }
    }
}

async fn read_tensors(context: Context) -> DisconnectReason {
    let reassembly = Arc::new(Reassembly::new());
    let mut streams = JoinSet::new();
    let mut looks = tokio::time::interval(limits::TENSOR_SILENCE / LOOKS);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // Finished streams first, so that they do not accumulate.
            biased;
            Some(read) = streams.join_next() => if let Ok(ControlFlow::Break(reason)) = read {
                return reason;
            },
            stream = context.session.connection.accept_uni() => match stream {
                Ok(stream) => {
                    streams.spawn(read_tensor(context.clone(), stream, reassembly.clone()));
                }
                Err(error) => {
                    while let Some(read) = streams.join_next().await {
                        if let Ok(ControlFlow::Break(reason)) = read {
                            return reason;
                        }
                    }
                    return reason_of(&error);
                }
            },
            _ = looks.tick() => {
                let member = context.shared.relay.is_member(context.peer.id);
                if let Some(silent) = reassembly.look(LOOKS, member) {
                    return silent.into();
                }
            }
        }
    }
}

/// Breaks if the sender broke the protocol or the owner has dropped the receiver.
async fn read_tensor(
    context: Context,
    mut stream: RecvStream,
    reassembly: Arc<Reassembly>,
) -> ControlFlow<DisconnectReason> {
    let Context { shared, peer, .. } = &context;
    let guests = (!shared.relay.is_member(peer.id)).then(|| shared.guests.room());
    let largest = shared.local.largest_message();
    let received = match reassembly.read(&mut stream, largest.0, guests).await {
        Ok(Some(received)) => received,
        Err(ReadFailure::Violation(violation)) => return ControlFlow::Break(violation.into()),
        // Further parts of the message are in flight, or were lost with the connection.
        Ok(None) | Err(ReadFailure::Lost) => return ControlFlow::Continue(()),
    };
    context.shared.counters.received(Kind::Tensor, received.bytes);
    let message = TensorMessage {
        member: context.session.member,
        tag: received.tag,
        frames: received.frames,
        _room: received.room,
    };
    match context.shared.events.send(TransportEvent::Tensor(message)).await {
        Ok(()) => ControlFlow::Continue(()),
        Err(_) => ControlFlow::Break(DisconnectReason::Closing),
    }
}

async fn serve_requests(context: Context) -> DisconnectReason {
    // The connection's limit of streams bounds the number of simultaneous requests.
    let mut requests = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(_) = requests.join_next() => {}
            stream = context.session.connection.accept_bi() => match stream {
                Ok((send, recv)) => {
                    requests.spawn(serve_request(context.clone(), send, recv));
                }
                Err(error) => return reason_of(&error),
            },
        }
    }
}

async fn serve_request(context: Context, send: SendStream, mut recv: RecvStream) {
    let Context { shared, peer, session } = &context;
    match RequestKind::read(&mut recv).await {
        Some(RequestKind::File) => {
            let Shared { files, counters, upload_limit, .. } = &**shared;
            let connection = &session.connection;
            let service = Service { files, counters, upload_limit, peer, connection };
            service.serve(send, recv).await;
        }
        Some(RequestKind::Probe) => {
            shared.reachability.answer(&shared.counters, session, send, recv).await;
        }
        // Unknown requests get no answer.
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_loses_packets_may_be_silent_for_longer() {
        assert_eq!(longest_silence(0, 0), limits::CONNECTION_TIMEOUT);
        assert_eq!(longest_silence(0, 1000), limits::CONNECTION_TIMEOUT);
        assert_eq!(longest_silence(100, 1000), 2 * limits::CONNECTION_TIMEOUT);
        assert_eq!(longest_silence(900, 1000), limits::LOSSY_CONNECTION_TIMEOUT);
    }
}
