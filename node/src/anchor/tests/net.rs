//! Links that lose messages, keep them back, and can be cut.

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
    pub(super) ends: Mutex<BTreeMap<PeerId, Arc<Anchor>>>,
    /// From whom nothing comes to whom.
    pub(super) cut: Mutex<BTreeSet<(PeerId, PeerId)>>,
    /// The largest body that was carried.
    pub(super) largest: Mutex<usize>,
    /// Loses some messages and keeps some back, if there is any.
    pub(super) weather: Mutex<Option<ChaCha8Rng>>,
    pub(super) late: Mutex<Vec<(PeerId, PeerId, AnchorMessage)>>,
}

impl Net {
    /// Cuts a peer off all others, both ways, or lets it be heard again.
    pub(super) fn isolate(&self, one: PeerId, others: &[PeerId], isolated: bool) {
        let mut cut = self.cut.lock().expect("sound");
        for other in others.iter().filter(|other| **other != one) {
            for way in [(one, *other), (*other, one)] {
                if isolated {
                    cut.insert(way)
                } else {
                    cut.remove(&way)
                };
            }
        }
    }
}

impl Net {
    /// The messages that arrive now: one may be lost, or come much later.
    fn arriving(
        &self,
        from: PeerId,
        to: PeerId,
        message: AnchorMessage,
    ) -> Vec<(PeerId, PeerId, AnchorMessage)> {
        let mut weather = self.weather.lock().expect("sound");
        let Some(random) = &mut *weather else { return vec![(from, to, message)] };
        let mut late = self.late.lock().expect("sound");
        let mut now = Vec::new();
        match random.next_u32() % 32 {
            0 => {}
            1..=2 => late.push((from, to, message)),
            _ => now.push((from, to, message)),
        }
        if !late.is_empty() && random.next_u32().is_multiple_of(16) {
            let one = random.next_u32() as usize % late.len();
            now.push(late.swap_remove(one));
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
            if self.net.cut.lock().expect("sound").contains(&(from, to)) {
                continue;
            }
            let mut largest = self.net.largest.lock().expect("sound");
            *largest = message.body.len().max(*largest);
            drop(largest);
            let end = self.net.ends.lock().expect("sound").get(&to).cloned();
            if let Some(end) = end {
                end.heard(from, message);
            }
        }
    }
}
