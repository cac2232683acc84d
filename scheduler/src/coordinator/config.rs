//! What a coordinator is told once, when its term begins.

use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Era, PeerId, Term};
use shoal_protocol::manifest::Manifest;

/// Everything that a coordinator starts with.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// The run.
    pub manifest: Arc<Manifest>,
    /// Its term of office.
    pub term: Term,
    /// The era of the run.
    pub era: Era,
    /// Members that the first step waits for, besides a replica of every stage.
    pub wait_for: usize,
    /// The peer that it lives with.
    pub home: PeerId,
    /// After how long a word whose effect does not show is said again.
    pub retry: Duration,
    /// After how long an all-reduce without a result is tried again, at first.
    pub patience: Duration,
}
