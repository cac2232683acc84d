//! The run's log, replicated between anchors by Raft. A record is committed when a majority of the
//! anchors hold it on disk; every later leader knows it.
//!
//! `openraft` implements the protocol. This module adds storage ([`store`], [`disk`], [`log`],
//! [`shoal_formats::anchor::journal`], [`state_machine`]), transport ([`calls`] sends requests, [`server`] answers them,
//! [`shoal_formats::anchor::rpc`] defines both), proofs of terms ([`vouching`]), timers ([`timers`], [`leader_contact`]), and the interface to the
//! anchor's owner ([`report`], [`voters`]). A single anchor is a plain file that is flushed after
//! every record.

mod calls;
mod disk;
mod kept;
mod leader_contact;
mod log;
mod report;
mod server;
mod state_machine;
mod store;
#[cfg(test)]
mod tests;
mod timers;
mod timing;
mod voters;
mod vouching;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use futures::future::BoxFuture;
use openraft::ServerState;
use shoal_protocol::history::History;
use shoal_protocol::ids::{PeerId, Step, Term};
use shoal_protocol::message::{AnchorGroup, AnchorMessage, LogRecord, TermProof};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub(crate) use kept::kept_history;
pub(crate) use timing::Timing;
pub(crate) use vouching::Voucher;

use calls::{Calls, Clients};
use disk::Disk;
use leader_contact::LeaderContact;
use log::Log;
use report::Reporter;
use server::RaftServer;
use shoal_formats::anchor::error::AnchorError;
use shoal_formats::anchor::rpc;
use shoal_formats::anchor::types::{AnchorId, Membership, Proposal, Raft, ServerMetrics};
use state_machine::StateMachine;
use store::Store;
use timers::Timers;

/// Records, and events, in a queue.
const QUEUE: usize = 64;

/// Queued requests of other anchors; each anchor has few in flight.
const REQUESTS: usize = 32;

/// Configuration of an anchor.
#[derive(Debug, Clone)]
pub(crate) struct AnchorConfig {
    /// The folder of its files.
    pub(crate) folder: PathBuf,
    /// Its peer.
    pub(crate) me: PeerId,
    /// The version of the weights that the run begins with.
    pub(crate) first: Step,
    /// Its timeouts.
    pub(crate) timing: Timing,
    /// Signs for the leaders that this anchor follows.
    pub(crate) voucher: Voucher,
    /// Anchors that the run's issuer removed. Where the others are no majority, this one keeps the log alone.
    pub(crate) removed: BTreeSet<PeerId>,
}

/// The transport to other anchors.
pub(crate) trait Links: Send + Sync + 'static {
    /// Sends a message without waiting. The message may be lost.
    fn send(&self, to: PeerId, message: AnchorMessage);

    /// A peer for people: its name, if it is known, and the end of its identifier.
    fn title(&self, peer: PeerId) -> String {
        peer.short()
    }
}

/// Events that an anchor reports to its owner.
#[derive(Debug)]
pub(crate) enum AnchorEvent {
    /// This anchor leads. A term has at most one leader, and terms only grow.
    Leads {
        /// The term that it leads in.
        term: Term,
        /// Everything committed before. An earlier leader can add nothing to it.
        history: Box<History>,
        /// The signatures of a majority of the anchors.
        proof: Box<TermProof>,
    },
    /// More anchors signed for the current term, or those of the group that follows.
    Confirmed(TermProof),
    /// A record given to [`Anchor::append`] in the current term is committed. Records commit in
    /// order.
    Appended(LogRecord),
    /// It leads no longer. Records that were not reported as appended may be committed or lost.
    Deposed,
    /// The leader, as far as this anchor knows.
    Leader {
        /// The leader, if there is one.
        peer: Option<PeerId>,
        /// Voters that answer, this one included. While there is a leader, not all are asked.
        answering: usize,
        /// Voters in all.
        voters: usize,
    },
    /// The anchor has ended.
    Failed(AnchorError),
}

/// What became of a message of another anchor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It is handled, or the sender repeats it.
    Taken,
    /// It is about an earlier history of the run.
    Dropped,
    /// It is about a later history of the run: the local log is worth nothing any more.
    NewerHistory,
}

