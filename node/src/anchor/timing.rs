//! The anchors' timeouts.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use openraft::SnapshotPolicy;
use shoal_formats::anchor::rpc;

/// Entries that are kept although the snapshot covers them, for anchors that are just behind.
const KEPT: u64 = 64;

/// How fast anchors detect the death of one.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    /// The leader's heartbeat interval.
    pub(crate) heartbeat: Duration,
    /// The election timeout, random in this range. It exceeds three heartbeats.
    pub(crate) election: Range<Duration>,
}

impl Default for Timing {
    fn default() -> Self {
        let election = Duration::from_millis(700)..Duration::from_millis(1400);
        Self { heartbeat: Duration::from_millis(150), election }
    }
}

impl Timing {
    /// The deadline for an answer. When the voters change, Raft waits until every request is
    /// answered or timed out. Even then a heartbeat arrives before an election is due.
    pub(super) fn patience(&self) -> Duration {
        let Self { heartbeat, election } = self;
        election.start.saturating_sub(2 * *heartbeat).max(*heartbeat)
    }

    /// Raft's own clock is used neither for heartbeats nor for elections: [`super::timers`] has
    /// both. Its heartbeat setting is the deadline for an answer, and its election timeout is how
    /// long a vote for another candidate is refused after the last request of the leader.
    pub(super) fn raft_config(&self) -> Arc<openraft::Config> {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 4);
        let (patience, refusal) = (millis(self.patience()), millis(self.election.start));
        Arc::new(openraft::Config {
            cluster_name: "log".into(),
            heartbeat_interval: patience,
            election_timeout_min: refusal.saturating_sub(1),
            election_timeout_max: refusal,
            install_snapshot_timeout: 2 * patience,
            snapshot_max_chunk_size: rpc::SNAPSHOT_PIECE as u64,
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: KEPT,
            enable_heartbeat: false,
            enable_elect: false,
            ..openraft::Config::default()
        })
    }
}
