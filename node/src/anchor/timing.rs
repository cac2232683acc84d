//! How long things take.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use openraft::SnapshotPolicy;

use super::rpc;

/// Entries that are kept although the snapshot has them, for who is just behind.
const KEPT: u64 = 64;

/// How fast anchors notice that one is gone.
#[derive(Debug, Clone)]
pub(crate) struct Timing {
    /// How often a leader is heard.
    pub(crate) heartbeat: Duration,
    /// After how long without one an election is due, by chance. More than three heartbeats.
    pub(crate) election: Range<Duration>,
}

impl Default for Timing {
    fn default() -> Self {
        let election = Duration::from_millis(700)..Duration::from_millis(1400);
        Self { heartbeat: Duration::from_millis(150), election }
    }
}

impl Timing {
    /// How long an answer may take. When the voters change, Raft lets all answers come or be given up
    /// before it goes on: even then the leader is heard before an election is due.
    pub(super) fn patience(&self) -> Duration {
        let Self { heartbeat, election } = self;
        election.start.saturating_sub(2 * *heartbeat).max(*heartbeat)
    }

    /// Raft's own clock is used neither for heartbeats nor for elections: the pulse has both. What it
    /// calls its heartbeat is how long an answer may take, and its election time is how long a vote
    /// for another is refused after the leader was heard.
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
