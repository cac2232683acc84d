//! Tests of the time that steps take: how busy peers are, what an all-reduce costs, and stragglers.

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan, WeightGroup};
use shoal_protocol::manifest::{DistanceCodec, InnerLoop, InnerMoments};
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Moment;

use super::corruption::Corruption;
use super::world::World;
use super::*;

/// A pipeline of equal peers, one per stage: forward 1, backward 2, and a latency of `latency`
/// tenths of a forward pass between any two.
fn pipeline(stages: u16, microbatches: u32, latency: u32) -> Scenario {
    let forward = Duration::from_millis(100);
    let regions = usize::from(stages);
    let away =
        |from: usize, to: usize| if from == to { Duration::ZERO } else { forward * latency / 10 };
    let network = NetworkScenario {
        latency: (0..regions).map(|from| (0..regions).map(|to| away(from, to)).collect()).collect(),
        ..NetworkScenario::even(Duration::ZERO, Duration::ZERO, None)
    };
    let passes = ComputeScenario::passes(forward, forward * 2, 0);
    let compute = ComputeScenario { other: Duration::ZERO, ..passes };
    let host = |stage| PeerScenario {
        region: usize::from(stage),
        ..PeerScenario::plain(
            StageChoice::Span(StageSpan::one(Stage(stage))),
            stages,
            compute.clone(),
        )
    };
    let manifest = Scenario::small_manifest(stages, microbatches, 8);
    Scenario::plain(manifest, (0..stages).map(host).collect(), network)
}

/// The fraction of the time between the first and last pass of the last step that all peers
/// compute; by then the windows have their final width.
fn utilisation(scenario: &Scenario) -> f64 {
    let report = run(scenario).expect("a pipeline without faults");
    let (_, step) = report.steps.last_key_value().expect("the run has steps");
    let whole = step.last.since(step.first) * scenario.peers.len() as u32;
    step.busy.as_secs_f64() / whole.as_secs_f64()
}

/// A worker of `m` microbatches an update in `p` stages: 1F1B and GPipe with a flush after every update compute
/// m / (m + p - 1) of the time. Its last exchange, which has no pass, is modelled as long as one.
#[test]
fn the_pipeline_of_a_worker_is_as_full_as_one_that_is_flushed_after_every_update() {
    let (stages, microbatches, updates) = (4, 16, 8);
    let mut scenario = pipeline(stages, 1, 0);
    let mut manifest = (*scenario.manifest).clone();
    let optimizer = manifest.optimizer.clone();
    let (codec, moments) = (DistanceCodec::F32, InnerMoments::Zero);
    manifest.inner =
        Some(InnerLoop { steps: updates, microbatches, optimizer, codec, moments, overlap: 0 });
    manifest.model.block.tied = false;
    scenario.manifest = manifest.into();
    let of_update = f64::from(microbatches) / f64::from(microbatches + u32::from(stages) - 1);
    let found = utilisation(&scenario);
    println!("utilisation {found:.3}, of an update {of_update:.3}");
    assert!((0.9 * of_update..=of_update).contains(&found), "{found} of {of_update}");
}

/// Compared with 1F1B and GPipe for p = 4, m = 16, F = 1, B = 2 (closed-form schedules: all three
/// need (m + p - 1)(F + B) without latency; GPipe adds 2(p - 1) one-way latencies).
#[test]
fn the_windowed_schedule_matches_1f1b_at_low_latency_and_gpipe_at_high_latency() {
    let one_way = [0, 5, 10, 40];
    let all = one_way.map(|latency| utilisation(&pipeline(4, 16, latency)));
    println!("utilisation at one-way latencies 0, 0.5, 1, 4: {all:.3?}");
    let one_f_one_b = [0.842, 0.676, 0.565, 0.284];
    let gpipe = [0.842, 0.800, 0.762, 0.593];
    assert!(all[0] >= 0.95 * one_f_one_b[0], "{all:?}");
    for (ours, theirs) in all.iter().zip(gpipe) {
        assert!(*ours >= 0.95 * theirs, "{all:?}");
    }
}

