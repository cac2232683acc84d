//! Changes the log's voters.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use openraft::{ChangeMembers, EmptyNode};
use shoal_formats::anchor::types::{AnchorId, Membership};
use shoal_protocol::ids::PeerId;
use tokio::sync::watch;

use super::Inner;

/// Timeout of one change, in which new voters must catch up.
const CHANGE: Duration = Duration::from_secs(60);

/// Why the voters did not change, or changed in part.
#[derive(Debug, thiserror::Error)]
enum Unchanged {
    #[error("this anchor does not lead")]
    NoLeader,
    #[error("{0}")]
    Raft(String),
}

impl Unchanged {
    fn raft(error: impl std::fmt::Display) -> Self {
        Self::Raft(error.to_string())
    }
}

/// Applies each requested set of voters, until nobody can request any.
pub(super) async fn run(inner: Arc<Inner>, mut wanted: watch::Receiver<BTreeSet<PeerId>>) {
    while wanted.changed().await.is_ok() {
        let peers = wanted.borrow_and_update().clone();
        let voters = peers.iter().copied().map(AnchorId).collect();
        tokio::select! {
            () = others(&mut wanted, &peers) => {}
            changed = tokio::time::timeout(CHANGE, change(&inner, voters)) => match changed {
                Ok(Ok(())) => tracing::info!(voters = peers.len(), "the log's voters changed"),
                Ok(Err(error)) => tracing::warn!(%error, "cannot change the log's voters"),
                Err(_) => tracing::warn!("the log's new voters did not catch up in time"),
            },
        }
    }
}

/// Waits until another set of voters is requested. The same set again is already under way.
async fn others(wanted: &mut watch::Receiver<BTreeSet<PeerId>>, now: &BTreeSet<PeerId>) {
    let other = wanted.wait_for(|peers| peers != now).await.is_ok();
    if other {
        wanted.mark_changed();
    } else {
        std::future::pending().await
    }
}

async fn change(inner: &Inner, voters: BTreeSet<AnchorId>) -> Result<(), Unchanged> {
    settled(inner).await?;
    let now = inner.membership(Clone::clone);
    if is_as_wanted(&now, &voters) {
        return Ok(());
    }
    let new = voters.iter().filter(|id| now.get_node(id).is_none());
    for id in new.copied() {
        inner.raft.add_learner(id, EmptyNode::new(), false).await.map_err(Unchanged::raft)?;
    }
    caught_up(inner, &voters).await?;
    inner.raft.change_membership(voters.clone(), false).await.map_err(Unchanged::raft)?;
    let kept = inner.membership(Clone::clone);
    // Learners that an abandoned change left behind.
    let left: BTreeSet<AnchorId> = kept.learner_ids().filter(|id| !voters.contains(id)).collect();
    if !left.is_empty() {
        inner
            .raft
            .change_membership(ChangeMembers::RemoveNodes(left), false)
            .await
            .map_err(Unchanged::raft)?;
    }
    Ok(())
}

/// Waits until the membership is committed. A change that was abandoned, or begun by an earlier
/// leader, may still be in flight, and Raft allows one at a time.
async fn settled(inner: &Inner) -> Result<(), Unchanged> {
    let mut metrics = inner.raft.metrics();
    let settled = metrics.wait_for(|now| now.last_applied >= *now.membership_config.log_id()).await;
    settled.map(drop).map_err(|_| Unchanged::NoLeader)
}

fn is_as_wanted(membership: &Membership, voters: &BTreeSet<AnchorId>) -> bool {
    membership.get_joint_config().iter().eq([voters]) && membership.learner_ids().next().is_none()
}

/// Waits until the new voters hold the current log. A voter that lags could be needed for a majority
/// that it cannot give.
async fn caught_up(inner: &Inner, voters: &BTreeSet<AnchorId>) -> Result<(), Unchanged> {
    let mut metrics = inner.raft.data_metrics();
    let target = metrics.borrow_and_update().last_log;
    let old = inner.membership(|membership| membership.voter_ids().collect::<BTreeSet<_>>());
    loop {
        {
            let now = metrics.borrow_and_update();
            let Some(replication) = &now.replication else { return Err(Unchanged::NoLeader) };
            let holds = |id: &&AnchorId| replication.get(id).is_some_and(|held| *held >= target);
            if voters.difference(&old).all(|id| holds(&id)) {
                return Ok(());
            }
        }
        if metrics.changed().await.is_err() {
            return Err(Unchanged::NoLeader);
        }
    }
}
