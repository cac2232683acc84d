//! Swarms with and without faults: every oracle holds, every run is repeatable, every model equals
//! the reference's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan, WeightGroup};
use shoal_protocol::manifest::{DistanceCodec, InnerLoop, InnerMoments};
use shoal_protocol::message::{MoveReason, StageChoice};
use shoal_protocol::units::Moment;

use super::corruption::Corruption;
use super::world::World;
use super::*;
use crate::rebalance::Rebalance;

/// Number of swarms without faults.
const SEEDS: u64 = 600;

/// Number of swarms with faults.
const FAULTY: u64 = 3000;

/// Number of swarms with injected errors.
const SOME: u64 = 100;

/// `count` seeds, or those that SHOAL_SIM_SEED names: one, or a range such as 0..10000.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("SHOAL_SIM_SEED") else { return 0..count };
    let number = |text: &str| text.parse::<u64>().expect("SHOAL_SIM_SEED is a seed or a range");
    match text.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(&text)..number(&text) + 1,
    }
}

/// Runs `check` on every seed, on as many threads as there are processors.
fn on_all<T: Send>(seeds: std::ops::Range<u64>, check: impl Fn(u64) -> T + Sync) -> Vec<T> {
    let next = AtomicU64::new(seeds.start);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        let mut results = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if !seeds.contains(&seed) {
                return results;
            }
            results.push(check(seed));
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no check panics")).collect()
    })
}

/// Runs a check of a seed; the error says how to repeat it.
fn checked(
    seed: u64,
    test: &str,
    check: fn(u64) -> Result<Report, String>,
) -> Result<Report, String> {
    let result = std::panic::catch_unwind(|| check(seed))
        .unwrap_or_else(|_| Err("an assertion failed (above)".to_owned()));
    result.map_err(|what| {
        format!(
            "seed {seed}: {what}\n  again: SHOAL_SIM_SEED={seed} cargo test -p shoal-scheduler {test}"
        )
    })
}

/// Runs a swarm twice; both runs must be equal.
fn run_twice(scenario: &Scenario) -> Result<Report, String> {
    let report = run(scenario).map_err(|violation| violation.to_string())?;
    if run(scenario).as_ref() != Ok(&report) {
        return Err("the second run differs from the first".to_owned());
    }
    Ok(report)
}

fn without_faults(seed: u64) -> Result<Report, String> {
    let scenario = Scenario::from_seed(seed);
    let report = run_twice(&scenario)?;
    let alone = run(&scenario.alone()).map_err(|violation| format!("alone: {violation}"))?;
    if alone.checkpoint != report.checkpoint {
        return Err("the model differs from that of a single peer".to_owned());
    }
    Ok(report)
}

/// With faults every oracle holds as well, including the comparison with the reference model.
fn with_faults(seed: u64) -> Result<Report, String> {
    let scenario = Scenario::faulty(seed);
    if seed.is_multiple_of(16) {
        run_twice(&scenario)
    } else {
        run(&scenario).map_err(|violation| violation.to_string())
    }
}

/// The reports of all seeds, none of which may fail.
fn all_hold(results: Vec<Result<Report, String>>) -> Vec<Report> {
    let failures: Vec<&String> =
        results.iter().filter_map(|result| result.as_ref().err()).collect();
    let first: Vec<&str> = failures.iter().take(5).map(|failure| failure.as_str()).collect();
    let first = first.join("\n");
    assert!(failures.is_empty(), "{} of {} failed:\n{first}", failures.len(), results.len());
    results.into_iter().flatten().collect()
}

