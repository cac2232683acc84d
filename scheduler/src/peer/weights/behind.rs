//! Reports to the coordinator that this peer cannot follow the weights of some stages.

use shoal_protocol::message::{Followed, ToCoordinator};

use crate::action::PeerAction;
use crate::peer::Out;

/// The reports of this peer. Repeated failures are reported once per retry interval.
#[derive(Debug, Default)]
pub(super) struct BehindReports {
    last: LastReport,
    /// A peer that serves cannot follow. Nothing happens here any more until the coordinator expels it, so
    /// it reports that until then.
    is_lost: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum LastReport {
    #[default]
    None,
    Sent,
    /// Another failure followed since.
    Due,
}

impl BehindReports {
    /// Reports that this peer, which may serve, cannot follow from its weights. A repeated report waits for
    /// [`Self::repeat`].
    pub(super) fn report(&mut self, of: Followed, serves: bool, out: &mut Out) {
        self.is_lost |= of == Followed::Own && serves;
        if std::mem::replace(&mut self.last, LastReport::Sent) == LastReport::None {
            out.push(PeerAction::ToCoordinator(ToCoordinator::Behind(of)));
        } else {
            self.last = LastReport::Due;
        }
    }

    /// Whether a peer that serves cannot follow.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Sends a report that is due. Without one, the next failure is reported at once.
    pub(super) fn repeat(&mut self, of: Followed, out: &mut Out) {
        if std::mem::take(&mut self.last) == LastReport::Due || self.is_lost {
            self.last = LastReport::Sent;
            let of = if self.is_lost { Followed::Own } else { of };
            out.push(PeerAction::ToCoordinator(ToCoordinator::Behind(of)));
        }
    }

    /// This peer begins as a newcomer again.
    pub(super) fn forget_loss(&mut self) {
        self.is_lost = false;
    }
}
