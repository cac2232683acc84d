//! Links that lose or delay messages, and can be cut.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;
use shoal_protocol::ids::PeerId;
use shoal_protocol::message::AnchorMessage;

use super::{Anchor, Links};

/// The links between the anchors of one test.
#[derive(Default)]
pub(super) struct Net {
    pub(super) anchors: Mutex<BTreeMap<PeerId, Arc<Anchor>>>,
    /// Cut links, as sender and receiver.
    pub(super) cut: Mutex<BTreeSet<(PeerId, PeerId)>>,
    /// Size of the largest body carried.
    pub(super) largest: Mutex<usize>,
    /// Loses and delays some messages at random, if set.
    pub(super) random_faults: Mutex<Option<ChaCha8Rng>>,
    pub(super) delayed: Mutex<Vec<(PeerId, PeerId, AnchorMessage)>>,
}

impl Net {
    /// Cuts all links of a peer in both directions, or restores them.
    pub(super) fn isolate(&self, one: PeerId, others: &[PeerId], isolated: bool) {
        let mut cut = self.cut.lock().expect("valid");
        for other in others.iter().filter(|other| **other != one) {
            for link in [(one, *other), (*other, one)] {
                if isolated {
                    cut.insert(link)
                } else {
                    cut.remove(&link)
                };
            }
        }
    }
}

impl Net {
    /// The messages to deliver now. One may be lost, or delivered much later.
    fn arriving(
        &self,
        from: PeerId,
        to: PeerId,
        message: AnchorMessage,
    ) -> Vec<(PeerId, PeerId, AnchorMessage)> {
        let mut random_faults = self.random_faults.lock().expect("valid");
        let Some(random) = &mut *random_faults else { return vec![(from, to, message)] };
        let mut delayed = self.delayed.lock().expect("valid");
        let mut now = Vec::new();
        match random.next_u32() % 32 {
            0 => {}
            1..=2 => delayed.push((from, to, message)),
            _ => now.push((from, to, message)),
        }
        if !delayed.is_empty() && random.next_u32().is_multiple_of(16) {
            let one = random.next_u32() as usize % delayed.len();
            now.push(delayed.swap_remove(one));
        }
        now
    }
}

pub(super) struct End {
    pub(super) net: Arc<Net>,
    pub(super) me: PeerId,
}

impl Links for End {
    fn send(&self, to: PeerId, message: AnchorMessage) {
        for (from, to, message) in self.net.arriving(self.me, to, message) {
            if self.net.cut.lock().expect("valid").contains(&(from, to)) {
                continue;
            }
            let mut largest = self.net.largest.lock().expect("valid");
            *largest = message.body.len().max(*largest);
            drop(largest);
            let end = self.net.anchors.lock().expect("valid").get(&to).cloned();
            if let Some(end) = end {
                let _ = end.heard(from, message);
            }
        }
    }
}
