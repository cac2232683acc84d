//! Swarms with and without faults: every oracle holds, every run repeats, every model is the
//! reference's.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::{MoveReason, StageChoice};
use shoal_protocol::units::Moment;

use super::corruption::Corruption;
use super::world::World;
use super::*;
use crate::rebalance::Rebalance;

/// Swarms that are tried.
const SEEDS: u64 = 600;

/// Swarms with faults that are tried.
const FAULTY: u64 = 3000;

/// Swarms that errors are put into.
const SOME: u64 = 100;

/// So many seeds, or those that SHOAL_SIM_SEED names: one, or a range as 0..10000.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("SHOAL_SIM_SEED") else { return 0..count };
    let number = |text: &str| text.parse::<u64>().expect("SHOAL_SIM_SEED is a seed or a range");
    match text.split_once("..") {
        Some((from, to)) => number(from)..number(to),
        None => number(&text)..number(&text) + 1,
    }
}

/// Runs `check` on every seed, on as many threads as there are processors.
pub(super) fn on_all<T: Send>(
    seeds: std::ops::Range<u64>,
    check: impl Fn(u64) -> T + Sync,
) -> Vec<T> {
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

/// Runs a check of a seed; says what is wrong, if anything is, and how to see it again.
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

/// Runs a swarm twice; the runs must be one.
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
        return Err("the model is not the one that a peer alone makes".to_owned());
    }
    Ok(report)
}

/// With faults every oracle holds as well, the reference's model among them.
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

