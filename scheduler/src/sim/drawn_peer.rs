//! The peers of a scenario from a seed.

use std::num::NonZeroU16;
use std::time::Duration;

use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_protocol::plain_name::IslandName;
use shoal_protocol::units::Bytes;

use super::peer_scenario::{Clock, ComputeScenario, PeerScenario};
use super::scenario::ELEMENTS;
use crate::peer::PeerLimits;
use crate::rng::Rng;
use crate::round::RoundCut;

/// A peer of a region that is there from about the beginning.
pub(super) fn peer(
    rng: &mut Rng,
    manifest: &Manifest,
    cut: RoundCut,
    choice: StageChoice,
    region: usize,
) -> PeerScenario {
    let forward = rng.microseconds(200..=20_000) * rng.pick(&[1, 1, 1, 4]);
    PeerScenario {
        choice,
        fits: manifest.stages().collect(),
        room: StageRoom::in_memory(2),
        longest: 1,
        limits: limits(rng, manifest, cut),
        start: Some(rng.microseconds(0..=100_000)),
        compute: ComputeScenario {
            forward,
            backward: forward * 2,
            splits: true,
            other: rng.microseconds(1..=500),
            jitter_per_mille: rng.pick(&[0, 100, 1000]),
        },
        devices: NonZeroU16::MIN,
        divides_stages: false,
        tiers: None,
        island: None,
        archive: false,
        region,
        clock: Clock::default(),
    }
}

/// The number of devices, and whether they divide the stages. A peer that swaps its stages has one.
pub(super) fn devices(seed: u64, index: u64, limits: &PeerLimits) -> (NonZeroU16, bool) {
    let mut rng = Rng::new(seed ^ (index + 1) << 40 ^ 0x6465_7669);
    let further = if limits.resident < usize::MAX { 0 } else { rng.pick(&[0, 0, 1, 3]) };
    (NonZeroU16::MIN.saturating_add(further), further > 0 && rng.chance(400))
}

/// In half of all scenarios most peers are in one of a few islands.
pub(super) fn island(seed: u64, index: u64) -> Option<IslandName> {
    let mut rng = Rng::new(seed ^ 0x6973_6c61_6e64_0000);
    let (some, islands) = (rng.chance(500), rng.within(1..=4));
    let mut rng = Rng::new(seed ^ (index + 1) << 24 ^ 0x6973_6c61_6e64_0000);
    let name = format!("island-{}", rng.within(1..=islands));
    (some && rng.chance(800)).then(|| name.parse().expect("a short name"))
}

fn limits(rng: &mut Rng, manifest: &Manifest, cut: RoundCut) -> PeerLimits {
    // Size of one microbatch at one stage: activation with labels, and gradient.
    let training = &manifest.training;
    let unit = (manifest.activation_bytes() + manifest.gradient_bytes()).0;
    let (stages, groups) = (u64::from(training.stages), manifest.weight_groups().count() as u64);
    // The steps that can run, and the one whose work is granted before the first of them ends.
    let steps = manifest.steps_at_once() + 1;
    let first_window = rng.within(1..=4) as usize;
    PeerLimits {
        first_window,
        first_swapped_window: first_window,
        largest_windows: vec![rng.pick(&[1, 2, 4, 64])],
        offers: rng.pick(&[0, 1, 3, 64]),
        askers: rng.pick(&[1, 4, 64]),
        cell: rng.pick(&[1, 3, 64]),
        in_flight: Bytes(unit * stages * steps * rng.pick(&[1, 3, 64])),
        // Room for the results of at least two steps.
        heard: Bytes(8 * ELEMENTS * groups * rng.pick(&[2, 3, 1000])),
        round_bytes: Bytes(8 * cut.piece_elements as u64 * rng.within(0..=8)),
        cut,
        retry: Duration::from_millis(rng.pick(&[100, 700, 2000])),
        resident: rng.pick(&[usize::MAX, usize::MAX, 0]),
    }
}