/// State shared by all parts of an anchor.
struct Inner {
    me: AnchorId,
    timing: Timing,
    raft: Raft,
    links: Arc<dyn Links>,
    calls: Arc<Calls>,
    contact: Mutex<LeaderContact>,
    log: Log,
    machine: StateMachine,
    disk: Disk,
    voucher: Voucher,
    /// The newest leader that this anchor signs for, and its term as coordinator.
    followed: Mutex<Option<(Term, PeerId)>>,
    /// Cancels all tasks.
    cancel: CancellationToken,
}

impl Inner {
    fn contact(&self) -> MutexGuard<'_, LeaderContact> {
        self.contact.lock().expect("nothing panics while it holds the contact")
    }

    /// Reads the newest known membership, committed or not.
    fn membership<T>(&self, look: impl FnOnce(&Membership) -> T) -> T {
        look(self.raft.server_metrics().borrow().membership_config.membership())
    }

    fn is_voter(&self) -> bool {
        self.membership(|membership| membership.voter_ids().any(|id| id == self.me))
    }

    fn leads(&self) -> bool {
        self.leads_in(&self.raft.server_metrics().borrow()).is_some()
    }

    /// The term that this anchor leads in, if it leads.
    fn leads_in(&self, now: &ServerMetrics) -> Option<Term> {
        let vote = now.vote;
        let mine = vote.committed && vote.leader_id.voted_for == Some(self.me);
        (mine && now.state == ServerState::Leader).then_some(Term(vote.leader_id.term))
    }
}

/// One replica of the run's log.
pub(crate) struct Anchor {
    inner: Arc<Inner>,
    proposals: mpsc::Sender<Proposal>,
    requests: mpsc::Sender<(PeerId, AnchorMessage)>,
    wanted: watch::Sender<BTreeSet<PeerId>>,
    tracker: TaskTracker,
    /// Cancels the tasks when the anchor is dropped.
    _over: DropGuard,
}

impl Anchor {
    /// Opens an anchor's files and starts it.
    ///
    /// If the log is empty and `found` is set, the anchor starts the log as its only voter.
    /// Otherwise it waits until a leader adds it.
    ///
    /// # Errors
    /// If the files cannot be read, or belong to another anchor.
    pub(crate) async fn open(
        config: AnchorConfig,
        found: bool,
        links: Arc<dyn Links>,
    ) -> Result<(Self, mpsc::Receiver<AnchorEvent>), AnchorError> {
        let AnchorConfig { folder, me, first, timing, voucher, removed } = config;
        let me = AnchorId(me);
        let Store { log, machine, disk } = Store::open(&folder, me.0, first, &removed)?;
        let stopped = |error: &dyn std::error::Error| {
            disk.failure().unwrap_or_else(|| AnchorError::Stopped { reason: error.to_string() })
        };
        let calls = Arc::new(Calls::new(Arc::clone(&links), machine.clone(), timing.patience()));
        let clients = Clients(Arc::clone(&calls));
        let raft = Raft::new(me, timing.raft_config(), clients, log.clone(), machine.clone())
            .await
            .map_err(|error| stopped(&error))?;
        let begun = raft.is_initialized().await.map_err(|error| stopped(&error))?;
        if found && !begun {
            raft.initialize(BTreeSet::from([me])).await.map_err(|error| stopped(&error))?;
        }
        let contact = Mutex::new(LeaderContact::new(timing.election.clone()));
        let cancel = CancellationToken::new();
        // The vote that an earlier life gave.
        let voted = raft.with_raft_state(|state| *state.vote_ref()).await;
        let voted = voted.map_err(|error| stopped(&error))?.leader_id;
        let followed = Mutex::new(None);
        let inner = Arc::new(Inner {
            me,
            timing,
            raft,
            links,
            calls,
            contact,
            log,
            machine,
            disk,
            voucher,
            followed,
            cancel,
        });
        if let Some(AnchorId(leader)) = voted.voted_for {
            inner.follow(inner.term_of(voted.term), leader);
        }
        if begun && inner.membership(|membership| membership.voter_ids().eq([me])) {
            // As the only voter it wins at once.
            inner
                .raft
                .trigger()
                .elect()
                .await
                .map_err(|error| AnchorError::Stopped { reason: error.to_string() })?;
        }
        Ok(Self::start(inner))
    }

