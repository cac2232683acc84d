//! Peers that swap their stages: what they load, and how long a step takes.

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::{Bytes, Rate};

use super::corruption::Corruption;
use super::world::World;
use super::*;

const STAGES: u16 = 6;

/// Bytes of a stage's weights in these scenarios.
const WEIGHTS: u64 = 64 * 4;

/// A device with room for `stages` stages and their accumulators, which loads a stage's weights in this
/// time.
fn device(stages: u64, load: Duration) -> TierScenario {
    let rate = Rate((WEIGHTS as f64 / load.as_secs_f64()) as u64);
    TierScenario { memory: Bytes(stages * 3 * WEIGHTS), rate, element: ElementBytes::ADAMW }
}

fn peer(first: u16, last: u16, forward: Duration, tiers: Option<TierScenario>) -> PeerScenario {
    let compute = ComputeScenario::passes(forward, forward * 2, 20);
    let span = StageSpan { first: Stage(first), last: Stage(last) };
    let mut peer = PeerScenario::plain(StageChoice::Span(span), STAGES, compute);
    peer.limits.resident = if tiers.is_some() { 0 } else { usize::MAX };
    peer.tiers = tiers;
    peer
}

/// Peers with the first and the last stage, and one with the four between, whose loads take several passes.
/// A microbatch takes each of the three peers equally long. The peer in the middle gets its work over links.
fn trickle() -> Scenario {
    let forward = Duration::from_millis(20);
    let ends = forward * 4;
    let middle = peer(1, 4, forward, Some(device(2, forward * 4)));
    let peers = vec![peer(0, 0, ends, None), middle, peer(5, 5, ends, None)];
    let manifest = Scenario::small_manifest(STAGES, 32, 10);
    let network = NetworkScenario::even(Duration::from_millis(5), Duration::ZERO, None);
    Scenario::plain(manifest, peers, network)
}

/// Runs to the end. Returns what a step loads, in units of a stage's weights, and the time of the last
/// step's passes.
fn measured(scenario: &Scenario, omit: Omit) -> (u64, Duration) {
    let report = World::new(scenario, Corruption::Nothing, true).without(omit).run();
    let report = report.expect("no oracle objects");
    let alone = run(&scenario.alone()).expect("a peer alone");
    assert_eq!(report.checkpoint, alone.checkpoint);
    let (_, step) = report.steps.last_key_value().expect("the run has steps");
    let loads = report.swapped.loaded.0 / WEIGHTS / report.steps.len() as u64;
    (loads, step.last.since(step.first))
}

#[test]
fn a_stage_waits_for_more_of_its_work_while_a_change_costs_more() {
    let scenario = trickle();
    let (loads, time) = measured(&scenario, Omit::Nothing);
    let (without, longer) = measured(&scenario, Omit::LoadTimes);
    println!(
        "{loads} loads and {time:?} a step, {without} and {longer:?} if loads are not measured"
    );
    assert!(loads * 10 <= without * 8, "{loads} of {without}");
    assert!(time <= longer, "{time:?}, {longer:?}");
}

/// One peer with all stages and room for two: with enough microbatches the loads hide behind the passes, and
/// those of updates cost little.
#[test]
fn loads_hide_behind_the_passes_of_a_visit() {
    let forward = Duration::from_millis(20);
    let step = |tiers| {
        let manifest = Scenario::small_manifest(STAGES, 128, 6);
        let network = NetworkScenario::even(Duration::ZERO, Duration::ZERO, None);
        let peers = vec![peer(0, STAGES - 1, forward, tiers)];
        measured(&Scenario::plain(manifest, peers, network), Omit::Nothing).1
    };
    let (roomy, swapped) = (step(None), step(Some(device(2, forward * 4))));
    println!("a step takes {roomy:?} in memory and {swapped:?} swapped");
    assert!(swapped <= roomy * 11 / 10, "{swapped:?}, {roomy:?}");
}
