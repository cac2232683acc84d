//! Passes the leader's records to Raft, and reports commits and changes of leadership.

use std::collections::VecDeque;
use std::sync::Arc;

use openraft::error::ClientWriteError;
use openraft::raft::ClientWriteResult;
use shoal_formats::anchor::rpc::RECORD;
use shoal_formats::anchor::types::{Outcome, Proposal, ServerMetrics, Types};
use shoal_protocol::ids::Term;
use shoal_protocol::message::{LogRecord, TermProof};
use shoal_protocol::wire;
use tokio::sync::{mpsc, oneshot, watch};

use super::{AnchorError, AnchorEvent, Inner, QUEUE};

type Written = oneshot::Receiver<ClientWriteResult<Types>>;

/// Reports an anchor's events to its owner.
pub(super) struct Reporter {
    inner: Arc<Inner>,
    events: mpsc::Sender<AnchorEvent>,
    proposals: mpsc::Receiver<Proposal>,
    /// The term that this anchor leads in.
    term: Option<Term>,
    /// The last term that was reported as led.
    last_term: Term,
    /// The newest proof of the term, and whether it was reported.
    proved: watch::Receiver<Option<TermProof>>,
    /// Records in flight, in order.
    writes: VecDeque<(LogRecord, Written)>,
}

/// The receiver is gone, or the anchor's end was reported.
struct Ended;

impl Reporter {
    pub(super) fn new(
        inner: Arc<Inner>,
        events: mpsc::Sender<AnchorEvent>,
        proposals: mpsc::Receiver<Proposal>,
        proved: watch::Receiver<Option<TermProof>>,
    ) -> Self {
        let (term, last_term, writes) = (None, Term(0), VecDeque::new());
        Self { inner, events, proposals, term, last_term, proved, writes }
    }

    /// Runs until the anchor ends.
    pub(super) async fn run(mut self) {
        let mut server = self.inner.raft.server_metrics();
        let mut opened = self.inner.machine.opened();
        while self.turn(&mut server, &mut opened).await.is_ok() {}
        // The other anchors elect another leader.
        self.inner.cancel.cancel();
    }

    async fn turn(
        &mut self,
        server: &mut watch::Receiver<ServerMetrics>,
        opened: &mut watch::Receiver<Term>,
    ) -> Result<(), Ended> {
        let leads = self.inner.leads_in(&server.borrow_and_update());
        let opened_term = *opened.borrow_and_update();
        self.check_leadership(leads, opened_term).await?;
        tokio::select! {
            changed = server.changed() => match changed {
                Ok(()) => Ok(()),
                Err(_) => self.stopped().await,
            },
            Ok(()) = self.proved.changed() => self.confirm().await,
            // Its sender is part of `inner`.
            _ = opened.changed() => Ok(()),
            Some(proposal) = self.proposals.recv(), if self.writes.len() < QUEUE => {
                self.propose(proposal).await
            }
            outcome = first(&mut self.writes) => self.written(outcome).await,
        }
    }

    /// Reports when this anchor begins or ceases to lead.
    async fn check_leadership(&mut self, leads: Option<Term>, opened: Term) -> Result<(), Ended> {
        if self.term.is_some() && self.term != leads {
            self.depose().await?;
        }
        // The term's first entry was applied, and so was everything before it. Records of earlier
        // leaders that are not in the history by then never commit.
        if let Some(term) = leads
            && self.term.is_none()
            && opened == term
            && self.last_term < term
            && let Some(proof) = self.proof_of(term)
        {
            self.term = Some(term);
            self.last_term = term;
            let (history, proof) = (self.inner.machine.history(), Box::new(proof));
            self.report(AnchorEvent::Leads { term, history: Box::new(history), proof }).await?;
        }
        Ok(())
    }

    /// The newest proof that this anchor leads in a term.
    fn proof_of(&mut self, term: Term) -> Option<TermProof> {
        let wanted = self.inner.term_of(term.0);
        self.proved.borrow_and_update().clone().filter(|proof| proof.vote.term == wanted)
    }

    /// More anchors signed for the term, if it was reported. Otherwise the next turn reports it.
    async fn confirm(&mut self) -> Result<(), Ended> {
        let Some(term) = self.term else { return Ok(()) };
        match self.proof_of(term) {
            Some(proof) => self.report(AnchorEvent::Confirmed(proof)).await,
            None => Ok(()),
        }
    }

    async fn propose(&mut self, proposal: Proposal) -> Result<(), Ended> {
        if self.term != Some(proposal.term) {
            // The owner has not yet received the end of that term.
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
    ) -> Result<(), Ended> {
        let Some((record, _)) = self.writes.pop_front() else { return Ok(()) };
        match outcome {
            Ok(Ok(response)) => match response.data {
                Outcome::Applied => self.report(AnchorEvent::Appended(record)).await,
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

    async fn depose(&mut self) -> Result<(), Ended> {
        self.writes.clear();
        match self.term.take() {
            Some(_) => self.report(AnchorEvent::Deposed).await,
            None => Ok(()),
        }
    }

    /// Raft ended. The owner did not request it: closing ends this task first.
    async fn stopped(&mut self) -> Result<(), Ended> {
        let error = self.inner.disk.failure().unwrap_or_else(|| {
            let state = self.inner.raft.metrics().borrow().running_state.clone();
            let reason = state.err().map_or_else(|| "it ended".into(), |fatal| fatal.to_string());
            AnchorError::Stopped { reason }
        });
        self.fail(error).await
    }

    async fn fail(&mut self, error: AnchorError) -> Result<(), Ended> {
        self.report(AnchorEvent::Failed(error)).await?;
        Err(Ended)
    }

    async fn report(&self, event: AnchorEvent) -> Result<(), Ended> {
        self.events.send(event).await.map_err(|_| Ended)
    }
}

/// The outcome of the first record in flight.
async fn first(
    writes: &mut VecDeque<(LogRecord, Written)>,
) -> Result<ClientWriteResult<Types>, oneshot::error::RecvError> {
    match writes.front_mut() {
        Some((_, written)) => written.await,
        None => std::future::pending().await,
    }
}