    fn start(inner: Arc<Inner>) -> (Self, mpsc::Receiver<AnchorEvent>) {
        let (events, happened) = mpsc::channel(QUEUE);
        let (proposals, proposed) = mpsc::channel(QUEUE);
        let (requests, asked) = mpsc::channel(REQUESTS);
        let wanted = watch::Sender::new(BTreeSet::new());
        let tracker = TaskTracker::new();
        let cancel = inner.cancel.clone();
        let until_over = |task| {
            let cancel = cancel.clone();
            tracker.spawn(async move { cancel.run_until_cancelled(task).await })
        };
        let (proofs, proved) = watch::channel(None);
        let reporter = Reporter::new(Arc::clone(&inner), events.clone(), proposed, proved);
        until_over(Box::pin(reporter.run()) as BoxFuture<_>);
        until_over(Box::pin(vouching::run(Arc::clone(&inner), proofs)));
        until_over(Box::pin(RaftServer::new(Arc::clone(&inner)).run(asked)));
        until_over(Box::pin(Timers::new(Arc::clone(&inner), events).run()));
        until_over(Box::pin(voters::run(Arc::clone(&inner), wanted.subscribe())));
        tracker.spawn({
            let inner = Arc::clone(&inner);
            async move {
                inner.cancel.cancelled().await;
                // The anchor ends either way; an error changes nothing.
                drop(inner.raft.shutdown().await);
                let disk = inner.disk.clone();
                if tokio::task::spawn_blocking(move || disk.stop()).await.is_err() {
                    tracing::error!("closing the anchor's files panicked");
                }
            }
        });
        tracker.close();
        let over = inner.cancel.clone().drop_guard();
        (Self { inner, proposals, requests, wanted, tracker, _over: over }, happened)
    }

    /// Appends a record to the log in the term that this anchor leads in. A record for an earlier
    /// term is dropped; [`AnchorEvent::Deposed`] reports that term's end.
    ///
    /// # Panics
    /// If the queue is full. A coordinator has far fewer records in flight.
    pub(crate) fn append(&self, term: Term, record: LogRecord) {
        match self.proposals.try_send(Proposal { term, record }) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                panic!("a coordinator has few records in flight");
            }
        }
    }

    /// Handles a message of another anchor. The caller accepts messages from anchors only. Messages of another
    /// history of the run are dropped; the log of an earlier one must not be continued.
    pub(crate) fn heard(&self, from: PeerId, message: AnchorMessage) -> Heard {
        if let (Some(theirs), Some(mine)) = (message.history, self.inner.machine.number())
            && theirs != mine
        {
            tracing::debug!(
                from = self.inner.links.title(from),
                theirs,
                mine,
                "dropped an anchor's message of another history"
            );
            return if theirs > mine { Heard::NewerHistory } else { Heard::Dropped };
        }
        if message.body.len() > rpc::BODY {
            tracing::warn!(
                from = self.inner.links.title(from),
                bytes = message.body.len(),
                "an anchor's message is too large"
            );
        } else if message.answer {
            self.inner.calls.answered(from, message.number, &message.body);
        } else if self.requests.try_send((from, message)).is_err() {
            tracing::debug!(
                from = self.inner.links.title(from),
                "dropped an anchor's request: the queue is full"
            );
        }
        Heard::Taken
    }

    /// Changes the log's voters to these, if this anchor leads. The change takes time and may fail,
    /// which is only logged: the caller repeats it while it needs it.
    pub(crate) fn set_voters(&self, voters: BTreeSet<PeerId>) {
        assert!(!voters.is_empty(), "a log has at least one voter");
        self.wanted.send_replace(voters);
    }

    /// The voters of the newest known membership.
    pub(crate) fn voters(&self) -> BTreeSet<PeerId> {
        self.inner.membership(|membership| membership.voter_ids().map(|id| id.0).collect())
    }

    /// The voters of the newest known membership, as a group that proves terms; `None` while the log is empty.
    pub(crate) fn group(&self) -> Option<AnchorGroup> {
        self.inner.group()
    }

    /// Signs from now on for a leader whose election was proved.
    pub(crate) fn follow(&self, term: Term, leader: PeerId) {
        self.inner.follow(term, leader);
    }

    /// The committed history.
    pub(crate) fn history(&self) -> History {
        self.inner.machine.history()
    }

    /// Ends the anchor, and waits until it has written its files.
    pub(crate) async fn close(self) {
        self.inner.cancel.cancel();
        self.tracker.wait().await;
    }
}
