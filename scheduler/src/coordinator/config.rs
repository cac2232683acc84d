//! What a coordinator is told once, when its term begins.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Era, PeerId, Stage, Step, Term};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StoredFile;

/// Everything that a coordinator starts with.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// The run.
    pub manifest: Arc<Manifest>,
    /// Its term of office.
    pub term: Term,
    /// The era of the run; the last one before, where it is resumed.
    pub era: Era,
    /// What a run that went on before goes on from.
    pub resume: Option<Resume>,
    /// Members that the first step waits for, besides a replica of every stage.
    pub wait_for: usize,
    /// The peer that it lives with.
    pub home: PeerId,
    /// After how long a word whose effect does not show is said again.
    pub retry: Duration,
    /// After how long an all-reduce without a result is tried again, at first.
    pub patience: Duration,
}

/// A checkpoint that a run goes on from, in a new era.
#[derive(Debug, Clone)]
pub struct Resume {
    /// The version of the weights.
    pub version: Step,
    /// Each stage's files, which the peer that the coordinator lives with has; none of version 0.
    pub files: BTreeMap<Stage, Vec<StoredFile>>,
}
