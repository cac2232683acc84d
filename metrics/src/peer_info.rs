//! The name, the place and the devices of the peer, as labels.

use prometheus::IntGaugeVec;

/// A gauge that is 1, whose labels name the peer. Queries join it by `instance`.
#[derive(Debug, Clone)]
pub struct PeerInfo(pub(crate) IntGaugeVec);

impl PeerInfo {
    pub(crate) const LABELS: &'static [&'static str] = &["hardware", "island", "name", "peer"];

    /// Sets this peer's name, the end of its identifier, the island of peers that it is in (empty where it has
    /// none), and what it computes on.
    pub fn set(&self, name: &str, peer: &str, island: &str, hardware: &str) {
        self.0.reset();
        self.0.with_label_values(&[hardware, island, name, peer]).set(1);
    }
}