/// Something that seeds are to reach, and how often a run did.
type Mark = (&'static str, fn(&Report) -> u64);

/// The seeds reach what they are drawn to reach.
fn reached(reports: &[Report], what: &str, count: impl Fn(&Report) -> u64) {
    let sum: u64 = reports.iter().map(count).sum();
    println!("{what}: {sum}");
    let chosen = std::env::var_os("SHOAL_SIM_SEED").is_some();
    assert!(chosen || sum > 0, "no seed reaches: {what}");
}

#[test]
fn swarms_of_all_seeds_hold_every_promise_and_repeat() {
    let results = on_all(seeds(SEEDS), |seed| checked(seed, "swarms_of_all", without_faults));
    let reports = all_hold(results);
    reached(&reports, "commits", |report| report.commits);
    reached(&reports, "offers answered busy", |report| report.turned_away);
    reached(&reports, "work sent on to its holder", |report| report.redirected);
    reached(&reports, "reports that came again", |report| report.repeated);
    reached(&reports, "windows that grew", |report| u64::from(report.widest_window > 17));
    let largest = (0..SEEDS).map(|seed| Scenario::from_seed(seed).peers.len()).max();
    assert_eq!(largest, Some(64));
}

fn moved(report: &Report, reason: MoveReason) -> u64 {
    report.migrations.get(&reason).map_or(0, |counts| counts.done)
}

#[test]
fn faulty_swarms_of_all_seeds_hold_every_promise() {
    let results = on_all(seeds(FAULTY), |seed| checked(seed, "faulty_swarms", with_faults));
    let reports = all_hold(results);
    let marks: [Mark; 43] = [
        ("commits", |report| report.commits),
        ("runs that lost members and came to their end", |report| {
            u64::from(report.finished && report.recovery.lost > 0)
        }),
        ("peers that died", |report| report.recovery.crashes),
        ("members expelled", |report| report.recovery.lost),
        ("claims revoked", |report| report.recovery.revoked),
        ("activations asked for again", |report| report.recovery.replays),
        ("claims let go of", |report| report.recovery.released),
        ("rounds aborted", |report| report.recovery.rounds_aborted),
        ("rounds mended", |report| report.recovery.rounds_mended),
        ("newcomers that caught up", |report| report.recovery.joined),
        ("changes of a stage", |report| report.moves),
        ("newcomers that began anew", |report| report.recovery.behind),
        ("results lost on the way", |report| report.recovery.results_lost),
        ("returns to an earlier version", |report| report.recovery.rewinds),
        ("checkpoints abandoned", |report| report.recovery.checkpoints_abandoned),
        ("cuts", |report| report.recovery.cuts),
        ("words that found nobody", |report| report.recovery.unreached),
        ("snapshots that a disk did not take", |report| report.recovery.not_stored),
        ("done work replayed", |report| report.rare.replayed_done),
        ("work re-routed again", |report| report.rare.rerouted_again),
        ("rounds mended before a result", |report| report.rare.mended_before_result),
        ("rounds mended after a result", |report| report.rare.mended_after_result),
        ("rounds mended in which nobody's sums changed", |report| report.rare.mended_unchanged),
        ("rounds mended without two", |report| report.rare.mended_without_many),
        ("claims released while granted", |report| report.rare.released_in_flight),
        ("words of lives that are over", |report| report.rare.old_lives),
        ("newcomers that serve during a round", |report| report.rare.promoted_in_round),
        ("microbatches done during the all-reduce before", |report| report.rare.overlapped),
        ("late claims let go of", |report| report.recovery.reclaimed),
        ("words about claims of others", |report| report.recovery.refused),
        ("claims recalled when done", |report| report.rare.reclaimed_done),
        ("claims recalled that were not late", |report| report.rare.reclaimed_early),
        ("claims recalled again", |report| report.rare.reclaimed_again),
        ("coordinators after the first", |report| report.recovery.terms - 1),
        ("claims taken over", |report| report.rare.claims_taken_over),
        ("records logged that their giver heard no more of", |report| report.rare.logged_unheard),
        ("records given too late", |report| report.rare.logged_too_late),
        ("memberships asked for as a whole", |report| report.rare.members_wanted),
        ("stages lost during a commit", |report| report.rare.lost_in_commit),
        ("moves to where members are gone", |report| moved(report, MoveReason::MembersGone)),
        ("moves to where less is got through", |report| moved(report, MoveReason::Uneven)),
        ("moves to where nobody was left", |report| moved(report, MoveReason::StageLost)),
        ("moves given up", |report| report.migrations.values().map(|counts| counts.given_up).sum()),
    ];
    for (what, count) in marks {
        reached(&reports, what, count);
    }
}

/// Runs the first seeds with an error put in; returns how many were caught, and by what.
fn caught(corruption: Corruption, with_oracles: bool, seeds: u64) -> Vec<String> {
    (0..seeds)
        .map(Scenario::from_seed)
        .filter_map(|scenario| match World::new(&scenario, corruption, with_oracles).run() {
            Err(violation) => Some(violation.oracle.to_owned()),
            Ok(report) => report.stopped,
        })
        .collect()
}

/// The first seeds with an error put in: what was caught, which must be something.
fn must_be_caught(corruption: Corruption, with_oracles: bool) -> Vec<String> {
    let caught = caught(corruption, with_oracles, SOME);
    assert!(!caught.is_empty(), "{corruption:?} went unnoticed");
    caught
}

#[test]
fn oracles_catch_what_is_counted_twice_or_never() {
    let twice = must_be_caught(Corruption::CountTwice, true);
    assert!(twice.iter().all(|oracle| oracle == "exactly once"), "{twice:?}");
    let never = must_be_caught(Corruption::CountNever, true);
    assert!(never.iter().all(|oracle| oracle == "equal replicas"), "{never:?}");
    // Where the close comes before the commit, who holds too much leaves. Who took what is held out
    // from its holder answers each replay, and nobody else ever does that work.
    let not_held = must_be_caught(Corruption::IgnoreHeld, true);
    let caught_by = ["exactly once", "no fault", "progress"];
    assert!(not_held.iter().all(|oracle| caught_by.contains(&oracle.as_str())), "{not_held:?}");
}

#[test]
fn who_has_not_what_a_change_begins_from_gets_the_whole() {
    let broken = |seed| {
        let scenario = Scenario::faulty(seed);
        let report = World::new(&scenario, Corruption::BreakChanges, true).run();
        // Nobody is told of a round that is committed by then: who listened to it begins anew.
        let report = report.or_else(|violation| match violation.oracle {
            "kept results" => Ok(Report::default()),
            _ => Err(violation),
        });
        report.map_err(|violation| format!("seed {seed}: {violation}"))
    };
    let reports = all_hold((0..SOME).map(broken).collect());
    reached(&reports, "memberships asked for", |report| report.rare.members_wanted);
    reached(&reports, "crews asked for", |report| report.rare.round_groups_requested);
}

#[test]
fn oracles_catch_what_is_applied_without_a_commit() {
    let caught = must_be_caught(Corruption::ApplyWithoutCommit, true);
    assert!(caught.iter().all(|oracle| oracle == "equal replicas"), "{caught:?}");
}

#[test]
fn oracles_catch_what_is_never_released_or_never_ends() {
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
        "every run that trains is stopped"
    );
}

#[test]
fn a_changed_proof_is_refused() {
    let caught = must_be_caught(Corruption::WrongProof, false);
    assert!(caught.iter().all(|reason| reason.contains("refused")), "{caught:?}");
}

/// Who leaves comes back as a new life, and leaves again: in the end a stage has nobody left.
#[test]
fn a_member_whose_accumulator_differs_leaves() {
    let caught = must_be_caught(Corruption::DropFromClose, true);
    assert!(caught.iter().all(|oracle| oracle == "no fault"), "{caught:?}");
}

