//! Events of the simulated world.

use shoal_protocol::ids::{Era, Member, PeerId, Stage, Step, Term};
use shoal_protocol::message::{
    FromCoordinator, LinkEstimate, LogRecord, PeerMessage, Seal, TensorTag, TermProof,
    ToCoordinator,
};
use shoal_protocol::units::Bytes;

use super::peer_index::index_of;
use crate::action::DeviceIndex;
use crate::sim::integer_model::Weights;
use crate::sim::payloads::Content;
use crate::sim::scenario::Fault;

/// An event at a moment.
#[derive(Debug, bincode::Encode)]
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
    /// A replication of files to a peer ended.
    Kept {
        to: Member,
        version: Step,
        stage: Stage,
        weights: Option<Weights>,
    },
    /// A newcomer has probed its links.
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
    EngineDone(Member, DeviceIndex),
    /// A copy of a stage has been written, unless the disk fails.
    Written {
        to: Member,
        version: Step,
        stage: Stage,
        weights: Weights,
    },
    Tick(Member),
    /// A coordinator learns that a record is durable.
    Appended {
        to: Member,
        leadership: u64,
        record: LogRecord,
    },
    /// The leader's oldest pending record becomes durable.
    Logged {
        leadership: u64,
    },
    /// The anchors elect a leader.
    Elect,
    /// The former leader learns that it was deposed.
    Deposed {
        at: Member,
        leadership: u64,
    },
    /// A coordinator's tick.
    Remind {
        to: Member,
        leadership: u64,
    },
    Fault(Fault),
    /// A peer, and the coordinator on it, learns that a connection broke.
    Noticed {
        at: Member,
        other: Member,
        dead: bool,
    },
    /// A peer cannot reach another peer.
    Unreached {
        at: Member,
        other: Member,
    },
    /// A peer starts a new incarnation.
    Reborn(usize),
    /// A stalled peer continues, unless its stall was extended.
    Resume(usize),
}

impl Event {
    /// The peer whose process must run for this event, if any.
    pub(super) fn target(&self) -> Option<usize> {
        match self {
            Self::Start(me) | Self::EngineDone(me, _) | Self::Tick(me) => Some(index_of(*me)),
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

    /// The incarnation without which the event is dropped, if any.
    pub(super) fn incarnation(&self) -> Option<Member> {
        match self {
            Self::Start(me) | Self::EngineDone(me, _) | Self::Tick(me) => Some(*me),
            Self::Kept { to, .. }
            | Self::LinksProbed { to, .. }
            | Self::Fetched { to, .. }
            | Self::Written { to, .. } => Some(*to),
            Self::Unreached { at, .. } => Some(*at),
            Self::Arrives { .. }
            | Self::Appended { .. }
            | Self::Logged { .. }
            | Self::Elect
            | Self::Deposed { .. }
            | Self::Remind { .. }
            | Self::Fault(_)
            | Self::Noticed { .. }
            | Self::Reborn(_)
            | Self::Resume(_) => None,
        }
    }
}

/// Data that one peer sends to another.
#[derive(Debug, Clone, bincode::Encode)]
pub(super) enum Cargo {
    FromCoordinator(FromCoordinator),
    ToCoordinator(ToCoordinator),
    PeerMessage(PeerMessage),
    /// A redirection to the coordinator.
    CoordinatorMoved(Member),
    /// Proofs of a term.
    Elected(Vec<TermProof>),
    Tensor {
        tag: TensorTag,
        seal: Option<Seal>,
        content: Content,
        size: Bytes,
    },
}
