//! The effects that components return and the event loop carries out.

use shoal_protocol::ids::{Era, Member, Term};
use shoal_protocol::message::Message;
use shoal_scheduler::action::{CoordinatorInput, PeerInput};

use super::incoming::Unusable;
use super::shutdown::Ending;
use crate::events::RunEvent;

/// An input for one of this process's own state machines.
#[derive(Debug)]
pub(super) enum LocalInput {
    Peer(PeerInput),
    Coordinator(CoordinatorInput),
}

/// The era and the coordinator's term that a message names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) era: Era,
    pub(super) term: Term,
}

/// One consequence of an event for another component.
#[derive(Debug)]
pub(super) enum Effect {
    /// Queues an input for the peer or the coordinator of this process.
    Local(LocalInput),
    /// Sends a message to another member.
    Send { to: Member, stamp: Stamp, message: Message },
    /// Answers a request that only the coordinator can serve with its addresses.
    Redirect { to: Member },
    /// Drops an unusable message, and disconnects the sender if no correct peer can have sent it.
    Refuse { from: Member, error: Unusable },
    /// Counts a message that was dropped because its sender is not what it must be for it, and disconnects a peer
    /// that is no member and goes on.
    Unentitled { from: Member, what: &'static str },
    /// Reports an event of the run.
    Note(RunEvent),
    /// Ends this life.
    End(Ending),
}

/// Effects in the order in which the event loop carries them out.
pub(super) type Effects = Vec<Effect>;

impl From<PeerInput> for Effect {
    fn from(input: PeerInput) -> Self {
        Self::Local(LocalInput::Peer(input))
    }
}

impl From<CoordinatorInput> for Effect {
    fn from(input: CoordinatorInput) -> Self {
        Self::Local(LocalInput::Coordinator(input))
    }
}

impl From<RunEvent> for Effect {
    fn from(event: RunEvent) -> Self {
        Self::Note(event)
    }
}

impl From<Ending> for Effect {
    fn from(ending: Ending) -> Self {
        Self::End(ending)
    }
}
