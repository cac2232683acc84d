//! A node's knowledge of its run as one typed snapshot. `shoal status`, `shoal top`, the web page and
//! the health endpoints read this and nothing else.
//!
//! The driver publishes an observation ([`Observation`]) about once a second. [`event_log`] collects the
//! run's events as they happen. [`StatusWatch`] combines both and is shared with all readers.

mod diff;
mod downsampled_series;
mod event_log;
#[cfg(test)]
pub(crate) mod example;
pub(crate) mod labels;
mod survival;
mod watch;

pub use self::watch::{Health, StatusWatch};
pub use shoal_formats::snapshot::{
    CheckpointStatus, CostStatus, Curves, LinkStatus, LoadStatus, MemberState, MemberStatus,
    MoveStatus, NodeState, NodeStatus, Point, RunStatus, ScoredStatus, Status, StatusEvent,
    SurvivalStatus, Tone, TrafficStatus, TrainingStatus,
};

/// The driver's latest observation of the run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    /// The node. Its state reflects membership only; [`event_log`] adds pauses, drains and ends.
    pub node: NodeStatus,
    /// The run.
    pub run: Option<RunStatus>,
    /// The membership's version; it grows with every change.
    pub view: u64,
    /// The run's members.
    pub members: Vec<MemberStatus>,
}
