//! Swarms with and without faults: every oracle holds, every run is repeatable, every model equals
//! the reference's.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::message::{MoveReason, StageChoice};

use super::corruption::{Corruption, SumLie};
use super::world::World;
use super::*;
use crate::coordinator::placing::rebalance::Rebalance;

/// Number of swarms without faults.
const SEEDS: u64 = 600;

/// Number of swarms with faults. `make soak` runs thousands, of seeds that were never tried.
const FAULTY: u64 = 1000;

/// Number of swarms with a member that lies.
const LIARS: u64 = 600;

/// Number of swarms with injected errors.
const SOME: u64 = 100;

/// Marks that take a liar, audits or changes that do not arrive.
const NOT_BY_FAULTS: [Mark; 5] = [
    Mark::RoundForged,
    Mark::RoundGroupRequested,
    Mark::Lied,
    Mark::AuditedSound,
    Mark::NotAudited,
];

/// `count` seeds, or those that SHOAL_SIM_SEED names: one, or a range such as 0..10000.
pub(super) fn seeds(count: u64) -> std::ops::Range<u64> {
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

/// Runs a check of a seed; the error says how to repeat it.
pub(super) fn checked(
    seed: u64,
    test: &str,
    check: impl Fn(u64) -> Result<Report, String>,
) -> Result<Report, String> {
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| check(seed)))
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
pub(super) fn all_hold(results: Vec<Result<Report, String>>) -> Vec<Report> {
    let failures: Vec<&String> =
        results.iter().filter_map(|result| result.as_ref().err()).collect();
    let first: Vec<&str> = failures.iter().take(12).map(|failure| failure.as_str()).collect();
    let first = first.join("\n");
    assert!(failures.is_empty(), "{} of {} failed:\n{first}", failures.len(), results.len());
    results.into_iter().flatten().collect()
}

/// Asserts that the seeds reach a path.
pub(super) fn reached(reports: &[Report], what: &str, count: impl Fn(&Report) -> u64) {
    let sum: u64 = reports.iter().map(count).sum();
    println!("{what}: {sum}");
    let chosen = std::env::var_os("SHOAL_SIM_SEED").is_some();
    assert!(chosen || sum > 0, "no seed reaches: {what}");
}

/// Asserts that the seeds reach what a mark counts.
pub(super) fn marked(reports: &[Report], mark: Mark) {
    reached(reports, &format!("{mark:?}"), |report| report.marks[mark]);
}

#[test]
fn swarms_of_all_seeds_satisfy_every_oracle_and_repeat() {
    let results = on_all(seeds(SEEDS), |seed| checked(seed, "swarms_of_all", without_faults));
    let reports = all_hold(results);
    reached(&reports, "commits", |report| report.commits);
    for mark in [Mark::OfferRefused, Mark::OfferRedirected, Mark::ReportedAgain] {
        marked(&reports, mark);
    }
    reached(&reports, "windows that grew", |report| u64::from(report.widest_window > 17));
    let largest = (0..SEEDS).map(|seed| Scenario::from_seed(seed).peers.len()).max();
    assert_eq!(largest, Some(64));
}

/// Whether a run stopped for what a host of a stage said that has no other replica, or only one.
fn stops_by_host(seed: u64, violation: &Violation) -> bool {
    let reasons = [": a lie", "came to different results", "have different weights"];
    let is_known = reasons.iter().any(|reason| violation.detail.contains(reason));
    !seed.is_multiple_of(2) && violation.oracle == "no fault" && is_known
}

