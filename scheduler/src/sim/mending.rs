//! The cost of a death during an all-reduce: the lost member's part, not the whole round.

use std::time::Duration;

use shoal_protocol::message::StageChoice;

use super::peer_scenario::{ComputeScenario, PeerScenario};
use super::scenario::{Fault, NetworkScenario};
use super::{Mark, Report, Scenario, run};

const REPLICAS: usize = 8;

/// The member that dies; it is not the coordinator.
const DIES: usize = 5;

/// Replicas of a single stage whose steps consist mostly of all-reduces: their uplinks need a
/// minute for the data, after passes of seconds.
fn replicas() -> Scenario {
    let (forward, uplink) = (Duration::from_millis(100), 10_000_000);
    let compute = ComputeScenario {
        other: Duration::from_micros(100),
        ..ComputeScenario::passes(forward, forward * 2, 0)
    };
    let (near, jitter) = (Duration::from_millis(5), Duration::ZERO);
    let network =
        NetworkScenario { uplink: Some(uplink), ..NetworkScenario::even(near, jitter, None) };
    let manifest = Scenario::small_manifest(1, 4 * REPLICAS as u32, 2);
    let peer = PeerScenario::plain(StageChoice::All, 1, compute);
    let mut scenario = Scenario::plain(manifest, vec![peer; REPLICAS], network);
    scenario.weigh_stages(60 * uplink / 12);
    scenario
}

/// The end of the first step's passes, and the start of the second's.
fn round(report: &Report) -> (Duration, Duration) {
    let mut steps = report.steps.values();
    let (first, second) = (steps.next().expect("two steps"), steps.next().expect("two steps"));
    (first.last.since(<_>::default()), second.first.since(<_>::default()))
}

/// Asserts that a death at any time in a round is mended, with the result of a run without one, and costs at most this
/// percentage of the round.
fn assert_cheap(undisturbed: &Scenario, most: u32) {
    let report = run(undisturbed).expect("a run without faults");
    let (begins, ends) = round(&report);
    let whole = ends - begins;
    for percent in [10, 30, 50, 70, 90] {
        let mut scenario = undisturbed.clone();
        let crash = Fault::Crash { peer: DIES, restart: None, disk: false };
        scenario.faults.happen = vec![(begins + whole * percent / 100, crash)];
        let mended = run(&scenario).expect("no oracle objects");
        assert_eq!(mended.checkpoint, report.checkpoint);
        assert_eq!((mended.marks[Mark::RoundMended], mended.marks[Mark::RoundAborted]), (1, 0));
        let longer = round(&mended).1.saturating_sub(ends);
        println!("a round of {whole:?}, interrupted after {percent}%, takes {longer:?} longer");
        assert!(longer < whole * most / 100, "{longer:?} of {whole:?} at {percent}%");
    }
}

#[test]
fn a_death_in_a_round_costs_its_part_and_not_the_round() {
    assert_cheap(&replicas(), 33);
}

#[test]
fn a_death_in_a_round_of_islands_costs_its_part_and_its_islands_sums() {
    let mut islands = replicas();
    for (index, peer) in islands.peers.iter_mut().enumerate() {
        let name = if index < REPLICAS / 2 { "east" } else { "west" };
        peer.island = Some(name.parse().expect("a name"));
    }
    assert_cheap(&islands, 40);
}
