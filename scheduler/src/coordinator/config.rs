//! What a coordinator is told once, when its term begins.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::history::History;
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::manifest::Manifest;

use crate::locality::Load;
use crate::rebalance::Rebalance;
use crate::router::Routing;

/// After how long the first all-reduce of the smallest stage is tried again where it has no result, and
/// on how slow a link a larger one has time for all of its bytes, in bytes per second.
const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: u64 = 1_000_000;

/// After how long an all-reduce of so many numbers is tried again at most, while none was late.
#[must_use]
pub fn round_patience(codec: SumCodec, numbers: u64) -> Duration {
    let both = [codec.part(), codec.result()].map(|element| element.bytes_of(numbers));
    let bytes: u64 = both.into_iter().flatten().sum();
    PATIENCE + Duration::from_secs(2 * bytes / SLOWEST)
}

/// Everything that a coordinator starts with.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// The run.
    pub manifest: Arc<Manifest>,
    /// What the log says of it.
    pub history: History,
    /// Who keeps the log.
    pub anchors: BTreeSet<PeerId>,
    /// Members that the first step waits for, besides a replica of every stage.
    pub wait_for: usize,
    /// The peer that it lives with, in its present life.
    pub home: Member,
    /// After how long a word whose effect does not show is said again.
    pub retry: Duration,
    /// After how long an all-reduce without a result is tried again at most, while none was late:
    /// those before it say how long they take, and the first of all has this long. See [`round_patience`].
    pub patience: Duration,
    /// How long a run that lost a stage waits for those who have its newest checkpoint, before it goes
    /// on from an older one.
    pub homecoming: Duration,
    /// What a step sends, to weigh how near members are to each other.
    pub load: Load,
    /// When members change their stages.
    pub rebalance: Rebalance,
    /// By what it chooses between replicas of the first stage.
    pub routing: Routing,
}
