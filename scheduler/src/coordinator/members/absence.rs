//! How long a peer stays away after its own fault.
//!
//! One that lies is found out at once, and would come back at once to lie again. So each time it stays away twice as
//! long, and the others get on meanwhile.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::PeerId;
use shoal_protocol::units::Moment;

/// Peers that are remembered. Beyond them the one that may come back first is forgotten.
const MOST: usize = 4096;

/// How often an absence doubles: the next ones are no longer.
const DOUBLINGS: u32 = 10;

/// A peer's faults and its absence.
#[derive(Debug, Clone, Copy)]
struct Absence {
    faults: u32,
    until: Moment,
}

/// The peers that were expelled by their own fault.
#[derive(Debug, Default)]
pub(super) struct Absences {
    peers: BTreeMap<PeerId, Absence>,
}

impl Absences {
    /// A peer is expelled by its own fault. Returns for how long, given the shortest absence.
    pub(super) fn begin(&mut self, peer: PeerId, now: Moment, shortest: Duration) -> Duration {
        let faults = self.peers.get(&peer).map_or(0, |known| known.faults) + 1;
        let lasts = shortest * (1 << (faults - 1).min(DOUBLINGS));
        self.peers.insert(peer, Absence { faults, until: now + lasts });
        if self.peers.len() > MOST {
            let first = self.peers.iter().min_by_key(|(_, absence)| absence.until);
            let first = first.map(|(peer, _)| *peer);
            first.map(|peer| self.peers.remove(&peer));
        }
        lasts
    }

    /// Whether a peer may not come back yet.
    pub(super) fn contains(&self, peer: PeerId, now: Moment) -> bool {
        self.peers.get(&peer).is_some_and(|absence| now < absence.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_absence_is_twice_as_long_as_the_one_before_up_to_a_limit() {
        let mut absences = Absences::default();
        let (peer, shortest) = (PeerId([1; 32]), Duration::from_secs(1));
        let mut now = Moment::default();
        for lasts in [1, 2, 4] {
            assert_eq!(absences.begin(peer, now, shortest), Duration::from_secs(lasts));
            let last = now + (Duration::from_secs(lasts) - Duration::from_nanos(1));
            assert!(absences.contains(peer, last) && !absences.contains(PeerId([2; 32]), last));
            now = now + Duration::from_secs(lasts);
            assert!(!absences.contains(peer, now), "it is over");
        }
        for _ in 0..100 {
            absences.begin(peer, now, shortest);
        }
        assert_eq!(absences.begin(peer, now, shortest), Duration::from_secs(1 << DOUBLINGS));
    }

    #[test]
    fn no_more_peers_are_remembered_than_the_limit() {
        let mut absences = Absences::default();
        let peer = |number: usize| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&number.to_le_bytes());
            PeerId(id)
        };
        let now = Moment::default();
        for number in 0..MOST + 2 {
            let now = now + Duration::from_secs(number as u64);
            absences.begin(peer(number), now, Duration::from_secs(1));
        }
        assert_eq!(absences.peers.len(), MOST);
        assert!(!absences.peers.contains_key(&peer(1)) && absences.peers.contains_key(&peer(2)));
    }
}
