//! Small swarms in which members change their stages, one for each reason.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Stage, WeightGroup};
use shoal_protocol::message::{MoveReason, StageChoice, StageRoom};
use shoal_protocol::units::{Bytes, Rate};

use super::{
    ComputeScenario, ElementBytes, Fault, Mark, Migrations, NetworkScenario, PeerScenario, Report,
    Scenario, TierScenario, run,
};
use crate::coordinator::placing::rebalance::Rebalance;

/// Stages with these numbers of replicas, which are equally fast at first and are rebalanced often.
/// The replicas of a stage have consecutive indices.
fn stages(replicas: &[usize]) -> Scenario {
    let forward = Duration::from_millis(100);
    let compute = ComputeScenario::passes(forward, forward * 2, 1);
    let stages = (0..).zip(replicas);
    let peers = stages.flat_map(|(stage, count)| (0..*count).map(move |_| Stage(stage)));
    // It may host any stage, but begins here.
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

/// Runs a scenario; the model must equal that of a single peer.
fn run_whole(scenario: &Scenario) -> Report {
    let report = run(scenario).expect("no oracle objects");
    let alone = run(&scenario.alone()).expect("a peer alone");
    assert!(report.finished && report.checkpoint == alone.checkpoint);
    report
}

fn one_done(reason: MoveReason) -> BTreeMap<MoveReason, Migrations> {
    BTreeMap::from([(reason, Migrations { begun: 1, done: 1, given_up: 0 })])
}

#[test]
fn lost_members_are_replaced() {
    let mut scenario = stages(&[3, 3]);
    // Not right before a comparison, whose measurements would be those from before.
    scenario.faults.happen = at(32, [3, 4].map(|peer| Fault::Leave { peer }));
    let report = run_whole(&scenario);
    assert_eq!(report.migrations, one_done(MoveReason::MembersGone));
    assert_eq!(report.marks[Mark::Moved], 1);
}

/// Two members of a stage leave: one replaces them, once.
#[test]
fn leaving_members_are_replaced() {
    let mut scenario = stages(&[3, 3]);
    scenario.faults.happen = at(30, [3, 4].map(|peer| Fault::Drain { peer }));
    scenario.faults.rebirth = Duration::from_secs(60);
    let report = run_whole(&scenario);
    let one = Migrations { begun: 1, done: 1, given_up: 0 };
    assert_eq!(report.migrations[&MoveReason::MembersGone], one);
}

#[test]
fn slow_stages_get_more_members() {
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
fn a_lost_stage_gets_another_member() {
    let mut scenario = stages(&[3, 1]);
    scenario.rebalance = Rebalance::Never;
    scenario.faults.happen = at(30, [Fault::Leave { peer: 3 }]);
    let report = run_whole(&scenario);
    assert_eq!(report.migrations, one_done(MoveReason::StageLost));
    assert_eq!(report.marks[Mark::Rewound], 1);
}

#[test]
fn the_death_of_a_moving_member_cancels_its_move() {
    let mut scenario = stages(&[4, 1]);
    // Its weights take so long to arrive that it dies before.
    scenario.network.bandwidth = Some(1_000_000);
    scenario.snapshot.size = Bytes(20_000_000);
    scenario.faults.happen = at(33, [1, 2, 3].map(|peer| Fault::Leave { peer }));
    let report = run_whole(&scenario);
    let given_up = Migrations { begun: 1, done: 0, given_up: 1 };
    assert_eq!(report.migrations, BTreeMap::from([(MoveReason::Uneven, given_up)]));
}

/// Six peers at the given stages of three, four fast and two that are four times slower.
fn unequal(begin: [u16; 6], microbatches: u32, steps: u64) -> Scenario {
    let mut scenario = stages(&[6]);
    let mut manifest = Scenario::small_manifest(3, microbatches, steps);
    manifest.checkpoint.every = 100;
    scenario.manifest = manifest.into();
    scenario.parameters = [0, 1, 2].map(|stage| (WeightGroup(stage), 8)).into();
    for ((peer, place), slower) in scenario.peers.iter_mut().zip(begin).zip([1, 1, 1, 1, 4, 4]) {
        peer.fits = [Stage(place)].into();
        peer.compute.forward *= slower;
        peer.compute.backward *= slower;
    }
    scenario
}

/// The throughput of each of the last steps relative to the optimum, if the run ended with the best
/// placement: five quarters of a fast peer at each stage.
fn shares_of_last_steps(scenario: &Scenario, last: usize) -> (Vec<f64>, Report) {
    let report = run_whole(scenario);
    let ideal = Duration::from_millis(300) * scenario.manifest.training.microbatches * 4 / 5;
    let ends: Vec<_> = report.steps.values().map(|step| step.last).collect();
    let ends = &ends[ends.len() - 1 - last..];
    let took = ends.windows(2).map(|both| both[1].since(both[0]));
    (took.map(|took| ideal.as_secs_f64() / took.as_secs_f64()).collect(), report)
}

/// From any initial placement, moves lead to the largest throughput.
#[test]
fn unequal_members_reach_the_optimum_from_any_placement() {
    let begin = |number: u32| [0, 1, 2, 3, 4, 5].map(|index| (number / 3u32.pow(index) % 3) as u16);
    let all = (0..3u32.pow(6)).filter(|n| (0..3).all(|s| begin(*n).contains(&s)));
    for number in all.step_by(61) {
        let (shares, report) = shares_of_last_steps(&unequal(begin(number), 64, 40), 8);
        let mean = 8.0 / shares.iter().map(|share| 1.0 / share).sum::<f64>();
        // A little is lost at the beginning and end of a step.
        assert!(
            mean >= 0.88,
            "{:?}: {mean:.3}, {} moves",
            begin(number),
            report.marks[Mark::Moved]
        );
    }
}

/// Work that a fast member releases at the end of a step for an idle slow one is granted at once.
#[test]
fn work_released_for_another_member_is_granted_at_once() {
    for seed in 0..3 {
        for begin in [[0, 1, 1, 2, 0, 2], [0, 0, 2, 2, 1, 1]] {
            let scenario = Scenario { seed, ..unequal(begin, 128, 20) };
            let (shares, _) = shares_of_last_steps(&scenario, 8);
            let least = shares.into_iter().fold(1.0, f64::min);
            assert!(least >= 0.85, "seed {seed}, {begin:?}: {least:.3} in a step");
        }
    }
}

/// Has peers hold one stage of two in memory, and swap over a link of this rate.
fn swap(peers: &mut [PeerScenario], swap_rate: Rate) {
    for peer in peers {
        let element = ElementBytes::ADAMW;
        // A stage of 64 numbers with its accumulators.
        let memory = Bytes(64 * (element.weights + element.moments + 2 * element.sums));
        peer.tiers = Some(TierScenario { memory, rate: swap_rate, element });
        peer.limits.resident = 1;
        peer.room = StageRoom { in_memory: 1, most: 2, swap_rate };
        peer.longest = 2;
    }
}

/// Nobody else comes: the member beside the lost stage hosts it too, and swaps both.
#[test]
fn a_lost_stage_is_taken_beside_another_and_swapped() {
    let mut scenario = stages(&[1, 1]);
    swap(&mut scenario.peers, Rate(1_000_000));
    scenario.extend_after = Duration::from_secs(10);
    scenario.rebalance = Rebalance::Never;
    scenario.faults.happen = at(30, [Fault::Leave { peer: 1 }]);
    let report = run_whole(&scenario);
    assert_eq!(report.migrations, one_done(MoveReason::StageLost));
    assert_eq!(report.marks[Mark::Extended], 1);
    assert!(report.swapped.loaded > Bytes(0));
    // Without its patience the run would not end.
    scenario.extend_after = super::scenario::NO_EXTENSION;
    let violation = run(&scenario).expect_err("nobody hosts the stage");
    assert_eq!(violation.oracle, "progress");
}

/// A peer begins alone with both stages, of which it swaps one. When another comes, each gets one.
#[test]
fn a_lone_peer_swaps_until_another_comes() {
    let mut scenario = stages(&[1, 1]);
    swap(&mut scenario.peers, Rate(100));
    scenario.extend_after = Duration::from_secs(5);
    scenario.peers[1].start = None;
    scenario.faults.happen = at(60, [Fault::Join { peer: 1 }]);
    let report = run_whole(&scenario);
    assert_eq!(report.marks[Mark::Extended], 1);
    assert_eq!(report.migrations[&MoveReason::Span].done, 1, "{:?}", report.migrations);
    let times: Vec<_> = report.steps.values().map(|step| step.last.since(step.first)).collect();
    let [alone, both] = [times[1], times[times.len() - 1]];
    assert!(both < alone / 2, "{both:?} instead of {alone:?}");
}

/// Links of 50 ms each way and this rate, which also limits all that a peer sends.
fn links_of(rate: Rate) -> NetworkScenario {
    NetworkScenario {
        bandwidth: Some(rate.0),
        uplink: Some(rate.0),
        ..NetworkScenario::even(Duration::from_millis(50), Duration::ZERO, None)
    }
}

/// Four peers with room for all four stages, over links of 20 Mb/s and 50 ms: a microbatch takes 0.3 s at a stage, and
/// its activation and gradient 0.8 s to the next one.
fn far_apart(gradient: Bytes) -> Scenario {
    let forward = Duration::from_millis(100);
    let compute = ComputeScenario::passes(forward, forward * 2, 1);
    let peer = |_| PeerScenario {
        room: StageRoom::in_memory(4),
        longest: 4,
        ..PeerScenario::plain(StageChoice::Auto, 4, compute.clone())
    };
    let mut manifest = Scenario::small_manifest(4, 16, 60);
    manifest.model.hidden = 1_000_000 / (4 * manifest.model.context);
    let network = links_of(Rate(2_500_000));
    let mut scenario = Scenario::plain(manifest, (0..4).map(peer).collect(), network);
    scenario.weigh_stages(gradient.0 / 4);
    scenario
}

#[test]
fn members_over_slow_links_get_longer_spans() {
    let short = far_apart(Bytes(1_000_000));
    let mut changing = short.clone();
    changing.rebalance = Rebalance::When { every: Duration::from_secs(30), gain: 100 };
    let (short, changing) = (run_whole(&short), run_whole(&changing));
    let done = changing.migrations[&MoveReason::Span].done;
    assert_eq!(changing.migrations.len(), 1, "{:?}", changing.migrations);
    assert!(done >= 4, "{done}");
    let [before, after] = [short, changing].map(|report| report.step_time().as_secs_f64());
    assert!(after < 0.8 * before, "{after} s instead of {before} s");
}

#[test]
fn members_with_large_sums_keep_short_spans_or_get_them() {
    let mut large = far_apart(Bytes(20_000_000));
    large.rebalance = Rebalance::When { every: Duration::from_secs(30), gain: 100 };
    assert_eq!(run_whole(&large).migrations, BTreeMap::new());
    // The first one begins alone, with all stages.
    for (place, peer) in large.peers.iter_mut().enumerate().skip(1) {
        peer.start = None;
        large.faults.happen.extend(at(5, [Fault::Join { peer: place }]));
    }
    let report = run_whole(&large);
    assert_eq!(report.migrations, one_done(MoveReason::Span));
}

/// Windows that were as wide as links needed do not give a member more than its part afterwards.
#[test]
fn members_that_get_all_stages_are_as_fast_as_those_that_begin_with_them() {
    let pass = Duration::from_micros(18_750);
    let compute = ComputeScenario::passes(pass, pass, 1);
    let last_step = |choice, every| {
        let peer = |stage| PeerScenario {
            fits: [Stage(stage)].into(),
            room: StageRoom::in_memory(4),
            longest: 4,
            ..PeerScenario::plain(choice, 4, compute.clone())
        };
        let mut manifest = Scenario::small_manifest(4, 64, 20);
        manifest.model.hidden = 131_072 / (4 * manifest.model.context);
        let network = links_of(Rate(12_500_000));
        let mut scenario = Scenario::plain(manifest, (0..4).map(peer).collect(), network);
        scenario.weigh_stages(50_000);
        scenario.rebalance = Rebalance::When { every: Duration::from_secs(every), gain: 100 };
        let report = run_whole(&scenario);
        let done = report.migrations.get(&MoveReason::Span).map_or(0, |moves| moves.done);
        let (_, last) = report.steps.last_key_value().expect("the run has steps");
        (done, last.last.since(last.first))
    };
    let (moves, begun) = last_step(StageChoice::All, 10);
    assert_eq!(moves, 0);
    let (moves, changed) = last_step(StageChoice::Auto, 10);
    assert_eq!(moves, 4);
    assert!(changed <= begun * 21 / 20, "{changed:?} instead of {begun:?}");
}