/// Two stages of four replicas each, with speeds in the ratio 4 : 2 : 1 : 1, over links with a
/// latency of a tenth of the fastest forward pass.
#[test]
fn unequal_replicas_share_the_work_and_stay_busy() {
    let mut scenario = pipeline(2, 64, 1);
    let two = scenario.peers.clone();
    scenario.peers = [1, 2, 4, 4]
        .into_iter()
        .flat_map(|slower| two.clone().into_iter().map(move |peer| (slower, peer)))
        .map(|(slower, mut peer)| {
            peer.compute.forward *= slower;
            peer.compute.backward *= slower;
            peer
        })
        .collect();
    // With infinitely divisible work: 64 microbatches at 1 + 1/2 + 1/4 + 1/4 per 3 passes.
    let share = share_of(Duration::from_millis(100) * 3 * 64 / 2, &scenario);
    assert!(share >= 0.8, "{share}");
}

/// The throughput of the last step relative to a step of duration `ideal`, which assumes infinitely
/// divisible work.
fn share_of(ideal: Duration, scenario: &Scenario) -> f64 {
    let report = run(scenario).expect("a swarm whose peers live");
    let (_, step) = report.steps.last_key_value().expect("the run has steps");
    let share = ideal.as_secs_f64() / step.last.since(step.first).as_secs_f64();
    println!("share of the ideal throughput: {share:.3}");
    share
}

/// Four stages of four equal replicas each: 128 microbatches at 4 per 3 passes. Each replica does
/// 32 microbatches, and the beginning and end of a step take as long as 3 more. The rest is lost
/// when several gradients return to one replica of the first stage at the same time.
#[test]
fn sixteen_equal_peers_lose_little_throughput_beyond_the_end_of_a_step() {
    let mut scenario = pipeline(4, 128, 1);
    let four = scenario.peers.clone();
    scenario.peers = (0..4).flat_map(|_| four.clone()).collect();
    let share = share_of(Duration::from_millis(100) * 3 * 128 / 4, &scenario);
    assert!(share >= 0.9 * 32.0 / 35.0, "{share}");
}

/// A first stage with spare throughput, and a fast and a slow replica, 4 : 1, at each other stage.
/// In a long step, offers wait where they can be served soon: with queues of equal length the fast
/// replica would be done early.
#[test]
fn slow_replicas_have_shorter_queues_than_fast_ones() {
    let mut scenario = pipeline(3, 400, 1);
    let three = scenario.peers.clone();
    let mut second = three.clone();
    for peer in &mut second[1..] {
        peer.compute.forward *= 4;
        peer.compute.backward *= 4;
    }
    scenario.peers = three.into_iter().chain(second).collect();
    let share = share_of(Duration::from_millis(100) * 3 * 400 * 4 / 5, &scenario);
    assert!(share >= 0.97, "{share}");
}

/// The end of the last pass in a run whose replicas of each stage exchange this many numbers per
/// step.
fn last_pass_with(elements: [usize; 2], staleness: u8) -> Duration {
    let mut scenario = pipeline(2, 16, 1);
    let two = scenario.peers.clone();
    scenario.peers = (0..2).flat_map(|_| two.clone()).collect();
    scenario.parameters = (0..).map(WeightGroup).zip(elements).collect();
    scenario.network.bandwidth = Some(100_000);
    let mut manifest = (*scenario.manifest).clone();
    manifest.training.staleness = staleness;
    scenario.manifest = manifest.into();
    end_of(&scenario, Omit::Nothing).0
}

/// When the later stage is done, the earlier one still has its last backward passes to run.
#[test]
fn the_later_stages_all_reduce_overlaps_with_the_earlier_ones_last_passes() {
    const LITTLE: usize = 16;
    let [free, later, earlier] =
        [[LITTLE, LITTLE], [LITTLE, 1_500], [1_500, LITTLE]].map(|all| last_pass_with(all, 0));
    println!("last pass: {free:?} without an all-reduce, {later:?} and {earlier:?} with one");
    assert!(later - free <= (earlier - free) / 5, "{free:?} {later:?} {earlier:?}");
}

