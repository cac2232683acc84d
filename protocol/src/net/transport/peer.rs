//! The state of one peer, and the choice between several connections to it.
//!
//! Both ends may dial at the same time. Exactly one connection survives, by rules that both ends
//! apply:
//!
//! - While both dial, the dial of the smaller peer id is preferred. Its owner delays the other's
//!   hello until its own dial has ended, and the other end accepts at once and abandons its own
//!   dial. Exception: a direct connection is not delayed for a dial that is already trying relays,
//!   and a direct dial that is being greeted is not abandoned for a relayed connection.
//! - On an existing connection, another hello of the same incarnation is accepted only if it proves
//!   that the peer lost the connection: the peer had dialled the existing connection too, or
//!   reports its end. Otherwise it crossed with the local dial and is refused.
//! - A direct connection replaces a relayed one, whichever end dialled it.
//! - A hello of a later incarnation replaces any connection; one of an earlier incarnation is
//!   refused.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quinn::{Connection, RecvStream, SendStream};
use tokio::sync::watch;

use super::congestion;
use super::error::{ConnectError, Refusal};
use super::event::{Run, Welcome};
use super::handshake::Hello;
use super::rate::RateMeter;
use super::relay;
use super::send_queue::SendQueue;
use super::traffic::{Counters, Packets, PathStats};
use crate::ids::{Incarnation, Member, PeerId};
use crate::net::admission::{Pass, Signed, UnixTime};

/// Maximum addresses stored per peer; the latest come first.
const ADDRESSES: usize = 16;

/// Maximum delay of a hello while the preferred local dial of the same peer is pending.
pub(super) const CROSSING: Duration = Duration::from_secs(2);

/// Data from the other end's hello or welcome, besides its incarnation and run.
#[derive(Debug, Clone, Default)]
pub(super) struct PeerGreeting {
    pub(super) pass: Pass,
    pub(super) certificate: Option<Signed>,
    pub(super) clock: Option<UnixTime>,
    pub(super) seen: Option<SocketAddr>,
}

/// Round trips within a machine take less than this.
const WITHIN_MACHINE: Duration = Duration::from_millis(1);

/// One established connection.
pub(super) struct Session {
    pub(super) connection: Connection,
    /// The control stream, until the link takes it. The task that answers the hello holds the lock
    /// until the answer is written.
    pub(super) control: Arc<tokio::sync::Mutex<Option<(SendStream, RecvStream)>>>,
    pub(super) member: Member,
    pub(super) address: SocketAddr,
    pub(super) run: Option<Run>,
    /// The credentials and observations of the other end.
    pub(super) greeting: PeerGreeting,
    /// The dialler's number of the connection.
    pub(super) number: u64,
    /// Whether this end dialled.
    pub(super) dialled: bool,
    /// The packets that the transport's counters already include.
    pub(super) counted: Mutex<Packets>,
}

impl Session {
    pub(super) fn welcome(&self) -> Welcome {
        let PeerGreeting { pass, certificate, clock, seen } = self.greeting.clone();
        Welcome {
            incarnation: self.member.incarnation,
            address: self.address,
            run: self.run.clone(),
            pass,
            certificate,
            clock,
            seen,
        }
    }

    /// Whether the connection goes through another peer.
    pub(super) fn is_relayed(&self) -> bool {
        relay::is_path(self.address)
    }

    /// Whether the other end is a process of this machine: its address is local, and nothing delays
    /// or slows the path.
    fn is_local(&self) -> bool {
        let remote = self.connection.remote_address().ip().to_canonical();
        let local = self.connection.local_ip().map(|address| address.to_canonical());
        let same_host = remote.is_loopback() || local == Some(remote);
        let round_trip = congestion::shortest_round_trip(&self.connection);
        !self.is_relayed() && same_host && round_trip.is_none_or(|time| time < WITHIN_MACHINE)
    }

    /// The measured path; adds the connection's new packets to the transport's counters.
    pub(super) fn path(&self, counters: &Counters) -> PathStats {
        // Read under the lock, so that a later reading is never counted before this one.
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let path = PathStats::of(&self.connection, self.is_relayed());
        counters.packets(path.packets, *counted);
        *counted = path.packets;
        path
    }

    pub(super) fn is_open(&self) -> bool {
        self.connection.close_reason().is_none()
    }
}

/// The decision about a hello.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its connection is used from now on.
    Accepted,
    /// The local dial of that peer is preferred; decide again when the dial ends.
    Wait,
    /// No.
    Refused(Refusal),
}

/// The progress of the local dial of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Dial {
    /// There is none.
    #[default]
    None,
    /// The peer's own addresses are being tried.
    Straight,
    /// Relayed paths are being tried as well.
    Detour,
    /// The peer has answered at its own address, and is being greeted.
    Greeting,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) addresses: Vec<SocketAddr>,
    newest: Option<Incarnation>,
    pub(super) dial: Dial,
    pub(super) current: Option<Arc<Session>>,
    /// The number of the last connection dialled by the peer that has ended here.
    lost: Option<u64>,
    /// Whether the link task has ended.
    has_link_ended: bool,
    /// Whether the table of peers has forgotten it: no connection is made any more.
    is_retired: bool,
}

