//! Answers the requests of other anchors, one after the other.

use std::io::Cursor;
use std::sync::Arc;

use openraft::Snapshot;
use openraft::raft::AppendEntriesResponse;
use shoal_formats::anchor::encoding::{Image, Mark, SNAPSHOT, place};
use shoal_formats::anchor::rpc::{self, Answer, Invalid, Request};
use shoal_formats::anchor::types::{SnapshotMeta, Vote};
use shoal_protocol::ids::PeerId;
use shoal_protocol::message::AnchorMessage;
use shoal_protocol::wire;
use tokio::sync::mpsc;

use super::Inner;

/// A snapshot that has arrived in part.
struct Arriving {
    from: PeerId,
    last: Mark,
    bytes: Vec<u8>,
}

/// Answers the requests of other anchors.
pub(super) struct RaftServer {
    inner: Arc<Inner>,
    arriving: Option<Arriving>,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("it claims a term that has another leader")]
    Rival,
    #[error("the anchor is closing")]
    Closing,
}

impl RaftServer {
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        Self { inner, arriving: None }
    }

    /// Runs until the queue of requests is closed.
    pub(super) async fn run(mut self, mut requests: mpsc::Receiver<(PeerId, AnchorMessage)>) {
        while let Some((from, AnchorMessage { number, body, .. })) = requests.recv().await {
            let request = match wire::decode(&body) {
                Ok(request) => request,
                Err(error) => {
                    tracing::warn!(from = self.inner.links.title(from), %error, "an anchor's request is malformed");
                    continue;
                }
            };
            match self.answer(from, request).await {
                Ok(answer) => {
                    let body = wire::encode(&answer).expect("answers are small");
                    let history = self.inner.machine.number();
                    let message = AnchorMessage { number, answer: true, history, body };
                    self.inner.links.send(from, message);
                }
                Err(NoAnswer::Closing) => return,
                Err(error) => {
                    tracing::warn!(from = self.inner.links.title(from), %error, "rejected an anchor's request");
                }
            }
        }
    }

    async fn answer(&mut self, from: PeerId, request: Request) -> Result<Answer, NoAnswer> {
        match request {
            Request::Append { ballot, previous, agreed, items } => {
                let vote = rpc::own_vote(from, ballot, true)?;
                let append = rpc::append_request(vote, previous, agreed, items)?;
                self.vote_beside(vote).await?;
                let done = self.inner.raft.append_entries(append).await;
                match done.map_err(|_| NoAnswer::Closing)? {
                    AppendEntriesResponse::HigherVote(vote) => Ok(Answer::Higher(vote.into())),
                    AppendEntriesResponse::Conflict => {
                        self.inner.contact().followed(from);
                        Ok(Answer::Conflict)
                    }
                    _ => {
                        self.inner.contact().followed(from);
                        Ok(Answer::Appended)
                    }
                }
            }
            Request::Vote { ballot, last } => {
                let vote = rpc::own_vote(from, ballot, false)?;
                let asked = rpc::vote_request(vote, last)?;
                let reply = self.inner.raft.vote(asked).await.map_err(|_| NoAnswer::Closing)?;
                if reply.vote_granted {
                    self.inner.follow(self.inner.term_of(vote.leader_id.term), from);
                    self.inner.contact().wait();
                }
                let last = reply.last_log_id.map(Mark::from);
                Ok(Answer::Vote { ballot: reply.vote.into(), granted: reply.vote_granted, last })
            }
            Request::Snapshot { ballot, last, offset, bytes, done } => {
                let vote = rpc::own_vote(from, ballot, true)?;
                let mine = self.vote_beside(vote).await?;
                if mine > vote {
                    return Ok(Answer::Higher(mine.into()));
                }
                self.inner.contact().followed(from);
                match self.collect(from, last, offset, &bytes, done)? {
                    Collected::Part => Ok(Answer::Received),
                    Collected::Gap => Ok(Answer::FromStart),
                    Collected::Whole(bytes) => self.install(vote, last, bytes).await,
                }
            }
            Request::Vouch { vote } => Ok(Answer::Vouched(self.inner.sign(from, &vote))),
            Request::WouldVote { last } => {
                let last = place(last).map_err(Invalid::from)?;
                let leads = self.inner.leads();
                let behind = last < self.inner.raft.data_metrics().borrow().last_log;
                let patience = self.inner.timing.election.start;
                let obeys = self.inner.contact().leader(patience).is_some();
                Ok(Answer::WouldVote(!leads && !obeys && !behind))
            }
        }
    }

    /// This anchor's own vote. Raft must not see two leaders of one term.
    async fn vote_beside(&self, vote: Vote) -> Result<Vote, NoAnswer> {
        let mine = self.inner.raft.with_raft_state(|state| *state.vote_ref()).await;
        let mine = mine.map_err(|_| NoAnswer::Closing)?;
        let rivals = mine.committed
            && mine.leader_id.term == vote.leader_id.term
            && mine.leader_id.voted_for != vote.leader_id.voted_for;
        if rivals { Err(NoAnswer::Rival) } else { Ok(mine) }
    }

    fn collect(
        &mut self,
        from: PeerId,
        last: Mark,
        offset: u64,
        bytes: &[u8],
        done: bool,
    ) -> Result<Collected, Invalid> {
        if offset == 0 {
            self.arriving = Some(Arriving { from, last, bytes: Vec::new() });
        }
        let arriving = self.arriving.as_mut().filter(|now| (now.from, now.last) == (from, last));
        // A repeated piece replaces the bytes from its offset on.
        let Some(arriving) = arriving.filter(|now| offset <= now.bytes.len() as u64) else {
            return Ok(Collected::Gap);
        };
        arriving.bytes.truncate(offset as usize);
        if arriving.bytes.len() + bytes.len() > SNAPSHOT {
            self.arriving = None;
            return Err(Invalid::TooLarge);
        }
        arriving.bytes.extend_from_slice(bytes);
        if !done {
            return Ok(Collected::Part);
        }
        Ok(self.arriving.take().map_or(Collected::Gap, |whole| Collected::Whole(whole.bytes)))
    }

    async fn install(&self, vote: Vote, last: Mark, bytes: Vec<u8>) -> Result<Answer, NoAnswer> {
        let image = Image::decode(&bytes).map_err(Invalid::from)?;
        if image.last.map(Mark::from) != Some(last) {
            return Err(Invalid::Order.into());
        }
        let meta = SnapshotMeta {
            last_log_id: image.last,
            last_membership: image.anchors,
            snapshot_id: image.last.map(|last| last.to_string()).unwrap_or_default(),
        };
        let snapshot = Snapshot { meta, snapshot: Box::new(Cursor::new(bytes)) };
        let reply = self.inner.raft.install_full_snapshot(vote, snapshot).await;
        let reply = reply.map_err(|_| NoAnswer::Closing)?;
        if reply.vote > vote { Ok(Answer::Higher(reply.vote.into())) } else { Ok(Answer::Received) }
    }
}

enum Collected {
    /// More pieces are to come.
    Part,
    /// An earlier piece is missing.
    Gap,
    /// The whole snapshot.
    Whole(Vec<u8>),
}
