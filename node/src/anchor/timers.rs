//! Timers: heartbeats, election timeouts, snapshots.
//!
//! Before an anchor becomes a candidate it asks the others whether they would vote for it (a
//! pre-vote), which changes no state. So an anchor that was cut off does not depose a leader that
//! the others follow, and an anchor that cannot reach a majority writes nothing while it waits.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use openraft::error::Fatal;
use shoal_formats::anchor::encoding::Mark;
use shoal_formats::anchor::rpc::{Answer, Request};
use shoal_formats::anchor::types::{AnchorId, Membership};
use shoal_protocol::ids::PeerId;
use tokio::sync::mpsc;

use super::{AnchorEvent, Inner};

/// Entries beyond the snapshot that trigger a new one.
const ENTRIES: usize = 4096;

/// Bytes of entries beyond the snapshot that trigger a new one.
const BYTES: u64 = 1 << 20;

/// Runs the timers.
pub(super) struct Timers {
    inner: Arc<Inner>,
    events: mpsc::Sender<AnchorEvent>,
    /// The last reported leader, answering voters and voters.
    last_reported: Option<(Option<PeerId>, usize, usize)>,
}

impl Timers {
    pub(super) fn new(inner: Arc<Inner>, events: mpsc::Sender<AnchorEvent>) -> Self {
        Self { inner, events, last_reported: None }
    }

    /// Runs until the anchor ends.
    pub(super) async fn run(mut self) {
        let heartbeat = self.inner.timing.heartbeat;
        loop {
            // Sleeps exactly until the deadline: rounding up could make two anchors candidates at
            // once.
            let waits = !self.inner.leads() && self.inner.is_voter();
            let left = if waits { self.inner.contact().left() } else { heartbeat };
            tokio::time::sleep(left.min(heartbeat)).await;
            let beat = if self.inner.leads() {
                self.inner.contact().wait();
                self.inner.raft.trigger().heartbeat().await
            } else if self.inner.is_voter() && self.inner.contact().due() {
                self.campaign().await
            } else {
                Ok(())
            };
            if beat.is_err() || self.compact().await.is_err() {
                return;
            }
            self.report_leader();
        }
    }

    /// Becomes a candidate if a majority would vote for this anchor.
    async fn campaign(&self) -> Result<(), Fatal<AnchorId>> {
        if self.would_win().await {
            return self.inner.raft.trigger().elect().await;
        }
        // The others may time out a little later.
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
        // Waits for all answers: their number is reported when it is no majority.
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
        let snapshot_end = self.inner.machine.snapshot_end();
        let (entries, bytes) = self.inner.log.after(snapshot_end);
        let long = entries > ENTRIES || bytes > BYTES;
        if long && self.inner.machine.applied() > snapshot_end {
            self.inner.raft.trigger().snapshot().await?;
        }
        Ok(())
    }

    /// Reports the leader if it changed, or if there is none and the number of answering voters
    /// changed.
    fn report_leader(&mut self) {
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
        let same = match self.last_reported {
            Some((leader, ..)) if peer.is_some() => leader == peer,
            last => last == Some((peer, answering, voters)),
        };
        // If the queue is full, the next tick reports it.
        if !same && self.events.try_send(AnchorEvent::Leader { peer, answering, voters }).is_ok() {
            self.last_reported = Some((peer, answering, voters));
        }
    }
}

/// Whether these voters are a quorum: a majority of each group.
fn is_quorum(membership: &Membership, has: impl Fn(AnchorId) -> bool) -> bool {
    let groups = membership.get_joint_config();
    !groups.is_empty()
        && groups.iter().all(|group| 2 * group.iter().filter(|id| has(**id)).count() > group.len())
}