/// An all-reduce of about half a step's passes costs half a step each time, or nothing if the next
/// step's passes need not wait for it.
#[test]
fn a_delayed_update_hides_the_all_reduce() {
    let [free, waited, hidden] = [(16, 0), (24_000, 0), (24_000, 1)]
        .map(|(elements, stale)| last_pass_with([elements; 2], stale));
    println!("last pass: {free:?} without an all-reduce, {waited:?} with, {hidden:?} hidden");
    assert!(waited >= free * 13 / 10, "{waited:?} is hardly more than {free:?}");
    assert!(hidden <= free, "{hidden:?} is more than {free:?}");
}

/// Two stages of three replicas each; from the middle of a step on, one of them takes `factor`
/// times as long for every task.
fn straggling(factor: u32) -> Scenario {
    let mut scenario = pipeline(2, 64, 1);
    let two = scenario.peers.clone();
    scenario.peers = (0..3).flat_map(|_| two.clone()).collect();
    scenario.peers.iter_mut().for_each(|peer| peer.limits.retry = Duration::from_millis(200));
    let slow = Fault::SlowPeer { peer: 3, factor, time: Duration::from_secs(1 << 20) };
    scenario.faults.happen = vec![(Duration::from_secs(20), slow)];
    scenario
}

/// The end of the run's last pass, and the number of released claims; the model must equal that of
/// a single peer.
fn end_of(scenario: &Scenario, omit: Omit) -> (Duration, u64) {
    let world = World::new(scenario, Corruption::Nothing, true).without(omit);
    let report = world.run().expect("no oracle objects");
    let alone = run(&scenario.alone()).expect("a peer alone");
    assert_eq!(report.checkpoint, alone.checkpoint);
    let (_, step) = report.steps.last_key_value().expect("the run has steps");
    (step.last.since(Moment::default()), report.marks[Mark::ClaimReclaimed])
}

/// A running pass cannot be cancelled, and its peer's counted microbatches are needed at the step's
/// end. A straggler therefore costs some of its passes, but fewer than it would if it kept all its
/// claims.
#[test]
fn other_replicas_do_the_work_of_a_straggler() {
    let steady = Scenario { faults: Faults::default(), ..straggling(1) };
    let (whole, none) = end_of(&steady, Omit::Nothing);
    assert_eq!(none, 0, "no claim is overdue at steady speed");
    // It costs at most this many of its pass pairs.
    for (factor, pairs) in [(30, 4), (200, 3)] {
        let scenario = straggling(factor);
        let (reclaimed, some) = end_of(&scenario, Omit::Nothing);
        let compute = &scenario.peers[3].compute;
        let both_passes = (compute.forward + compute.backward) * factor;
        println!(
            "last pass: {whole:?} without a straggler, {reclaimed:?} with; it takes {both_passes:?}, \
             and {some} claims were released"
        );
        assert!(some > 0 && reclaimed <= whole + pairs * both_passes, "{reclaimed:?} {whole:?}");
    }
}

/// With a slower straggler, the run would exceed the limit of the progress oracle.
#[test]
fn a_straggler_that_keeps_its_claims_costs_all_its_work() {
    let steady = Scenario { faults: Faults::default(), ..straggling(1) };
    let (whole, _) = end_of(&steady, Omit::Nothing);
    let (reclaimed, _) = end_of(&straggling(30), Omit::Nothing);
    let (kept, _) = end_of(&straggling(30), Omit::Reclaim);
    println!(
        "last pass: {whole:?} without a straggler, {reclaimed:?} with, {kept:?} if it keeps all"
    );
    assert!(
        kept - whole >= 5 * (reclaimed - whole),
        "keeping all claims costs too little extra: {kept:?}"
    );
}

/// Two stages of three replicas each, one of which becomes ten times slower: idle replicas take
/// over the work that it has accepted and not begun.
#[test]
fn the_end_of_a_step_does_not_wait_for_work_that_slow_replicas_have_not_begun() {
    let scenario = straggling(10);
    // With infinitely divisible work: 64 microbatches of 3 passes at 2.1 replicas.
    let share = share_of(Duration::from_millis(100) * 3 * 640 / 21, &scenario);
    assert!(share >= 0.7, "{share}");
}
