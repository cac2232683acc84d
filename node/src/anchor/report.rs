//! Takes the leader's records to Raft, and says what became of them and of the office.

use std::collections::VecDeque;
use std::sync::Arc;

use openraft::error::ClientWriteError;
use openraft::raft::ClientWriteResult;
use shoal_protocol::ids::Term;
use shoal_protocol::message::LogRecord;
use shoal_protocol::wire;
use tokio::sync::{mpsc, oneshot, watch};

use super::rpc::RECORD;
use super::types::{Outcome, Proposal, ServerMetrics, Types};
use super::{AnchorError, AnchorEvent, Inner, QUEUE};

type Written = oneshot::Receiver<ClientWriteResult<Types>>;

/// Tells an anchor's owner what happens.
pub(super) struct Reporter {
    inner: Arc<Inner>,
    events: mpsc::Sender<AnchorEvent>,
    proposals: mpsc::Receiver<Proposal>,
    /// The term that this anchor leads in.
    office: Option<Term>,
    /// The last that it was said to lead in.
    last_office: Term,
    /// Records on their way, in order.
    writes: VecDeque<(LogRecord, Written)>,
}

/// Nobody listens, or the anchor is over and that was said.
struct Over;

impl Reporter {
    pub(super) fn new(
        inner: Arc<Inner>,
        events: mpsc::Sender<AnchorEvent>,
        proposals: mpsc::Receiver<Proposal>,
    ) -> Self {
        let (office, last_office, writes) = (None, Term(0), VecDeque::new());
        Self { inner, events, proposals, office, last_office, writes }
    }

    /// Until the anchor is over.
    pub(super) async fn run(mut self) {
        let mut server = self.inner.raft.server_metrics();
        let mut opened = self.inner.machine.opened();
        while self.turn(&mut server, &mut opened).await.is_ok() {}
        // Without it the others elect another.
        self.inner.cancel.cancel();
    }

    async fn turn(
        &mut self,
        server: &mut watch::Receiver<ServerMetrics>,
        opened: &mut watch::Receiver<Term>,
    ) -> Result<(), Over> {
        let leads = self.inner.leads_in(&server.borrow_and_update());
        let opened_term = *opened.borrow_and_update();
        self.look(leads, opened_term).await?;
        tokio::select! {
            changed = server.changed() => match changed {
                Ok(()) => Ok(()),
                Err(_) => self.stopped().await,
            },
            // Its sender is part of `inner`.
            _ = opened.changed() => Ok(()),
            Some(proposal) = self.proposals.recv(), if self.writes.len() < QUEUE => {
                self.propose(proposal).await
            }
            outcome = first(&mut self.writes) => self.written(outcome).await,
        }
    }

    /// Says so when this anchor begins to lead or does no more.
    async fn look(&mut self, leads: Option<Term>, opened: Term) -> Result<(), Over> {
        if self.office.is_some() && self.office != leads {
            self.depose().await?;
        }
        // The opening entry of the term took effect, and so did all before it: what earlier leaders
        // wrote and is not in the history by now is in no log any more, or will be in none.
        if let Some(term) = leads
            && self.office.is_none()
            && opened == term
            && self.last_office < term
        {
            self.office = Some(term);
            self.last_office = term;
            let history = self.inner.machine.history();
            self.say(AnchorEvent::Leads { term, history }).await?;
        }
        Ok(())
    }

    async fn propose(&mut self, proposal: Proposal) -> Result<(), Over> {
        if self.office != Some(proposal.term) {
            // Its owner has not heard of the end of that office yet.
            return Ok(());
        }
        let record = proposal.record.clone();
        let size = wire::encode(&record).map_or(usize::MAX, |bytes| bytes.len());
        if size > RECORD {
            return self.fail(AnchorError::TooLarge).await;
        }
        match self.inner.raft.client_write_ff(proposal).await {
            Ok(written) => {
                self.writes.push_back((record, written));
                Ok(())
            }
            Err(_) => self.stopped().await,
        }
    }

    async fn written(
        &mut self,
        outcome: Result<ClientWriteResult<Types>, oneshot::error::RecvError>,
    ) -> Result<(), Over> {
        let Some((record, _)) = self.writes.pop_front() else { return Ok(()) };
        match outcome {
            Ok(Ok(response)) => match response.data {
                Outcome::Applied => self.say(AnchorEvent::Appended(record)).await,
                Outcome::Stale => self.depose().await,
                Outcome::Refused(reason) => self.fail(AnchorError::Refused { reason }).await,
            },
            Ok(Err(ClientWriteError::ForwardToLeader(_))) => self.depose().await,
            Ok(Err(error @ ClientWriteError::ChangeMembershipError(_))) => {
                let reason = error.to_string();
                self.fail(AnchorError::Stopped { reason }).await
            }
            Err(_) => self.stopped().await,
        }
    }

    async fn depose(&mut self) -> Result<(), Over> {
        self.writes.clear();
        match self.office.take() {
            Some(_) => self.say(AnchorEvent::Deposed).await,
            None => Ok(()),
        }
    }

    /// Raft came to its end, which is nobody's wish: closing ends this task before.
    async fn stopped(&mut self) -> Result<(), Over> {
        let error = self.inner.disk.failure().unwrap_or_else(|| {
            let state = self.inner.raft.metrics().borrow().running_state.clone();
            let reason = state.err().map_or_else(|| "it ended".into(), |fatal| fatal.to_string());
            AnchorError::Stopped { reason }
        });
        self.fail(error).await
    }

    async fn fail(&mut self, error: AnchorError) -> Result<(), Over> {
        self.say(AnchorEvent::Failed(error)).await?;
        Err(Over)
    }

    async fn say(&self, event: AnchorEvent) -> Result<(), Over> {
        self.events.send(event).await.map_err(|_| Over)
    }
}

/// What became of the first record on its way.
async fn first(
    writes: &mut VecDeque<(LogRecord, Written)>,
) -> Result<ClientWriteResult<Types>, oneshot::error::RecvError> {
    match writes.front_mut() {
        Some((_, written)) => written.await,
        None => std::future::pending().await,
    }
}
