//! Requests to other anchors over links that may lose messages.
//!
//! Each request has a deadline. Raft repeats the ones that it needs.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use openraft::error::{
    InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, SnapshotMismatch,
};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use openraft::{EmptyNode, SnapshotSegmentId};
use shoal_formats::anchor::encoding::{Item, Mark};
use shoal_formats::anchor::rpc::{self, Answer, BODY, Invalid, Request};
use shoal_formats::anchor::types::{AnchorId, Types};
use shoal_protocol::ids::PeerId;
use shoal_protocol::message::AnchorMessage;
use shoal_protocol::wire;
use tokio::sync::oneshot;

use super::Links;
use super::state_machine::StateMachine;

/// Requests in flight, of all kinds and to all anchors.
const WAITING: usize = 256;

struct Waiting {
    from: PeerId,
    answer: oneshot::Sender<Answer>,
}

/// Sends requests to other anchors.
pub(super) struct Calls {
    links: Arc<dyn Links>,
    machine: StateMachine,
    /// The deadline for an answer.
    patience: Duration,
    /// Starts at a random number, so that an answer to an earlier incarnation matches no request.
    next: AtomicU64,
    waiting: Mutex<BTreeMap<u64, Waiting>>,
    answered: Mutex<BTreeMap<PeerId, Instant>>,
}

/// Why a request has no valid answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// No answer arrived before the deadline.
    #[error("no answer from {0}")]
    Silent(PeerId),
    /// Too many requests are in flight.
    #[error("too many requests are in flight")]
    TooManyConnections,
    /// The request exceeds the size limit of a message.
    #[error("a request of {0} bytes is too large")]
    TooLarge(usize),
    /// The request could not be encoded.
    #[error(transparent)]
    Encoding(#[from] wire::WireError),
    /// The answer does not belong to this request, or its contents are invalid.
    #[error("{0} sent an invalid answer")]
    Wrong(PeerId),
}

impl From<CallError> for NetworkError {
    fn from(error: CallError) -> Self {
        Self::new(&error)
    }
}

/// Removes a request from the list when its wait ends.
struct Listed<'a>(&'a Calls, u64);

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.0.waiting().remove(&self.1);
    }
}

impl Calls {
    pub(super) fn new(links: Arc<dyn Links>, machine: StateMachine, patience: Duration) -> Self {
        Self {
            links,
            machine,
            patience,
            next: AtomicU64::new(RandomState::new().hash_one(0)),
            waiting: Mutex::default(),
            answered: Mutex::default(),
        }
    }

    /// Sends a request and waits for the answer.
    pub(super) async fn call(&self, to: PeerId, request: &Request) -> Result<Answer, CallError> {
        let body = wire::encode(request)?;
        if body.len() > BODY {
            return Err(CallError::TooLarge(body.len()));
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        {
            let mut waiting = self.waiting();
            if waiting.len() >= WAITING {
                return Err(CallError::TooManyConnections);
            }
            waiting.insert(number, Waiting { from: to, answer });
        }
        let _listed = Listed(self, number);
        let history = self.machine.number();
        self.links.send(to, AnchorMessage { number, answer: false, history, body });
        match tokio::time::timeout(self.patience, answered).await {
            Ok(Ok(answer)) => Ok(answer),
            _ => Err(CallError::Silent(to)),
        }
    }

    /// Delivers an answer that arrived.
    pub(super) fn answered(&self, from: PeerId, number: u64, body: &[u8]) {
        let answer = match wire::decode(body) {
            Ok(answer) => answer,
            Err(error) => {
                tracing::warn!(from = self.links.title(from), %error, "an anchor's answer is malformed");
                return;
            }
        };
        let mut waiting = self.waiting();
        // The request timed out, or went to another peer.
        if waiting.get(&number).is_none_or(|waiting| waiting.from != from) {
            return;
        }
        self.last_answers().insert(from, Instant::now());
        if let Some(waiting) = waiting.remove(&number) {
            // The caller may have timed out just before.
            drop(waiting.answer.send(answer));
        }
    }

    /// Whether a peer answered any request within this time.
    pub(super) fn answers(&self, peer: PeerId, within: Duration) -> bool {
        self.last_answers().get(&peer).is_some_and(|at| at.elapsed() <= within)
    }

    /// Discards the answer times of other peers than these.
    pub(super) fn retain(&self, keep: impl Fn(PeerId) -> bool) {
        self.last_answers().retain(|peer, _| keep(*peer));
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, Waiting>> {
        self.waiting.lock().expect("nothing panics while it holds the requests")
    }

    fn last_answers(&self) -> MutexGuard<'_, BTreeMap<PeerId, Instant>> {
        self.answered.lock().expect("nothing panics while it holds the answers' times")
    }
}

/// Creates clients of other anchors.
pub(super) struct Clients(pub(super) Arc<Calls>);

impl RaftNetworkFactory<Types> for Clients {
    type Network = Client;

