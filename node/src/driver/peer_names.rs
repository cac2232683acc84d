//! Names of peers for log lines and events.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use shoal_formats::words::title;
use shoal_protocol::ids::{Member, PeerId};
use shoal_protocol::message::View;
use shoal_protocol::plain_name::PeerName;

/// The most names of peers that are no members any more, beside as many as there are members.
const SPARE: usize = 64;

/// Names of members, and of some that are gone: their loss is yet to be reported. Clones share the names.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerNames(Arc<RwLock<BTreeMap<PeerId, PeerName>>>);

impl PeerNames {
    /// Takes in the names of a membership.
    pub(super) fn note(&self, view: &View) {
        let mut names = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if names.len() > 2 * view.members.len() + SPARE {
            names.retain(|peer, _| view.of_peer(*peer).is_some());
        }
        for record in &view.members {
            if let Some(name) = &record.name {
                names.insert(record.member.peer, name.clone());
            }
        }
    }

    /// Takes in the name of a peer that is about to be a member.
    pub(super) fn add(&self, peer: PeerId, name: PeerName) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(peer, name);
    }

    /// The name of a peer, if it has one.
    pub(super) fn of(&self, peer: PeerId) -> Option<PeerName> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&peer).cloned()
    }

    /// A peer for people: `gpu-7 (JrKP92)`, or `JrKP92` without a name.
    pub(crate) fn title(&self, peer: PeerId) -> String {
        title(peer, self.of(peer).as_ref())
    }

    /// A life of a peer for people: `gpu-7 (JrKP92)#2`.
    pub(super) fn member(&self, member: Member) -> String {
        format!("{}#{}", self.title(member.peer), member.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::Incarnation;

    use super::*;

    #[test]
    fn a_peer_has_its_name_as_soon_as_it_is_known() {
        let names = PeerNames::default();
        let logs = names.clone();
        let peer = PeerId([7; 32]);
        let member = Member { peer, incarnation: Incarnation(2) };
        assert_eq!(logs.member(member), member.to_string());
        names.add(peer, "gpu-7".parse().expect("a name"));
        assert_eq!(logs.title(peer), format!("gpu-7 ({})", peer.short()));
        assert_eq!(logs.member(member), format!("gpu-7 ({})#2", peer.short()));
        names.note(&View::default());
        assert!(logs.of(peer).is_some(), "its loss is yet to be reported");
    }

    #[test]
    fn names_of_peers_that_are_gone_are_bounded() {
        let names = PeerNames::default();
        for number in 0..=SPARE as u8 {
            names.add(PeerId([number; 32]), "gpu".parse().expect("a name"));
        }
        names.note(&View::default());
        assert_eq!(names.of(PeerId([0; 32])), None);
    }
}
