//! Since when peers take part in a run, and who may not any more.

use std::collections::BTreeMap;

use crate::ids::{PeerId, Step};
use crate::message::Conviction;

/// The peers that the log has listed, and those whose work was wrong.
#[derive(Debug, Clone, PartialEq, Default, bincode::Encode, bincode::Decode)]
pub struct Stays {
    /// The version at which each peer became a member first. Nothing of its work is in that version.
    since: BTreeMap<PeerId, Step>,
    /// The peers whose work was wrong.
    convicted: BTreeMap<PeerId, Conviction>,
}

impl Stays {
    /// The log lists a peer at a version.
    pub fn list(&mut self, peer: PeerId, version: Step) {
        self.since.entry(peer).or_insert(version);
    }

    /// The run goes back to a version: what peers did after it counts no more, and they may do it again.
    pub fn rewind(&mut self, version: Step) {
        self.since.values_mut().for_each(|since| *since = version.min(*since));
    }

    /// A peer's work was wrong.
    pub fn convict(&mut self, conviction: &Conviction) {
        self.convicted.insert(conviction.peer, conviction.clone());
    }

    /// The newest version that nothing of a peer's work is in; `now` if it was never a member.
    #[must_use]
    pub fn since(&self, peer: PeerId, now: Step) -> Step {
        self.since.get(&peer).copied().unwrap_or(now)
    }

    /// Why a peer is out of the run.
    #[must_use]
    pub fn conviction(&self, peer: PeerId) -> Option<&Conviction> {
        self.convicted.get(&peer)
    }

    /// All peers that are out of the run.
    pub fn convictions(&self) -> impl Iterator<Item = &Conviction> {
        self.convicted.values()
    }
}
