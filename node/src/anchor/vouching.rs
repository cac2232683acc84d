//! The anchors' signatures for the term of their leader.
//!
//! An anchor signs for the leader that it voted for, and for one whose election its owner saw proved. The leader
//! collects the signatures, again after each change of the voters, so that every peer can check who stands behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use shoal_formats::anchor::rpc::{Answer, Request};
use shoal_protocol::ids::{PeerId, RunId, Term};
use shoal_protocol::message::{AnchorGroup, Founding, Signature, Signatures, TermProof, TermVote};
use tokio::sync::watch;

use super::Inner;

/// How long after the last answer the anchors that did not sign are asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// Signs for this anchor, and checks the signatures of others.
#[derive(Debug, Clone)]
pub(crate) struct Voucher {
    /// The run that the anchors keep the log of.
    pub(crate) run: RunId,
    /// The key of this peer.
    pub(crate) keys: Arc<dyn Signatures>,
    /// The number of the history that this anchor founds, if its log is empty.
    pub(crate) founding: Option<u16>,
}

impl Inner {
    /// The voters of the newest known membership, and its place in the log.
    pub(super) fn group(&self) -> Option<AnchorGroup> {
        let metrics = self.raft.server_metrics();
        let now = metrics.borrow();
        let number = now.membership_config.log_id().as_ref()?.index;
        let groups = now.membership_config.membership().get_joint_config();
        let voters = groups.iter().map(|group| group.iter().map(|id| id.0).collect()).collect();
        Some(AnchorGroup { history: self.history_number(), number, voters })
    }

    /// The number of the history that the log has, or will have.
    fn history_number(&self) -> u16 {
        self.machine.number().or(self.voucher.founding).unwrap_or_default()
    }

    /// The coordinator's term that follows from an election.
    pub(super) fn term_of(&self, election: u64) -> Term {
        Founding::term_of(self.history_number(), election)
    }

    /// Notes a leader to sign for, in place of that of an earlier term.
    pub(super) fn follow(&self, term: Term, leader: PeerId) {
        let mut followed = self.followed.lock().expect("nothing panics while it holds the leader");
        if followed.is_none_or(|(known, _)| known < term) {
            *followed = Some((term, leader));
        }
    }

    /// Signs a leader's vote, if this anchor follows that leader and has the same voters in its log.
    pub(super) fn sign(&self, from: PeerId, vote: &TermVote) -> Option<Signature> {
        let followed = *self.followed.lock().expect("nothing panics while it holds the leader");
        let is_leader = vote.coordinator == from && followed == Some((vote.term, from));
        let same = is_leader && self.group().as_ref() == Some(&vote.group);
        same.then(|| self.voucher.keys.sign(&vote.signed_bytes(self.voucher.run)))
    }

    /// What this anchor, if it leads, wants signed.
    fn own_vote(&self) -> Option<TermVote> {
        let election = self.leads_in(&self.raft.server_metrics().borrow())?.0;
        Some(TermVote {
            term: self.term_of(election),
            coordinator: self.me.0,
            group: self.group()?,
        })
    }

    /// Asks other voters for their signatures. Publishes the proof once a majority signed, and again when all that
    /// answer did.
    async fn collect(&self, proof: &mut TermProof, proofs: &watch::Sender<Option<TermProof>>) {
        let bytes = proof.vote.signed_bytes(self.voucher.run);
        let publish = |proof: &TermProof, ends: bool| {
            let signed = |peer| proof.signatures.contains_key(&peer);
            let known =
                proofs.borrow().as_ref().map(|known| (known.vote.clone(), known.signatures.len()));
            let is_new = match known.filter(|(vote, _)| *vote == proof.vote) {
                Some((_, signatures)) => ends && signatures < proof.signatures.len(),
                None => true,
            };
            if is_new && proof.vote.group.is_majority(signed) {
                proofs.send_replace(Some(proof.clone()));
            }
        };
        publish(proof, false);
        let request = Request::Vouch { vote: proof.vote.clone() };
        let mut answers: FuturesUnordered<_> = missing(proof)
            .into_iter()
            .map(|peer| {
                let request = &request;
                async move { (peer, self.calls.call(peer, request).await) }
            })
            .collect();
        while let Some((peer, answer)) = answers.next().await {
            match answer {
                Ok(Answer::Vouched(Some(signature)))
                    if self.voucher.keys.verify(peer, &bytes, &signature) =>
                {
                    proof.signatures.insert(peer, signature);
                    publish(proof, false);
                }
                Ok(_) => tracing::debug!(%peer, "an anchor does not sign for this term yet"),
                Err(error) => tracing::debug!(%error, "an anchor's signature is missing"),
            }
        }
        publish(proof, true);
    }
}

/// The voters that did not sign.
fn missing(proof: &TermProof) -> BTreeSet<PeerId> {
    let voters = proof.vote.group.voters.iter().flatten();
    voters.copied().filter(|peer| !proof.signatures.contains_key(peer)).collect()
}

/// Collects signatures whenever this anchor leads, until the anchor ends.
pub(super) async fn run(inner: Arc<Inner>, proofs: watch::Sender<Option<TermProof>>) {
    let mut server = inner.raft.server_metrics();
    let mut current: Option<TermProof> = None;
    loop {
        server.borrow_and_update();
        let vote = inner.own_vote();
        if current.as_ref().map(|proof| &proof.vote) != vote.as_ref() {
            current = vote.map(|vote| {
                let signature = inner.voucher.keys.sign(&vote.signed_bytes(inner.voucher.run));
                let signatures = BTreeMap::from([(inner.me.0, signature)]);
                TermProof { vote, signatures }
            });
        }
        let is_complete = match &mut current {
            Some(proof) => {
                tokio::select! {
                    () = inner.collect(proof, &proofs) => {}
                    changed = server.changed() => if changed.is_err() { return },
                }
                missing(proof).is_empty()
            }
            None => true,
        };
        let changed = async { server.changed().await.is_ok() };
        let goes_on = match is_complete {
            true => changed.await,
            false => tokio::time::timeout(AGAIN, changed).await.unwrap_or(true),
        };
        if !goes_on {
            return;
        }
    }
}