/// What one member says, whatever it says, neither changes the model nor stops or delays the run. Only a host without
/// another replica to disprove it, or with one alone, may stop it.
#[test]
fn swarms_with_a_liar_satisfy_every_oracle() {
    let with_liar = |seed| match run(&Scenario::with_liar(seed)) {
        Err(violation) if stops_by_host(seed, &violation) => {
            Ok(Report { stopped: Some(violation.detail), ..Report::default() })
        }
        Err(violation) => Err(violation.to_string()),
        Ok(Report { stopped: Some(reason), .. }) => Err(format!("the run stopped: {reason}")),
        Ok(report) => Ok(report),
    };
    let results = on_all(seeds(LIARS), |seed| checked(seed, "swarms_with_a_liar", with_liar));
    let reports = all_hold(results);
    marked(&reports, Mark::Lied);
    reached(&reports, "completed runs", |report| u64::from(report.finished));
    let stopped = reports.iter().filter(|report| report.stopped.is_some()).count();
    println!("stopped by a host: {stopped} of {}", reports.len());
    assert!(stopped * 50 <= reports.len(), "{stopped} of {} runs stopped", reports.len());
}

fn moved(report: &Report, reason: MoveReason) -> u64 {
    report.migrations.get(&reason).map_or(0, |counts| counts.done)
}

