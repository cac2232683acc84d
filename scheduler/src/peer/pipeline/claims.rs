//! Claims that this peer released.

use std::collections::BTreeMap;

use shoal_protocol::ids::{ClaimKey, Grant, Step};
use shoal_protocol::message::ToCoordinator;

use crate::action::PeerAction;
use crate::peer::Out;

/// The last released grant of each piece of work. That grant and all earlier ones are void.
#[derive(Debug, Default)]
pub(super) struct ReleasedClaims {
    last: BTreeMap<ClaimKey, Grant>,
}

impl ReleasedClaims {
    /// Whether a grant was released.
    pub(super) fn covers(&self, key: ClaimKey, grant: Grant) -> bool {
        self.last.get(&key).is_some_and(|last| grant <= *last)
    }

    /// Releases the grant of a job that ends here.
    pub(super) fn release(&mut self, key: ClaimKey, grant: Grant, out: &mut Out) {
        self.last.insert(key, grant);
        out.push(PeerAction::ToCoordinator(ToCoordinator::Released { key, grant }));
    }

    /// Refuses a grant of work that is not done here: the grant counts as released.
    pub(super) fn refuse(&mut self, key: ClaimKey, grant: Grant, out: &mut Out) {
        self.last.entry(key).and_modify(|last| *last = grant.max(*last)).or_insert(grant);
        out.push(PeerAction::ToCoordinator(ToCoordinator::Released { key, grant }));
    }

    /// Forgets the grants of earlier steps.
    pub(super) fn forget_before(&mut self, step: Step) {
        self.last.retain(|key, _| key.step >= step);
    }

    pub(super) fn clear(&mut self) {
        self.last.clear();
    }
}
