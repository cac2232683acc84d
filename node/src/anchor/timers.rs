//! What time brings: heartbeats, elections, snapshots.
//!
//! Before an anchor stands for election it asks the others whether they would vote for it, which
//! changes nothing. So an anchor that was cut off for a while does not depose a leader that all others
//! hear, and one that cannot reach enough of them writes nothing while it waits.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use openraft::error::Fatal;
use shoal_protocol::ids::PeerId;
use tokio::sync::mpsc;

use super::encoding::Mark;
use super::rpc::{Answer, Request};
use super::types::{AnchorId, Membership};
use super::{AnchorEvent, Inner};

/// Entries that no snapshot has, before one is made.
const ENTRIES: usize = 4096;

/// Their bytes, before one is made.
const BYTES: u64 = 1 << 20;

/// Keeps the time.
pub(super) struct Timers {
    inner: Arc<Inner>,
    events: mpsc::Sender<AnchorEvent>,
    /// Who leads and how many voters answer, as it was said last.
    said: Option<(Option<PeerId>, usize, usize)>,
}

impl Timers {
    pub(super) fn new(inner: Arc<Inner>, events: mpsc::Sender<AnchorEvent>) -> Self {
        Self { inner, events, said: None }
    }

    /// Until the anchor is over.
    pub(super) async fn run(mut self) {
        let heartbeat = self.inner.timing.heartbeat;
        loop {
            // To the point: two that are due at different times must not be so at once.
            let waits = !self.inner.leads() && self.inner.is_voter();
            let left = if waits { self.inner.contact().left() } else { heartbeat };
            tokio::time::sleep(left.min(heartbeat)).await;
            let beat = if self.inner.leads() {
                self.inner.contact().wait();
                self.inner.raft.trigger().heartbeat().await
            } else if self.inner.is_voter() && self.inner.contact().due() {
                self.stand().await
            } else {
                Ok(())
            };
            if beat.is_err() || self.compact().await.is_err() {
                return;
            }
            self.say();
        }
    }

    /// Stands for election if enough voters would vote for this anchor.
    async fn stand(&self) -> Result<(), Fatal<AnchorId>> {
        if self.would_win().await {
            return self.inner.raft.trigger().elect().await;
        }
        // Perhaps they heard the leader a moment longer.
        let heartbeat = self.inner.timing.heartbeat;
        self.inner.contact().wait_for(&(heartbeat..3 * heartbeat));
        Ok(())
    }

    async fn would_win(&self) -> bool {
        let me = self.inner.me;
        let membership = self.inner.membership(Clone::clone);
        let last = self.inner.raft.data_metrics().borrow().last_log.map(Mark::from);
        let request = Request::WouldVote { last };
        let others = membership.voter_ids().filter(|id| *id != me);
        let mut answers: FuturesUnordered<_> = others
            .map(|id| {
                let (calls, request) = (&self.inner.calls, &request);
                async move { (id, calls.call(id.0, request).await) }
            })
            .collect();
        let mut votes = vec![me];
        // All are waited for: how many answer is worth knowing when it is not enough.
        while !is_quorum(&membership, |id| votes.contains(&id)) {
            match answers.next().await {
                Some((id, Ok(Answer::WouldVote(true)))) => votes.push(id),
                Some(_) => {}
                None => return false,
            }
        }
        true
    }

    async fn compact(&self) -> Result<(), Fatal<AnchorId>> {
        let pictured = self.inner.machine.pictured();
        let (entries, bytes) = self.inner.log.after(pictured);
        let long = entries > ENTRIES || bytes > BYTES;
        if long && self.inner.machine.applied() > pictured {
            self.inner.raft.trigger().snapshot().await?;
        }
        Ok(())
    }

    /// Says who leads if it is another than before, or nobody and other voters answer than before.
    fn say(&mut self) {
        let inner = &self.inner;
        let window = inner.timing.election.end * 2;
        let membership = inner.membership(Clone::clone);
        inner.calls.retain(|peer| membership.get_node(&AnchorId(peer)).is_some());
        let answers = |id: AnchorId| id == inner.me || inner.calls.answers(id.0, window);
        let voters = membership.voter_ids().count();
        let answering = membership.voter_ids().filter(|id| answers(*id)).count();
        let leads = inner.leads() && is_quorum(&membership, answers);
        let peer = if leads {
            Some(inner.me.0)
        } else {
            inner.contact().leader(inner.timing.election.end)
        };
        let same = match self.said {
            Some((said, ..)) if peer.is_some() => said == peer,
            said => said == Some((peer, answering, voters)),
        };
        // Where there is no room it is said next time, if it is still so.
        if !same && self.events.try_send(AnchorEvent::Leader { peer, answering, voters }).is_ok() {
            self.said = Some((peer, answering, voters));
        }
    }
}

/// Whether these voters can decide: more than half of each group.
fn is_quorum(membership: &Membership, has: impl Fn(AnchorId) -> bool) -> bool {
    let groups = membership.get_joint_config();
    !groups.is_empty()
        && groups.iter().all(|group| 2 * group.iter().filter(|id| has(**id)).count() > group.len())
}