/// Runs swarms with faults and without a rule until one is caught; returns the seed and the oracle.
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
fn oracles_catch_every_rule_that_nobody_keeps() {
    let rules = [
        (Omit::Revocation, 100),
        (Omit::Replay, 300),
        (Omit::AnswerAll, 3000),
        (Omit::GrantNumbers, 3000),
        (Omit::Eras, 6000),
        (Omit::Terms, 3000),
        (Omit::Census, 300),
        (Omit::Attempts, 3000),
        (Omit::Mends, 3000),
        (Omit::Readiness, 100),
        (Omit::Abort, 3000),
        (Omit::Lives, 300),
    ];
    for (rule, seeds) in rules {
        let caught = first_caught(rule, seeds);
        println!("without {rule:?}: {caught:?}");
        assert!(caught.is_some(), "{rule:?} may be left out unnoticed");
    }
}

/// A pipeline of equal peers, one per stage: forward 1, backward 2, and `latency` tenths of a
/// forward pass between any two.
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
        ..PeerScenario::plain(StageChoice::One(Stage(stage)), stages, compute.clone())
    };
    let manifest = Scenario::small_manifest(stages, microbatches, 8);
    Scenario::plain(manifest, (0..stages).map(host).collect(), network)
}

/// The share of the time between a step's first and last pass that all peers compute, in the last
/// step, when the windows have found their width.
fn utilisation(scenario: &Scenario) -> f64 {
    let report = run(scenario).expect("a pipeline without faults");
    let (_, step) = report.steps.last_key_value().expect("it has steps");
    let whole = step.last.since(step.first) * scenario.peers.len() as u32;
    step.busy.as_secs_f64() / whole.as_secs_f64()
}