impl State {
    /// The current connection, if it has not ended.
    pub(super) fn open(&self) -> Option<&Arc<Session>> {
        self.current.as_ref().filter(|session| session.is_open())
    }

    /// Whether the local dial competes with a connection from the peer; `relayed` tells whether
    /// that connection is relayed.
    pub(super) fn is_dialling(&self, relayed: bool) -> bool {
        match self.dial {
            Dial::None => false,
            Dial::Straight | Dial::Greeting => true,
            Dial::Detour => relayed,
        }
    }

    /// Whether the current connection makes the local dial unnecessary.
    pub(super) fn is_settled(&self) -> bool {
        self.open().is_some_and(|open| !open.is_relayed() || self.dial != Dial::Greeting)
    }
}

/// One other peer.
pub(super) struct Peer {
    pub(super) id: PeerId,
    pub(super) send_queue: SendQueue,
    pub(super) state: watch::Sender<State>,
    rate: Mutex<RateMeter>,
    file_rate: Mutex<RateMeter>,
}

impl Peer {
    pub(super) fn new(id: PeerId) -> Self {
        Self {
            id,
            send_queue: SendQueue::new(),
            state: watch::Sender::default(),
            rate: Mutex::default(),
            file_rate: Mutex::default(),
        }
    }

    /// The throughput of tensors to the peer.
    pub(super) fn rate(&self) -> MutexGuard<'_, RateMeter> {
        // A poisoned lock is usable: its holders only update counters.
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The throughput of the network link, given the measured one; `None` within a machine, where
    /// the measurement reflects the load of the processors.
    pub(super) fn link_rate(&self, measured: Option<f64>) -> Option<f64> {
        measured.filter(|_| !self.session().is_some_and(|session| session.is_local()))
    }

    /// The throughput of file pieces to the peer. Tensors may leave it little capacity.
    pub(super) fn file_rate(&self) -> MutexGuard<'_, RateMeter> {
        self.file_rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds addresses of the peer.
    pub(super) fn remember(&self, addresses: &[SocketAddr]) {
        let lasting = |address: &&SocketAddr| !relay::is_path(**address);
        let addresses: Vec<SocketAddr> = addresses.iter().filter(lasting).copied().collect();
        self.state.send_if_modified(|state| {
            let new = addresses.iter().take(ADDRESSES).any(|a| !state.addresses.contains(a));
            if new {
                state.addresses.retain(|known| !addresses.contains(known));
                state.addresses.splice(0..0, addresses.iter().copied());
                state.addresses.truncate(ADDRESSES);
            }
            new
        });
    }

    /// Retires the peer if nothing is connected, dialled or queued: its link ends. Returns whether it did.
    pub(super) fn retire_if_idle(&self) -> bool {
        let queued = !self.send_queue.is_empty();
        let mut retired = false;
        self.state.send_if_modified(|state| {
            retired = !queued && state.current.is_none() && state.dial == Dial::None;
            state.is_retired |= retired;
            retired
        });
        retired
    }

    /// Whether it was retired.
    pub(super) fn is_retired(&self) -> bool {
        self.state.borrow().is_retired
    }

