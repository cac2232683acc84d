//! Keeps the run's log with other anchors, by Raft: what one of them is told to append is agreed on
//! when more than half hold it on their disks, and whoever leads next knows it.
//!
//! `openraft` decides; here are the disk ([`store`], [`disk`], [`log`], [`journal`], [`machine`]), the links
//! ([`calls`] asks, [`server`] answers, [`talk`] is the language), the clock ([`timers`], [`contact`]),
//! and what the anchor's owner sees of it ([`report`], [`voters`]). One anchor alone is a plain file
//! that is flushed with every record.

mod calls;
#[cfg(any(test, fuzzing))]
pub(crate) mod decoders;
mod disk;
mod encoding;
mod error;
mod frame;
mod journal;
mod leader_contact;
mod log;
mod report;
mod rpc;
mod server;
mod state_machine;
mod store;
#[cfg(test)]
mod tests;
mod timers;
mod timing;
mod types;
mod voters;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use futures::future::BoxFuture;
use openraft::ServerState;
use shoal_protocol::history::History;
use shoal_protocol::ids::{PeerId, Term};
use shoal_protocol::message::{AnchorMessage, LogRecord};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

pub(crate) use error::AnchorError;
pub(crate) use timing::Timing;

use calls::{Calls, Lines};
use disk::Disk;
use leader_contact::LeaderContact;
use log::Log;
use report::Reporter;
use server::RaftServer;
use state_machine::StateMachine;
use store::Store;
use timers::Timers;
use types::{AnchorId, Membership, Proposal, Raft, ServerMetrics};

/// Records, and events, that wait at once.
const QUEUE: usize = 64;

/// Requests of other anchors that wait for their turn; each of them has few on its way.
const REQUESTS: usize = 32;

/// What an anchor is.
#[derive(Debug, Clone)]
pub(crate) struct AnchorConfig {
    /// Where its files are.
    pub(crate) folder: PathBuf,
    /// Who it is.
    pub(crate) me: PeerId,
    /// How fast it is.
    pub(crate) timing: Timing,
}

/// The way to other anchors.
pub(crate) trait Links: Send + Sync + 'static {
    /// Sends a message, or loses it. Does not wait.
    fn send(&self, to: PeerId, message: AnchorMessage);
}

/// What an anchor tells its owner.
#[derive(Debug)]
pub(crate) enum AnchorEvent {
    /// This anchor leads. No two ever lead in one term, and terms only grow.
    Leads {
        /// The term of office.
        term: Term,
        /// Everything agreed on before. Who led before can add nothing to it any more.
        history: History,
    },
    /// A record given to [`Anchor::append`] in the present term is agreed on, in the order given.
    Appended(LogRecord),
    /// It leads no more: records not yet said to be appended may be so or not.
    Deposed,
    /// Who leads, as far as this anchor knows.
    Leader {
        /// Who, if anybody.
        peer: Option<PeerId>,
        /// How many voters answer, this one included; not all are asked while there is a leader.
        answering: usize,
        /// How many voters there are.
        voters: usize,
    },
    /// The anchor is over.
    Failed(AnchorError),
}

/// What all parts of an anchor use.
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
    /// Ends all tasks.
    cancel: CancellationToken,
}

impl Inner {
    fn contact(&self) -> MutexGuard<'_, LeaderContact> {
        self.contact.lock().expect("nothing panics while it holds the contact")
    }

    /// Looks at the newest membership known, agreed on or not.
    fn membership<T>(&self, look: impl FnOnce(&Membership) -> T) -> T {
        look(self.raft.server_metrics().borrow().membership_config.membership())
    }

    fn is_voter(&self) -> bool {
        self.membership(|membership| membership.voter_ids().any(|id| id == self.me))
    }

    fn leads(&self) -> bool {
        self.leads_in(&self.raft.server_metrics().borrow()).is_some()
    }

    /// The term that this anchor was elected in.
    fn leads_in(&self, now: &ServerMetrics) -> Option<Term> {
        let vote = now.vote;
        let mine = vote.committed && vote.leader_id.voted_for == Some(self.me);
        (mine && now.state == ServerState::Leader).then_some(Term(vote.leader_id.term))
    }
}

