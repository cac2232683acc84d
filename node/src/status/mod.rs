//! What a node knows of its run, as one typed snapshot: `shoal status`, `shoal top`, the web page and
//! the probes all read this and nothing else.
//!
//! The driver says what it sees ([`Sight`]) about once a second, the events of the run are noted as
//! they come ([`event_log`]), and the [`StatusWatch`] has both for whoever asks.

mod diff;
mod downsampled_series;
mod event_log;
#[cfg(test)]
pub(crate) mod example;
pub(crate) mod labels;
pub(crate) mod snapshot;
mod watch;

pub use self::snapshot::{
    CheckpointStatus, Curves, LinkStatus, LoadStatus, MemberState, MemberStatus, MoveStatus,
    NodeState, NodeStatus, Point, RunStatus, Status, StatusEvent, Tone, TrafficStatus,
    TrainingStatus,
};
pub use self::watch::{Health, StatusWatch};
pub use crate::reachability::{Mapping, OwnPort};

/// What the driver sees of the run now.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sight {
    /// The node; its state as far as its membership tells.
    pub node: NodeStatus,
    /// The run.
    pub run: Option<RunStatus>,
    /// Grows with every change of the members.
    pub view: u64,
    /// Its members.
    pub members: Vec<MemberStatus>,
}