    async fn new_client(&mut self, target: AnchorId, _: &EmptyNode) -> Client {
        Client { calls: Arc::clone(&self.0), to: target.0 }
    }
}

/// A client of one other anchor, for Raft.
pub(super) struct Client {
    calls: Arc<Calls>,
    to: PeerId,
}

type Refusal<E = openraft::error::Infallible> =
    RPCError<AnchorId, EmptyNode, RaftError<AnchorId, E>>;

impl Client {
    async fn ask(&self, request: Request) -> Result<Answer, NetworkError> {
        Ok(self.calls.call(self.to, &request).await?)
    }

    fn wrong(&self) -> NetworkError {
        CallError::Wrong(self.to).into()
    }

    fn valid<T>(&self, checked: Result<T, Invalid>) -> Result<T, NetworkError> {
        checked.map_err(|error| {
            tracing::warn!(from = self.calls.links.title(self.to), %error, "an anchor's answer is invalid");
            self.wrong()
        })
    }
}

impl RaftNetwork<Types> for Client {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<AnchorId>, Refusal> {
        let request = Request::Append {
            ballot: rpc.vote.into(),
            previous: rpc.prev_log_id.map(Mark::from),
            agreed: rpc.leader_commit.map(Mark::from),
            items: rpc.entries.iter().map(Item::from).collect(),
        };
        match self.ask(request).await? {
            Answer::Appended => Ok(AppendEntriesResponse::Success),
            Answer::Conflict if rpc.prev_log_id.is_some() => Ok(AppendEntriesResponse::Conflict),
            Answer::Higher(ballot) => {
                let vote = self.valid(rpc::higher_vote(rpc.vote, ballot))?;
                Ok(AppendEntriesResponse::HigherVote(vote))
            }
            _ => Err(self.wrong().into()),
        }
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<Types>,
        _: RPCOption,
    ) -> Result<InstallSnapshotResponse<AnchorId>, Refusal<InstallSnapshotError>> {
        let Some(last) = rpc.meta.last_log_id else {
            let error = io::Error::other("an empty snapshot is not sent");
            return Err(NetworkError::new(&error).into());
        };
        let request = Request::Snapshot {
            ballot: rpc.vote.into(),
            last: last.into(),
            offset: rpc.offset,
            bytes: rpc.data,
            done: rpc.done,
        };
        match self.ask(request).await? {
            Answer::Received => Ok(InstallSnapshotResponse { vote: rpc.vote }),
            Answer::Higher(ballot) => {
                let vote = self.valid(rpc::higher_vote(rpc.vote, ballot))?;
                Ok(InstallSnapshotResponse { vote })
            }
            Answer::FromStart if rpc.offset > 0 => {
                let segment =
                    |offset| SnapshotSegmentId { id: rpc.meta.snapshot_id.clone(), offset };
                let mismatch = SnapshotMismatch { expect: segment(0), got: segment(rpc.offset) };
                let refused = RaftError::APIError(InstallSnapshotError::from(mismatch));
                Err(RemoteError::new(AnchorId(self.to), refused).into())
            }
            _ => Err(self.wrong().into()),
        }
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<AnchorId>,
        _: RPCOption,
    ) -> Result<VoteResponse<AnchorId>, Refusal> {
        let last = rpc.last_log_id.map(Mark::from);
        match self.ask(Request::Vote { ballot: rpc.vote.into(), last }).await? {
            Answer::Vote { ballot, granted, last } => {
                Ok(self.valid(rpc::vote_response(ballot, granted, last))?)
            }
            _ => Err(self.wrong().into()),
        }
    }
}
