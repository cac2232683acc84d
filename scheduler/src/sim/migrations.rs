//! Why members change their stages, one small swarm for each reason.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::{MoveReason, StageChoice};
use shoal_protocol::units::Bytes;

use super::{
    ComputeScenario, Fault, Migrations, NetworkScenario, PeerScenario, Report, Scenario, run,
};
use crate::rebalance::Rebalance;

/// So many stages with replicas that are equally fast at first, and look for better places often. Each
/// stage's follow each other.
fn stages(replicas: &[usize]) -> Scenario {
    let forward = Duration::from_millis(100);
    let compute = ComputeScenario::passes(forward, forward * 2, 1);
    let stages = (0..).zip(replicas);
    let peers = stages.flat_map(|(stage, count)| (0..*count).map(move |_| Stage(stage)));
    // It may go anywhere, but begins here.
    let peer = |stage: Stage| PeerScenario {
        fits: [stage].into(),
        ..PeerScenario::plain(StageChoice::Auto, stage.0 + 1, compute.clone())
    };
    let mut manifest = Scenario::small_manifest(replicas.len() as u16, 24, 60);
    manifest.checkpoint.every = 4;
    let network = NetworkScenario::even(Duration::from_millis(1), Duration::ZERO, None);
    let mut scenario = Scenario::plain(manifest, peers.map(peer).collect(), network);
    scenario.rebalance = Rebalance::When { every: Duration::from_secs(5), gain: 100 };
    scenario
}

fn at(seconds: u64, faults: impl IntoIterator<Item = Fault>) -> Vec<(Duration, Fault)> {
    faults.into_iter().map(|fault| (Duration::from_secs(seconds), fault)).collect()
}

/// Runs it; the model must be that of a peer alone.
fn run_whole(scenario: &Scenario) -> Report {
    let report = run(scenario).expect("every oracle holds");
    let alone = run(&scenario.alone()).expect("a peer alone");
    assert!(report.finished && report.checkpoint == alone.checkpoint);
    report
}

fn one_done(reason: MoveReason) -> BTreeMap<MoveReason, Migrations> {
    BTreeMap::from([(reason, Migrations { begun: 1, done: 1, given_up: 0 })])
}

#[test]
fn where_members_are_gone_others_come() {
    let mut scenario = stages(&[3, 3]);
    scenario.faults.happen = at(30, [3, 4].map(|peer| Fault::Leave { peer }));
    let report = run_whole(&scenario);
    assert_eq!(report.migrations, one_done(MoveReason::MembersGone));
    assert_eq!(report.moves, 1);
}

/// Two of a stage are told to leave: another comes, once.
#[test]
fn where_members_are_about_to_leave_others_come() {
    let mut scenario = stages(&[3, 3]);
    scenario.faults.happen = at(30, [3, 4].map(|peer| Fault::Drain { peer }));
    scenario.faults.rebirth = Duration::from_secs(60);
    let report = run_whole(&scenario);
    let one = Migrations { begun: 1, done: 1, given_up: 0 };
    assert_eq!(report.migrations[&MoveReason::MembersGone], one);
}

#[test]
fn where_members_have_become_slow_others_come() {
    let mut scenario = stages(&[3, 3]);
    let time = Duration::from_secs(1 << 20);
    let slow = |peer| Fault::SlowPeer { peer, factor: 10, time };
    scenario.faults.happen = at(30, [3, 4].map(slow));
    let report = run_whole(&scenario);
    let uneven = report.migrations[&MoveReason::Uneven];
    assert!(uneven.done > 0, "{:?}", report.migrations);
    assert_eq!(report.migrations.len(), 1, "{:?}", report.migrations);
}

#[test]
fn where_nobody_is_left_another_begins_again() {
    let mut scenario = stages(&[3, 1]);
    scenario.rebalance = Rebalance::Never;
    scenario.faults.happen = at(30, [Fault::Leave { peer: 3 }]);
    let report = run_whole(&scenario);
    assert_eq!(report.migrations, one_done(MoveReason::StageLost));
    assert_eq!(report.recovery.rewinds, 1);
}

#[test]
fn who_dies_on_its_way_has_given_up() {
    let mut scenario = stages(&[4, 1]);
    // Its weights take so long to come that it dies before it has them.
    scenario.network.bandwidth = Some(1_000_000);
    scenario.snapshot = Bytes(20_000_000);
    scenario.faults.happen = at(33, [1, 2, 3].map(|peer| Fault::Leave { peer }));
    let report = run_whole(&scenario);
    let given_up = Migrations { begun: 1, done: 0, given_up: 1 };
    assert_eq!(report.migrations, BTreeMap::from([(MoveReason::Uneven, given_up)]));
}

/// Wherever four fast peers and two that are four times as slow begin, on three stages: moves lead to where as much
/// is got through as can be, which is five quarters of a fast one at each stage.
#[test]
fn unlike_members_come_to_the_optimum_from_anywhere() {
    const STEPS: u32 = 40;
    const LAST: usize = 8;
    const MICROBATCHES: u32 = 64;
    let slower = [1, 1, 1, 1, 4, 4];
    let begin = |number: u32| (0..6).map(move |index| (number / 3u32.pow(index) % 3) as u16);
    let all = (0..3u32.pow(6)).filter(|n| (0..3).all(|s| begin(*n).any(|place| place == s)));
    for number in all.step_by(7) {
        let mut scenario = stages(&[6]);
        let mut manifest = Scenario::small_manifest(3, MICROBATCHES, STEPS.into());
        manifest.checkpoint.every = 100;
        scenario.manifest = manifest.into();
        let parameters = [0, 1, 2].map(|stage| (Stage(stage), 8));
        scenario.parameters = parameters.into();
        for ((peer, place), slower) in scenario.peers.iter_mut().zip(begin(number)).zip(slower) {
            peer.fits = [Stage(place)].into();
            peer.compute.forward *= slower;
            peer.compute.backward *= slower;
        }
        let report = run_whole(&scenario);
        let ideal = Duration::from_millis(300) * MICROBATCHES * 4 / 5;
        let lasts: Vec<_> = report.steps.values().map(|step| step.last).collect();
        let last = lasts[lasts.len() - 1].since(lasts[lasts.len() - 1 - LAST]) / LAST as u32;
        let share = ideal.as_secs_f64() / last.as_secs_f64();
        let places: Vec<u16> = begin(number).collect();
        // A little is lost at a step's beginning and end.
        assert!(share >= 0.85, "{places:?}: {share:.3}, {} moves", report.moves);
    }
}
