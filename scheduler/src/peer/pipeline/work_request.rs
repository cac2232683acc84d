//! Requests for work of the first stage.

use shoal_protocol::ids::{Grant, Step};
use shoal_protocol::message::ToCoordinator;

use crate::action::PeerAction;
use crate::peer::Out;

/// The state of this peer's requests for work.
#[derive(Debug, Default)]
pub(super) struct WorkRequests {
    /// The newest grant that came with work.
    last_grant: Grant,
    /// The last request: room in each step, after which grant.
    pending: Option<(Vec<(Step, u32)>, Grant)>,
}

impl WorkRequests {
    pub(super) fn note_grant(&mut self, grant: Grant) {
        self.last_grant = self.last_grant.max(grant);
    }

    /// Requests work for the room in each step, unless the coordinator knows of that room already.
    /// `service_time` is the time for one microbatch in nanoseconds.
    pub(super) fn send(&mut self, rooms: Vec<(Step, u32)>, service_time: u64, out: &mut Out) {
        let request = Some((rooms.clone(), self.last_grant));
        if !rooms.is_empty() && self.pending != request {
            self.pending = request;
            let message =
                ToCoordinator::WorkRequest { rooms, through: self.last_grant, service_time };
            out.push(PeerAction::ToCoordinator(message));
        }
    }

    /// Forgets the last request, so that the next one is sent in any case.
    pub(super) fn forget(&mut self) {
        self.pending = None;
    }
}