/// A path that the seeds must reach, and a count of it in a report.
type Mark = (&'static str, fn(&Report) -> u64);

/// Asserts that the seeds reach a path.
fn reached(reports: &[Report], what: &str, count: impl Fn(&Report) -> u64) {
    let sum: u64 = reports.iter().map(count).sum();
    println!("{what}: {sum}");
    let chosen = std::env::var_os("SHOAL_SIM_SEED").is_some();
    assert!(chosen || sum > 0, "no seed reaches: {what}");
}

#[test]
fn swarms_of_all_seeds_satisfy_every_oracle_and_repeat() {
    let results = on_all(seeds(SEEDS), |seed| checked(seed, "swarms_of_all", without_faults));
    let reports = all_hold(results);
    reached(&reports, "commits", |report| report.commits);
    reached(&reports, "offers answered busy", |report| report.work.refused);
    reached(&reports, "work redirected to its holder", |report| report.work.redirected);
    reached(&reports, "repeated reports", |report| report.work.repeated);
    reached(&reports, "windows that grew", |report| u64::from(report.work.widest_window > 17));
    let largest = (0..SEEDS).map(|seed| Scenario::from_seed(seed).peers.len()).max();
    assert_eq!(largest, Some(64));
}

fn moved(report: &Report, reason: MoveReason) -> u64 {
    report.migrations.get(&reason).map_or(0, |counts| counts.done)
}

#[test]
fn faulty_swarms_of_all_seeds_satisfy_every_oracle() {
    let results = on_all(seeds(FAULTY), |seed| checked(seed, "faulty_swarms", with_faults));
    let reports = all_hold(results);
    let marks: [Mark; 51] = [
        ("commits", |report| report.commits),
        ("completed runs that lost members", |report| {
            u64::from(report.finished && report.recovery.lost > 0)
        }),
        ("peers that died", |report| report.recovery.crashes),
        ("members expelled", |report| report.recovery.lost),
        ("claims revoked", |report| report.recovery.claims.revoked),
        ("activations requested again", |report| report.recovery.claims.replays),
        ("claims released", |report| report.recovery.claims.released),
        ("rounds aborted", |report| report.recovery.rounds.aborted),
        ("rounds mended", |report| report.recovery.rounds.mended),
        ("newcomers that caught up", |report| report.recovery.joined),
        ("changes of a stage", |report| report.moves),
        ("newcomers that started over", |report| report.recovery.behind),
        ("results lost in transit", |report| report.recovery.rounds.results_lost),
        ("returns to an earlier version", |report| report.recovery.rewinds),
        ("checkpoints abandoned", |report| report.recovery.checkpoints_abandoned),
        ("cuts", |report| report.recovery.links.cuts),
        ("messages to unreachable peers", |report| report.recovery.links.unreached),
        ("snapshots that a disk failed to write", |report| report.recovery.not_stored),
        ("done work replayed", |report| report.rare.claims.replayed_done),
        ("work re-routed again", |report| report.rare.claims.rerouted_again),
        ("rounds mended before a result", |report| report.rare.rounds.mended_before_result),
        ("rounds mended after a result", |report| report.rare.rounds.mended_after_result),
        ("rounds mended with unchanged sums", |report| report.rare.rounds.mended_unchanged),
        ("rounds mended without several members", |report| report.rare.rounds.mended_without_many),
        ("rounds of shared weights mended", |report| report.rare.rounds.mended_shared),
        ("sums of islands", |report| report.rare.rounds.collected),
        ("sums of islands after a mend", |report| report.rare.rounds.collected_again),
        ("claims released while granted", |report| report.rare.claims.released_in_flight),
        ("messages of earlier incarnations", |report| report.rare.old_lives),
        ("newcomers that serve during a round", |report| report.rare.rounds.promoted),
        ("microbatches done during an earlier all-reduce", |report| report.rare.rounds.overlapped),
        ("overdue claims released", |report| report.recovery.claims.reclaimed),
        ("messages about others' claims", |report| report.recovery.claims.refused),
        ("claims requested back when done", |report| report.rare.claims.reclaimed_done),
        ("claims requested back that were not overdue", |report| {
            report.rare.claims.reclaimed_early
        }),
        ("claims requested back again", |report| report.rare.claims.reclaimed_again),
        ("exchanges of workers sent again", |report| report.rare.claims.exchanges_again),
        ("workers given up half way", |report| report.rare.claims.workers_given_up),
        ("workers that waited for a meeting", |report| report.rare.claims.joined),
        ("coordinators after the first", |report| report.recovery.terms - 1),
        ("claims taken over", |report| report.rare.claims.taken_over),
        ("records logged after their coordinator was deposed", |report| {
            report.rare.log.durable_after_deposal
        }),
        ("records appended too late", |report| report.rare.log.appended_after_deposal),
        ("whole views requested", |report| report.rare.members_wanted),
        ("stages lost during a commit", |report| report.rare.log.lost_in_commit),
        ("moves because members were lost", |report| moved(report, MoveReason::MembersGone)),
        ("moves because of uneven throughput", |report| moved(report, MoveReason::Uneven)),
        ("moves because a stage was lost", |report| moved(report, MoveReason::StageLost)),
        ("stages taken beside others", |report| report.recovery.extended),
        ("bytes of stages loaded onto devices", |report| report.swapped.loaded.0),
        ("cancelled moves", |report| {
            report.migrations.values().map(|counts| counts.given_up).sum()
        }),
    ];
    for (what, count) in marks {
        reached(&reports, what, count);
    }
}

/// Runs the first seeds with an injected error; returns the oracles that caught it.
fn caught(corruption: Corruption, with_oracles: bool, seeds: u64) -> Vec<String> {
    (0..seeds)
        .map(Scenario::from_seed)
        .filter_map(|scenario| match World::new(&scenario, corruption, with_oracles).run() {
            Err(violation) => Some(violation.oracle.to_owned()),
            Ok(report) => report.stopped,
        })
        .collect()
}

/// Runs the first seeds with an injected error, which must be caught.
fn must_be_caught(corruption: Corruption, with_oracles: bool) -> Vec<String> {
    let caught = caught(corruption, with_oracles, SOME);
    assert!(!caught.is_empty(), "{corruption:?} went unnoticed");
    caught
}

#[test]
fn oracles_catch_work_counted_twice_or_never() {
    let twice = must_be_caught(Corruption::CountTwice, true);
    assert!(twice.iter().all(|oracle| oracle == "exactly once"), "{twice:?}");
    let never = must_be_caught(Corruption::CountNever, true);
    assert!(never.iter().all(|oracle| oracle == "equal replicas"), "{never:?}");
    // If the close precedes the commit, a member with a surplus leaves. A member that took a held
    // claim answers each replay, and no other member ever does that work.
    let not_held = must_be_caught(Corruption::IgnoreHeld, true);
    let caught_by = ["exactly once", "no fault", "progress"];
    assert!(not_held.iter().all(|oracle| caught_by.contains(&oracle.as_str())), "{not_held:?}");
}

#[test]
fn oracles_catch_a_collector_that_omits_a_member_or_adds_it_twice() {
    for corruption in [Corruption::CollectTwice, Corruption::CollectWithout] {
        let caught = must_be_caught(corruption, true);
        assert!(caught.iter().all(|oracle| oracle == "equal replicas"), "{caught:?}");
    }
}

#[test]
fn oracles_catch_gradients_of_a_worker_that_change_places() {
    let caught = must_be_caught(Corruption::SwapExchanges, true);
    let by = ["equal replicas", "progress", "exactly once"];
    assert!(caught.iter().all(|oracle| by.contains(&oracle.as_str())), "{caught:?}");
}

#[test]
fn oracles_catch_a_worker_that_misses_a_meeting_on_its_way() {
    // Few runs have such workers.
    let caught = caught(Corruption::JoinNever, true, SEEDS);
    assert!(
        !caught.is_empty() && caught.iter().all(|oracle| oracle == "equal replicas"),
        "{caught:?}"
    );
}

#[test]
fn a_member_without_the_base_of_a_change_requests_the_whole() {
    let broken = |seed| {
        let scenario = Scenario::faulty(seed);
        let report = World::new(&scenario, Corruption::BreakChanges, true).run();
        // A committed round is not announced again: a listener that missed it starts over.
        let report = report.or_else(|violation| match violation.oracle {
            "kept results" => Ok(Report::default()),
            _ => Err(violation),
        });
        report.map_err(|violation| format!("seed {seed}: {violation}"))
    };
    let reports = all_hold((0..SOME).map(broken).collect());
    reached(&reports, "views requested", |report| report.rare.members_wanted);
    reached(&reports, "round groups requested", |report| report.rare.round_groups_requested);
}

#[test]
fn oracles_catch_results_applied_without_a_commit() {
    let caught = must_be_caught(Corruption::ApplyWithoutCommit, true);
    assert!(caught.iter().all(|oracle| oracle == "equal replicas"), "{caught:?}");
}

#[test]
fn oracles_catch_leaked_payloads_and_endless_runs() {
    let kept = must_be_caught(Corruption::KeepPayload, true);
    assert!(kept.iter().all(|oracle| oracle == "payloads"), "{kept:?}");
    let stuck = must_be_caught(Corruption::LoseAcceptances, true);
    assert!(stuck.iter().all(|oracle| oracle == "progress"), "{stuck:?}");
}

#[test]
fn the_proof_in_band_catches_double_counts_without_oracles() {
    let caught = must_be_caught(Corruption::CountTwice, false);
    assert!(caught.iter().all(|reason| reason.contains("proves")), "{caught:?}");
    let training = |seed: &u64| Scenario::from_seed(*seed).manifest.training.steps > 0;
    assert_eq!(
        caught.len(),
        (0..SOME).filter(training).count(),
        "every run with training is stopped"
    );
}

#[test]
fn a_changed_proof_is_refused() {
    let caught = must_be_caught(Corruption::WrongProof, false);
    assert!(caught.iter().all(|reason| reason.contains("refused")), "{caught:?}");
}

/// A member that leaves returns as a new incarnation and leaves again: in the end a stage has no
/// replica.
#[test]
fn a_member_whose_accumulator_differs_leaves() {
    let caught = must_be_caught(Corruption::DropFromClose, true);
    assert!(caught.iter().all(|oracle| oracle == "no fault"), "{caught:?}");
}

/// Runs faulty swarms without a rule until one is caught; returns the seed and the oracle.
fn first_caught(rule: Omit, seeds: u64) -> Option<(u64, &'static str)> {
    (0..seeds).find_map(|seed| {
        let scenario = Scenario::faulty(seed);
        let run = || World::new(&scenario, Corruption::Nothing, true).without(rule).run();
        match std::panic::catch_unwind(run) {
            Ok(Ok(_)) => None,
            Ok(Err(violation)) => Some((seed, violation.oracle)),
            Err(_) => Some((seed, "an assertion")),
        }
    })
}

#[test]
fn oracles_catch_every_omitted_rule() {
    let rules = [
        (Omit::Revocation, 100),
        (Omit::Replay, 300),
        (Omit::AnswerAll, 3000),
        (Omit::Exchanges, 300),
        (Omit::GrantNumbers, 3000),
        (Omit::Eras, 6000),
        (Omit::Terms, 3000),
        (Omit::Census, 300),
        (Omit::Attempts, 3000),
        (Omit::Mends, 3000),
        (Omit::Readiness, 100),
        (Omit::Abort, 3000),
        (Omit::Lives, 300),
        (Omit::InUse, 300),
        (Omit::SumsLeave, 300),
        (Omit::PrefetchVersions, 3000),
        (Omit::Room, 300),
    ];
    for (rule, seeds) in rules {
        let caught = first_caught(rule, seeds);
        println!("without {rule:?}: {caught:?}");
        assert!(caught.is_some(), "omitting {rule:?} goes unnoticed");
    }
}

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
    (step.last.since(Moment::default()), report.recovery.claims.reclaimed)
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

/// A move may begin from an existing checkpoint: the moving member learns of the checkpoint only
/// after the request to move.
#[test]
fn moves_that_begin_from_a_checkpoint_end() {
    let every = Duration::from_secs(2);
    let forward = Duration::from_millis(100);
    let compute = ComputeScenario::passes(forward, forward * 2, 20);
    let peer = |_| PeerScenario::plain(StageChoice::Auto, 2, compute.clone());
    let mut manifest = Scenario::small_manifest(2, 8, 40);
    manifest.checkpoint.every = 1;
    let network = NetworkScenario::even(Duration::from_millis(1), Duration::ZERO, None);
    let mut scenario = Scenario::plain(manifest, (0..6).map(peer).collect(), network);
    scenario.rebalance = Rebalance::Restless { every };
    let report = run(&scenario).expect("a run without faults");
    // One move at a time, and each takes a few rebalancing intervals.
    assert!(report.moves >= 4, "{} moves", report.moves);
}
