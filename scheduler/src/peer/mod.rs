//! One peer's decisions.

mod config;

pub use config::{PeerConfig, PeerLimits, RoundCut};
use shoal_protocol::units::Moment;

use crate::action::{PeerAction, PeerInput, PeerLoad};

/// One peer's decisions: the life of every microbatch that passes through it, and its part in
/// rounds and commits.
#[derive(Debug)]
pub struct Peer {
    config: PeerConfig,
}

impl Peer {
    /// A peer that is not a member yet.
    #[must_use]
    pub fn new(config: PeerConfig) -> Self {
        Self { config }
    }

    /// Asks to be admitted. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<PeerAction>) {
        let _ = (now, out, &self.config);
    }

    /// Takes in what happened and adds what is to be done, in order, to `out`.
    pub fn handle(&mut self, now: Moment, input: PeerInput, out: &mut Vec<PeerAction>) {
        let _ = (now, input, out);
    }

    /// When a `Tick` is due, if nothing else happens before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        None
    }

    /// What the peer holds now.
    #[must_use]
    pub fn load(&self) -> PeerLoad {
        PeerLoad::default()
    }
}