#[test]
fn faulty_swarms_of_all_seeds_satisfy_every_oracle() {
    let results = on_all(seeds(FAULTY), |seed| checked(seed, "faulty_swarms", with_faults));
    let reports = all_hold(results);
    reached(&reports, "commits", |report| report.commits);
    reached(&reports, "completed runs that lost members", |report| {
        u64::from(report.finished && report.marks[Mark::Expelled] > 0)
    });
    reached(&reports, "moves because members were lost", |report| {
        moved(report, MoveReason::MembersGone)
    });
    reached(&reports, "moves because of uneven throughput", |report| {
        moved(report, MoveReason::Uneven)
    });
    reached(&reports, "moves because a stage was lost", |report| {
        moved(report, MoveReason::StageLost)
    });
    reached(&reports, "cancelled moves", |report| {
        report.migrations.values().map(|counts| counts.given_up).sum()
    });
    reached(&reports, "bytes of stages loaded onto devices", |report| report.swapped.loaded.0);
    for mark in Mark::ALL.iter().filter(|mark| !NOT_BY_FAULTS.contains(mark)) {
        marked(&reports, *mark);
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

/// One member adds up other sums than it got, says that it gave others than it did, or collects others: every run ends
/// with the reference's model, but one about what it gave may delay a run past the oracle of progress.
#[test]
fn a_member_that_lies_about_sums_changes_nothing() {
    let peer = 1;
    let lies = [
        (Corruption::Forge { peer, lie: SumLie::Results }, SOME),
        (Corruption::Forge { peer, lie: SumLie::GaveAll }, SOME / 5),
        (Corruption::Forge { peer, lie: SumLie::GaveFirst }, SOME / 5),
        (Corruption::CollectTwice { peer }, SOME / 5),
        (Corruption::CollectWithout { peer }, SOME / 5),
    ];
    for (corruption, count) in lies {
        let may_delay = corruption != lies[0].0;
        let lying = |seed| {
            let mut scenario = Scenario::faulty(seed);
            // Where sums are rounded, those of a mended round do not make up the same whole.
            let codec = &mut Arc::make_mut(&mut scenario.manifest).codec.all_reduce;
            if !codec.is_exact() {
                *codec = SumCodec::Exact;
            }
            match World::new(&scenario, corruption, true).run() {
                Err(violation) if may_delay && violation.oracle == "progress" => {
                    Ok(Report::default())
                }
                Err(violation) => Err(format!("{corruption:?}, seed {seed}: {violation}")),
                Ok(Report { stopped: Some(reason), .. }) => {
                    Err(format!("{corruption:?}, seed {seed}: {reason}"))
                }
                Ok(report) => Ok(report),
            }
        };
        let reports = all_hold(on_all(seeds(count), lying));
        if let Corruption::Forge { .. } = corruption {
            marked(&reports, Mark::RoundForged);
        }
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
    marked(&reports, Mark::ViewRequested);
    marked(&reports, Mark::RoundGroupRequested);
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

/// The one that counted twice leaves where others can do its work again, and no model has the surplus.
#[test]
fn the_proof_in_band_catches_double_counts_without_oracles() {
    let training = |seed: &u64| Scenario::from_seed(*seed).manifest.training.steps > 0;
    let (mut stopped, mut mended) = (0, 0);
    for seed in (0..SOME).filter(training) {
        let scenario = Scenario::from_seed(seed);
        let report = World::new(&scenario, Corruption::CountTwice, false).run();
        let report = report.expect("no oracle looks");
        if let Some(reason) = &report.stopped {
            assert!(reason.contains("proves"), "seed {seed}: {reason}");
            stopped += 1;
        } else {
            let alone = run(&scenario.alone()).expect("one peer");
            assert_eq!(report.checkpoint, alone.checkpoint, "seed {seed}");
            mended += 1;
        }
    }
    assert!(stopped > 0 && mended > 0, "{stopped} stopped, {mended} mended");
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

/// The seeds that are tried for one that shows the lack of a rule.
const TRIED: u64 = 6000;

/// Runs faulty swarms without a rule until an oracle catches one; returns its seed and the oracle. The known seed runs first.
fn first_caught(rule: Omit, known: u64) -> Option<(u64, &'static str)> {
    std::iter::once(known).chain(0..TRIED).find_map(|seed| {
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
    // The first seed of each that shows the lack. Where it no longer does, the search for another takes minutes.
    let rules = [
        (Omit::Revocation, 3),
        (Omit::Replay, 24),
        (Omit::AnswerAll, 1),
        (Omit::Exchanges, 121),
        (Omit::GrantNumbers, 58),
        (Omit::Eras, 1036),
        (Omit::Terms, 632),
        (Omit::Census, 25),
        (Omit::Attempts, 166),
        (Omit::Mends, 3),
        (Omit::Readiness, 1),
        (Omit::Abort, 50),
        (Omit::Lives, 101),
        (Omit::InUse, 3),
        (Omit::SumsLeave, 7),
        (Omit::PrefetchVersions, 7),
        (Omit::Room, 3),
    ];
    for (rule, known) in rules {
        let caught = first_caught(rule, known);
        println!("without {rule:?}: {caught:?}");
        assert!(caught.is_some(), "omitting {rule:?} goes unnoticed");
    }
}

/// Each hole that a liar could use, one at a time: the rule that closes it is omitted.
#[test]
fn oracles_catch_every_omitted_rule_that_binds_liars() {
    // The first seed of each that shows the lack.
    let rules = [
        (Omit::Majority, 1),
        (Omit::Senders, 12),
        (Omit::Alarms, 5),
        (Omit::Witnesses, 4),
        (Omit::Writers, 5),
    ];
    for (rule, known) in rules {
        let caught = std::iter::once(known).chain(0..TRIED).find_map(|seed| {
            let scenario = Scenario::with_liar(seed);
            let without = || World::new(&scenario, Corruption::Nothing, true).without(rule).run();
            match std::panic::catch_unwind(without) {
                Ok(Ok(_)) => None,
                // Some runs stop with all rules.
                Ok(Err(violation)) => run(&scenario).is_ok().then_some((seed, violation.oracle)),
                Err(_) => Some((seed, "an assertion")),
            }
        });
        println!("without {rule:?}: {caught:?}");
        assert!(caught.is_some(), "omitting {rule:?} goes unnoticed");
    }
    let forge = Corruption::Forge { peer: 1, lie: SumLie::Results };
    let caught = (0..TRIED).find_map(|seed| {
        let scenario = Scenario::faulty(seed);
        World::new(&scenario, forge, true)
            .without(Omit::Sums)
            .run()
            .err()
            .map(|found| (seed, found.oracle))
    });
    println!("without {:?}: {caught:?}", Omit::Sums);
    assert!(caught.is_some(), "omitting {:?} goes unnoticed", Omit::Sums);
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
    assert!(report.marks[Mark::Moved] >= 4, "{} moves", report.marks[Mark::Moved]);
}
