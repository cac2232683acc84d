//! What happens in the world, and when it does not.

use shoal_protocol::ids::{Era, Member, PeerId, Stage, Step, Term};
use shoal_protocol::message::{
    FromCoordinator, LinkEstimate, LogRecord, PeerMessage, TensorTag, ToCoordinator,
};
use shoal_protocol::units::Bytes;

use super::index_of;
use crate::sim::integer_model::Weights;
use crate::sim::payloads::Content;
use crate::sim::scenario::Fault;

/// Something that happens at a moment. What is meant for a life that is over by then does not.
#[derive(Debug)]
pub(super) enum Event {
    Start(Member),
    Arrives {
        to: Member,
        from: Member,
        connection: u64,
        era: Era,
        term: Term,
        cargo: Cargo,
    },
    /// Files that are to be kept, which are somebody's disk's.
    Kept {
        to: Member,
        version: Step,
        stage: Stage,
        weights: Option<Weights>,
    },
    /// A newcomer has looked at members.
    LinksProbed {
        to: Member,
        link_estimates: Vec<(PeerId, LinkEstimate)>,
    },
    Fetched {
        to: Member,
        version: Step,
        stage: Stage,
        weights: Option<Weights>,
    },
    EngineDone(Member),
    /// A copy of a stage is on the disk, if that takes it.
    Written {
        to: Member,
        version: Step,
        stage: Stage,
        weights: Weights,
    },
    Tick(Member),
    /// A coordinator learns that a record is down for good.
    Appended {
        to: Member,
        office: u64,
        record: LogRecord,
    },
    /// The leader's oldest record that is not logged is.
    Logged {
        office: u64,
    },
    /// The anchors choose who leads.
    Elect,
    /// Who led learns that it does no more.
    Deposed {
        at: Member,
        office: u64,
    },
    /// A coordinator's tick.
    Remind {
        to: Member,
        office: u64,
    },
    Fault(Fault),
    /// A peer, and the coordinator if it lives there, learns that a connection is gone.
    Noticed {
        at: Member,
        other: Member,
        dead: bool,
    },
    /// A peer finds that nobody answers any more.
    Unreached {
        at: Member,
        other: Member,
    },
    /// A peer whose life is over begins a new one.
    Reborn(usize),
    /// A peer that stood still goes on, unless it must stand still for longer.
    Resume(usize),
}

impl Event {
    /// Which peer's process must run for it to happen, if it is any's.
    pub(super) fn whose(&self) -> Option<usize> {
        match self {
            Self::Start(me) | Self::EngineDone(me) | Self::Tick(me) => Some(index_of(*me)),
            Self::Arrives { to, .. }
            | Self::Kept { to, .. }
            | Self::LinksProbed { to, .. }
            | Self::Fetched { to, .. }
            | Self::Written { to, .. }
            | Self::Appended { to, .. }
            | Self::Remind { to, .. } => Some(index_of(*to)),
            Self::Noticed { at, .. } | Self::Unreached { at, .. } | Self::Deposed { at, .. } => {
                Some(index_of(*at))
            }
            Self::Logged { .. }
            | Self::Elect
            | Self::Fault(_)
            | Self::Reborn(_)
            | Self::Resume(_) => None,
        }
    }
}

/// What goes from one peer to another.
#[derive(Debug, Clone)]
pub(super) enum Cargo {
    Told(FromCoordinator),
    Reported(ToCoordinator),
    Heard(PeerMessage),
    /// Another is the coordinator.
    CoordinatorMoved(Member),
    Tensor {
        tag: TensorTag,
        content: Content,
        size: Bytes,
    },
}
