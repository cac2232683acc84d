//! What a node knows of its run, as one typed snapshot: `shoal status`, `shoal top`, the web page and
//! the probes all read this and nothing else.
//!
//! The driver says what it sees ([`Sight`]) about once a second, the events of the run are noted as
//! they come ([`chronicle`]), and the [`Board`] has both for whoever asks.

mod board;
mod chronicle;
#[cfg(test)]
pub(crate) mod example;
mod news;
pub(crate) mod own_port;
mod series;
pub(crate) mod snapshot;
pub(crate) mod words;

pub use self::board::{Board, Health};
pub use self::own_port::{Mapping, OwnPort};
pub use self::snapshot::{
    CheckpointStatus, Curves, Happening, LinkStatus, LoadStatus, MemberState, MemberStatus,
    MoveStatus, NodeState, NodeStatus, Point, RunStatus, Status, Tone, TrafficStatus,
    TrainingStatus,
};

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