    /// The current connection, if it has not ended.
    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.state.borrow().open().cloned()
    }

    /// The connection that the link serves, ended or not: data received before its end is still
    /// processed.
    pub(super) fn current(&self) -> Option<Arc<Session>> {
        self.state.borrow().current.clone()
    }

    pub(super) fn lost(&self) -> Option<u64> {
        self.state.borrow().lost
    }

    /// Decides about a hello that came with `session`, by the rules above. If `crossing_over`, it
    /// no longer waits for the local dial.
    pub(super) fn decide(
        &self,
        own: PeerId,
        hello: &Hello,
        session: &Arc<Session>,
        crossing_over: bool,
    ) -> Verdict {
        let mut verdict = Verdict::Accepted;
        self.state.send_if_modified(|state| {
            if state.is_retired {
                verdict = Verdict::Refused(Refusal::Full);
                return false;
            }
            let better = |current: &&Arc<Session>| !current.is_relayed() || session.is_relayed();
            let current = state.open().filter(better);
            let current = current.map(|current| (current.dialled, current.number));
            verdict = judge(
                &Situation {
                    ours_preferred: own < self.id,
                    newest: state.newest,
                    dialling: state.is_dialling(session.is_relayed()) && !crossing_over,
                    current,
                },
                hello,
            );
            if verdict == Verdict::Accepted {
                state.newest = Some(hello.incarnation);
                state.current = Some(session.clone());
            }
            verdict == Verdict::Accepted
        });
        verdict
    }

    /// Ends the local dial with a connection, and returns the connection to use.
    pub(super) fn adopt(&self, session: Arc<Session>) -> Result<Arc<Session>, ConnectError> {
        let mut result = Ok(session.clone());
        self.state.send_if_modified(|state| {
            if state.is_retired {
                result = Err(ConnectError::TooManyPeers);
                return false;
            }
            let found = session.member.incarnation;
            if let Some(newest) = state.newest.filter(|newest| found < *newest) {
                result = Err(ConnectError::OldIncarnation { found, newest });
                return false;
            }
            let known_life = state.newest == Some(found);
            let worse = |current: &Arc<Session>| current.is_relayed() && !session.is_relayed();
            if let Some(current) = state.open().filter(|open| known_life && !worse(open)) {
                result = Ok(current.clone());
                return false;
            }
            state.newest = Some(found);
            state.current = Some(session.clone());
            true
        });
        result
    }

    /// The link has finished serving `session`.
    pub(super) fn ended(&self, session: &Arc<Session>) {
        self.state.send_modify(|state| {
            if !session.dialled {
                state.lost = Some(session.number);
            }
            if is_current(state, session) {
                state.current = None;
            }
        });
    }

    /// The link has ended.
    pub(super) fn link_ended(&self) {
        self.state.send_modify(|state| state.has_link_ended = true);
    }

    /// Waits until the link has ended.
    pub(super) async fn wait_for_link_end(&self) {
        // The sender lives in `self`.
        let _ = self.state.subscribe().wait_for(|state| state.has_link_ended).await;
    }

    /// Waits until another connection takes the place of `session`.
    pub(super) async fn replaced(&self, session: &Arc<Session>) {
        let mut state = self.state.subscribe();
        // The sender lives in `self`.
        let _ = state.wait_for(|state| !is_current(state, session)).await;
    }
}

fn is_current(state: &State, session: &Arc<Session>) -> bool {
    state.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, session))
}

struct Situation {
    ours_preferred: bool,
    newest: Option<Incarnation>,
    dialling: bool,
    /// Whether this end dialled the connection, and the connection's number.
    current: Option<(bool, u64)>,
}

fn judge(situation: &Situation, hello: &Hello) -> Verdict {
    if let Some(newest) = situation.newest {
        if hello.incarnation < newest {
            return Verdict::Refused(Refusal::Displaced { newest });
        }
        if hello.incarnation > newest {
            return Verdict::Accepted;
        }
    }
    match situation.current {
        Some((dialled, number)) if dialled && hello.lost != Some(number) => {
            Verdict::Refused(Refusal::AlreadyConnected)
        }
        Some(_) => Verdict::Accepted,
        None if situation.dialling && situation.ours_preferred => Verdict::Wait,
        None => Verdict::Accepted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(incarnation: u64, lost: Option<u64>) -> Hello {
        let (pass, ticket) = (Pass::default(), None);
        Hello { incarnation: Incarnation(incarnation), run: None, number: 7, lost, pass, ticket }
    }

    fn situation(dialling: bool, current: Option<(bool, u64)>) -> Situation {
        Situation { ours_preferred: true, newest: Some(Incarnation(5)), dialling, current }
    }

    #[test]
    fn a_later_incarnation_replaces_an_earlier_one() {
        let displaced = Verdict::Refused(Refusal::Displaced { newest: Incarnation(5) });
        assert_eq!(judge(&situation(false, None), &hello(4, None)), displaced);
        for current in [None, Some((true, 1)), Some((false, 1))] {
            assert_eq!(judge(&situation(true, current), &hello(6, None)), Verdict::Accepted);
        }
    }

    #[test]
    fn of_two_crossing_dials_the_one_of_the_smaller_id_is_kept() {
        let ours = situation(true, None);
        assert_eq!(judge(&ours, &hello(5, None)), Verdict::Wait);
        let theirs = Situation { ours_preferred: false, ..ours };
        assert_eq!(judge(&theirs, &hello(5, None)), Verdict::Accepted);
        let established = situation(false, Some((true, 1)));
        let refused = Verdict::Refused(Refusal::AlreadyConnected);
        assert_eq!(judge(&established, &hello(5, None)), refused);
        assert_eq!(judge(&established, &hello(5, Some(0))), refused);
    }

    #[test]
    fn a_peer_that_lost_its_connection_gets_another() {
        assert_eq!(
            judge(&situation(false, Some((true, 1))), &hello(5, Some(1))),
            Verdict::Accepted
        );
        assert_eq!(judge(&situation(false, Some((false, 1))), &hello(5, None)), Verdict::Accepted);
    }

    #[test]
    fn the_number_of_addresses_is_limited_and_the_latest_come_first() {
        let peer = Peer::new(PeerId([0; 32]));
        let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let many: Vec<SocketAddr> = (0..100).map(address).collect();
        peer.remember(&many);
        peer.remember(&[address(3), address(200)]);
        let known = peer.state.borrow().addresses.clone();
        assert_eq!(known[..3], [address(3), address(200), address(0)]);
        assert_eq!(known.len(), ADDRESSES);
    }
}