/// One anchor's part in keeping the run's log.
pub(crate) struct Anchor {
    inner: Arc<Inner>,
    proposals: mpsc::Sender<Proposal>,
    requests: mpsc::Sender<(PeerId, AnchorMessage)>,
    wanted: watch::Sender<BTreeSet<PeerId>>,
    tracker: TaskTracker,
    /// Whose anchor is dropped has no use for its tasks.
    _over: DropGuard,
}

impl Anchor {
    /// Opens an anchor's files and takes part.
    ///
    /// Where the log has not begun, `found` begins it with this anchor as its only voter; otherwise
    /// it waits until a leader adds it.
    ///
    /// # Errors
    /// When the files cannot be used.
    pub(crate) async fn open(
        config: AnchorConfig,
        found: bool,
        links: Arc<dyn Links>,
    ) -> Result<(Self, mpsc::Receiver<AnchorEvent>), AnchorError> {
        let AnchorConfig { folder, me, timing } = config;
        let me = AnchorId(me);
        let Store { log, machine, disk } = Store::open(&folder, me.0)?;
        let stopped = |error: &dyn std::error::Error| {
            disk.failure().unwrap_or_else(|| AnchorError::Stopped { reason: error.to_string() })
        };
        let calls = Arc::new(Calls::new(Arc::clone(&links), timing.patience()));
        let lines = Lines(Arc::clone(&calls));
        let raft = Raft::new(me, timing.raft_config(), lines, log.clone(), machine.clone())
            .await
            .map_err(|error| stopped(&error))?;
        let begun = raft.is_initialized().await.map_err(|error| stopped(&error))?;
        if found && !begun {
            raft.initialize(BTreeSet::from([me])).await.map_err(|error| stopped(&error))?;
        }
        let contact = Mutex::new(LeaderContact::new(timing.election.clone()));
        let cancel = CancellationToken::new();
        let inner =
            Arc::new(Inner { me, timing, raft, links, calls, contact, log, machine, disk, cancel });
        if begun && inner.membership(|membership| membership.voter_ids().eq([me])) {
            // There is nobody else to wait for.
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
        let reporter = Reporter::new(Arc::clone(&inner), events.clone(), proposed);
        until_over(Box::pin(reporter.run()) as BoxFuture<_>);
        until_over(Box::pin(RaftServer::new(Arc::clone(&inner)).run(asked)));
        until_over(Box::pin(Timers::new(Arc::clone(&inner), events).run()));
        until_over(Box::pin(voters::run(Arc::clone(&inner), wanted.subscribe())));
        tracker.spawn({
            let inner = Arc::clone(&inner);
            async move {
                inner.cancel.cancelled().await;
                // Whatever became of it: nothing can be done about it any more.
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

    /// Adds a record to the log, in the term that this anchor leads in. One that is meant for a term
    /// that is over is dropped: [`AnchorEvent::Deposed`] is on its way, or was said.
    ///
    /// # Panics
    /// When far more records wait than a coordinator has on their way.
    pub(crate) fn append(&self, term: Term, record: LogRecord) {
        match self.proposals.try_send(Proposal { term, record }) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                panic!("the coordinator waits for its records");
            }
        }
    }

    /// Takes in what another anchor sent. The caller lets nobody through who is no anchor.
    pub(crate) fn heard(&self, from: PeerId, message: AnchorMessage) {
        if message.body.len() > rpc::BODY {
            tracing::warn!(%from, bytes = message.body.len(), "an anchor's message is too large");
        } else if message.answer {
            self.inner.calls.answered(from, message.number, &message.body);
        } else if self.requests.try_send((from, message)).is_err() {
            tracing::debug!(%from, "an anchor's request finds no room");
        }
    }

    /// Makes these the log's voters, if this anchor leads. That takes a while and may fail, which is
    /// only logged: whoever wants it still wants it again.
    pub(crate) fn set_voters(&self, voters: BTreeSet<PeerId>) {
        assert!(!voters.is_empty(), "somebody keeps the log");
        self.wanted.send_replace(voters);
    }

    /// The voters of the newest membership known.
    pub(crate) fn voters(&self) -> BTreeSet<PeerId> {
        self.inner.membership(|membership| membership.voter_ids().map(|id| id.0).collect())
    }

    /// What is known to be agreed on.
    pub(crate) fn history(&self) -> History {
        self.inner.machine.history()
    }

    /// Ends it, and all its writing.
    pub(crate) async fn close(self) {
        self.inner.cancel.cancel();
        self.tracker.wait().await;
    }
}
