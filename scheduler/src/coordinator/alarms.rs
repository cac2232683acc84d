//! Alarms: reports of members that the run cannot go on as it is.
//!
//! No single word ends a run. A member that raises an alarm leaves, and the others do its work again. Only when a
//! second peer raises one in the same step, or no other replica is there to disprove the first, does the run stop.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, PeerId, Step};

use super::{Coordinator, Out};
use crate::action::LossCause;

/// The peers that raised an alarm in steps that are not committed.
#[derive(Debug, Default)]
pub(super) struct Alarms(BTreeMap<Step, BTreeSet<PeerId>>);

impl Alarms {
    /// Notes an alarm. Returns whether another peer raised one in the same step.
    fn raise(&mut self, step: Step, by: PeerId) -> bool {
        let peers = self.0.entry(step).or_default();
        peers.insert(by);
        peers.len() > 1
    }

    /// A step is committed: alarms up to it are disproved.
    pub(super) fn forget_through(&mut self, step: Step) {
        self.0.retain(|of, _| *of > step);
    }
}

impl Coordinator {
    /// A member reports that the run cannot go on.
    pub(super) fn alarm(&mut self, from: Member, step: Step, reason: String, out: &mut Out) {
        let confirmed = self.alarms.raise(step, from.peer);
        #[cfg(test)]
        let confirmed = confirmed || self.omit == Some(crate::sim::Omit::Alarms);
        let home = self.context.config.home;
        if confirmed || !self.context.members.is_expendable(from, home) {
            self.stop(reason, out);
        } else {
            self.member_lost(from, LossCause::Alarmed, out);
        }
    }
}
