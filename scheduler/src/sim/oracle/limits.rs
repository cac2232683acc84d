//! Counts and bytes in flight, queued and logged stay within their limits.

use shoal_protocol::units::Bytes;

use crate::action::PeerLoad;
use crate::round::{UNPLACED, most_ahead, piece_bytes};
use crate::sim::scenario::Scenario;

/// The limits of every peer.
#[derive(Debug)]
pub(in crate::sim) struct Limits {
    peers: Vec<PeerLimit>,
}

#[derive(Debug)]
struct PeerLimit {
    largest_window: usize,
    offers: usize,
    in_flight: Bytes,
    /// By stage.
    logged: Vec<Bytes>,
    rounds: Bytes,
    heard: Bytes,
}

impl Limits {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let members = scenario.peers.len();
        let groups = scenario.parameters.len() as u64;
        let logged = |stage| scenario.manifest.output_log_bytes(stage);
        let limit = |peer: &crate::sim::peer_scenario::PeerScenario| {
            let limits = &peer.limits;
            // The most that the others may have in flight to this peer: from each as many pieces as
            // its own limit allows, and as many results.
            let piece = piece_bytes(limits.cut, scenario.manifest.codec.all_reduce);
            let pieces = scenario
                .peers
                .iter()
                .map(|other| u64::from(most_ahead(piece, other.limits.round_bytes, members)))
                .sum::<u64>()
                + members as u64 * u64::from(most_ahead(piece, limits.round_bytes, members));
            PeerLimit {
                largest_window: limits.largest_windows.iter().copied().max().unwrap_or_default(),
                offers: limits.offers,
                in_flight: limits.in_flight,
                logged: scenario.manifest.stages().map(logged).collect(),
                heard: limits.heard,
                // The engine may still use an aborted round when the next one begins.
                rounds: Bytes(groups * pieces * piece.0 * 2 + UNPLACED as u64 * piece.0.max(32)),
            }
        };
        Self { peers: scenario.peers.iter().map(limit).collect() }
    }

    pub(in crate::sim) fn check(&self, index: usize, load: &PeerLoad) -> Result<(), String> {
        let limit = &self.peers[index];
        let counts = load.accepted.iter().all(|(stage, accepted)| {
            let window = load.window[stage];
            *accepted <= window && window <= limit.largest_window
        });
        let queued = load.waiting.values().all(|waiting| *waiting <= limit.offers);
        let logged = load.window.keys().map(|stage| limit.logged[usize::from(stage.0)]).sum();
        let bytes = load.in_flight <= limit.in_flight
            && load.logged <= logged
            && load.rounds <= limit.rounds
            && load.heard <= limit.heard;
        if counts && queued && bytes {
            Ok(())
        } else {
            Err(format!("peer {index} holds {load:?}, its limits are {limit:?}"))
        }
    }
}
