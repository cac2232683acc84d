//! What a coordinator is told once, when its term begins.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::history::History;
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::manifest::Manifest;

use crate::nearness::Load;
use crate::rebalance::Rebalance;
use crate::router::Routing;

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
    /// those before it say how long they take, and the first of all has this long.
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