/// Against 1F1B and GPipe, p = 4, m = 16, F = 1, B = 2 (closed-form schedules: all three need
/// (m + p - 1)(F + B) without latency; GPipe adds 2(p - 1) one-way latencies).
#[test]
fn the_windowed_schedule_keeps_a_pipeline_as_busy_as_1f1b_near_and_gpipe_far() {
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

/// Two stages of four replicas each, whose speeds are as 4 : 2 : 1 : 1, over links of a tenth of the
/// fastest forward pass.
#[test]
fn unlike_replicas_share_the_work_so_that_all_stay_busy() {
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
    // Were the work divisible without end: 64 microbatches at 1 + 1/2 + 1/4 + 1/4 per 3 passes.
    let share = share_of(Duration::from_millis(100) * 3 * 64 / 2, &scenario);
    assert!(share >= 0.8, "{share}");
}

/// The share of its speed that a swarm keeps whose last step would take so long were the work divisible
/// without end.
fn share_of(ideal: Duration, scenario: &Scenario) -> f64 {
    let report = run(scenario).expect("a swarm whose peers live");
    let (_, step) = report.steps.last_key_value().expect("it has steps");
    let share = ideal.as_secs_f64() / step.last.since(step.first).as_secs_f64();
    println!("share of the ideal throughput: {share:.3}");
    share
}

/// Four stages of four replicas each, all equal: 128 microbatches at 4 per 3 passes. Of 35 microbatches'
/// passes a step's beginning and end take 3 where each replica does 32; the rest is lost where gradients
/// come back to one replica of the first stage together.
#[test]
fn sixteen_equal_peers_keep_most_of_what_a_step_s_end_leaves_of_their_speed() {
    let mut scenario = pipeline(4, 128, 1);
    let four = scenario.peers.clone();
    scenario.peers = (0..4).flat_map(|_| four.clone()).collect();
    let share = share_of(Duration::from_millis(100) * 3 * 128 / 4, &scenario);
    assert!(share >= 0.9 * 32.0 / 35.0, "{share}");
}

/// A first stage with more than it needs, and a fast and a slow replica, 4 : 1, of the others. A long step's
/// offers wait where they can be served soon: were the queues of all as long, the fast would be done early.
#[test]
fn the_slow_do_not_have_as_much_waiting_as_the_fast() {
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

/// When the last pass of a run ends whose replicas of each stage exchange so many numbers a step.
fn last_pass_with(elements: [usize; 2], staleness: u8) -> Duration {
    let mut scenario = pipeline(2, 16, 1);
    let two = scenario.peers.clone();
    scenario.peers = (0..2).flat_map(|_| two.clone()).collect();
    scenario.parameters = (0..).map(Stage).zip(elements).collect();
    scenario.network.bandwidth = Some(100_000);
    let mut manifest = (*scenario.manifest).clone();
    manifest.training.staleness = staleness;
    scenario.manifest = manifest.into();
    end_of(&scenario, Omit::Nothing).0
}

/// Where the later stage is done the earlier one has yet to run its last backward passes.
#[test]
fn the_later_stages_all_reduce_takes_the_time_of_the_earlier_ones_last_passes() {
    const LITTLE: usize = 16;
    let [free, later, earlier] =
        [[LITTLE, LITTLE], [LITTLE, 1_500], [1_500, LITTLE]].map(|all| last_pass_with(all, 0));
    println!("last pass: {free:?} without an all-reduce, {later:?} and {earlier:?} with one");
    assert!(later - free <= (earlier - free) / 5, "{free:?} {later:?} {earlier:?}");
}

/// An all-reduce of about half a step's passes costs half a step each time, or nothing where the next
/// step's passes need not wait for it.
#[test]
fn a_delayed_update_hides_the_all_reduce() {
    let [free, waited, hidden] = [(16, 0), (24_000, 0), (24_000, 1)]
        .map(|(elements, stale)| last_pass_with([elements; 2], stale));
    println!("last pass: {free:?} without an all-reduce, {waited:?} with, {hidden:?} hidden");
    assert!(waited >= free * 13 / 10, "{waited:?} is hardly more than {free:?}");
    assert!(hidden <= free, "{hidden:?} is more than {free:?}");
}

/// Two stages of three replicas each; from the middle of a step on, one of them needs this many times as
/// long for everything.
fn straggling(factor: u32) -> Scenario {
    let mut scenario = pipeline(2, 64, 1);
    let two = scenario.peers.clone();
    scenario.peers = (0..3).flat_map(|_| two.clone()).collect();
    scenario.peers.iter_mut().for_each(|peer| peer.limits.retry = Duration::from_millis(200));
    let slow = Fault::SlowPeer { peer: 3, factor, time: Duration::from_secs(1 << 20) };
    scenario.faults.happen = vec![(Duration::from_secs(20), slow)];
    scenario
}

/// When the last pass of the run ended, and how many claims were let go of; the model must be that of
/// a peer alone.
fn end_of(scenario: &Scenario, omit: Omit) -> (Duration, u64) {
    let world = World::new(scenario, Corruption::Nothing, true).without(omit);
    let report = world.run().expect("every oracle holds");
    let alone = run(&scenario.alone()).expect("a peer alone");
    assert_eq!(report.checkpoint, alone.checkpoint);
    let (_, step) = report.steps.last_key_value().expect("it has steps");
    (step.last.since(Moment::default()), report.recovery.reclaimed)
}

/// A pass that runs cannot be taken back, and what its peer has counted is needed at the step's end. So a
/// straggler costs some of its passes, but not those of all that it was given, which it would if it kept that.
#[test]
fn what_a_straggler_holds_is_done_by_others() {
    let steady = Scenario { faults: Faults::default(), ..straggling(1) };
    let (whole, none) = end_of(&steady, Omit::Nothing);
    assert_eq!(none, 0, "nobody is late where all are steady");
    // So many of its pass pairs it costs.
    for (factor, pairs) in [(30, 4), (200, 3)] {
        let scenario = straggling(factor);
        let (reclaimed, some) = end_of(&scenario, Omit::Nothing);
        let compute = &scenario.peers[3].compute;
        let both_passes = (compute.forward + compute.backward) * factor;
        println!(
            "last pass: {whole:?} without a straggler, {reclaimed:?} with; it takes {both_passes:?}, \
             and {some} claims were let go of"
        );
        assert!(some > 0 && reclaimed <= whole + pairs * both_passes, "{reclaimed:?} {whole:?}");
    }
}

/// With a straggler that is slow enough, the run would stand still for longer than anything may.
#[test]
fn a_straggler_that_lets_go_of_nothing_costs_all_that_it_was_given() {
    let steady = Scenario { faults: Faults::default(), ..straggling(1) };
    let (whole, _) = end_of(&steady, Omit::Nothing);
    let (reclaimed, _) = end_of(&straggling(30), Omit::Nothing);
    let (kept, _) = end_of(&straggling(30), Omit::Reclaim);
    println!(
        "last pass: {whole:?} without a straggler, {reclaimed:?} with, {kept:?} if it keeps all"
    );
    assert!(kept - whole >= 5 * (reclaimed - whole), "it would not cost much more: {kept:?}");
}

/// Two stages of three replicas each, of which one becomes ten times as slow: what it has taken in
/// and yet to begin is done by those who have nothing left.
#[test]
fn a_step_does_not_wait_at_its_end_for_what_the_slow_have_yet_to_begin() {
    let scenario = straggling(10);
    // Were the work divisible without end: 64 microbatches of 3 passes at 2 replicas and a tenth.
    let share = share_of(Duration::from_millis(100) * 3 * 640 / 21, &scenario);
    assert!(share >= 0.7, "{share}");
}

/// A move may begin from a checkpoint that is there already: who moves hears so only after it heard
/// that it is to move.
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
    let report = run(&scenario).expect("nothing goes wrong");
    // One at a time, and each is over before many looks are.
    assert!(report.moves >= 4, "{} moves", report.moves);
}
