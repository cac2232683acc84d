//! The guard: steps with bad rows are skipped, alike in a swarm through deaths and in one process.

use std::fs;

use serde_json::json;
use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained, local_command};
use shoal_tests::swarm::{SLOW, Swarm};

const CONTEXT: usize = 32;

const STEPS: i64 = 90;

/// A text of few words, which a model learns soon. With `bad` four of its 350 samples are random bytes.
fn text(bad: bool) -> Vec<u8> {
    let words = ["shoal", "swim", "deep", "reef", "coral", "tide"];
    let mut random = 1_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize
    };
    let mut text = Vec::new();
    while text.len() < 350 * CONTEXT {
        text.extend(words[next() % words.len()].bytes());
        text.push(b' ');
    }
    text.truncate(350 * CONTEXT);
    if bad {
        text[40 * CONTEXT..44 * CONTEXT].fill_with(|| next() as u8);
    }
    text
}

/// A run on the text, whose gradients are not clipped.
fn run_on(text: &[u8], guard: &str) -> Run {
    let changes: Vec<(&str, toml::Value)> = vec![
        ("training.steps", STEPS.into()),
        ("training.stages", 2.into()),
        ("training.microbatches", 4.into()),
        ("training.microbatch_size", 1.into()),
        ("optimizer.learning_rate", 1e-2.into()),
        ("optimizer.gradient_clip", 0.0.into()),
        ("evaluation.every", 0.into()),
        ("checkpoint.every", 5.into()),
    ];
    let run = match guard {
        "" => Run::tiny(&changes),
        guard => Run::with_section(("guard", guard.parse().expect("valid TOML")), &changes),
    };
    fs::write(run.path("text.txt"), text).expect("room for the text");
    run
}

const GUARD: &str = "deviations = 6.0\nwindow = 32\nleast = 16";

/// The steps that the guard of a run found far out.
fn outliers(trained: &Trained) -> Vec<usize> {
    let found = trained.report["outliers"].as_object();
    found.into_iter().flatten().map(|(step, _)| step.parse().expect("a step")).collect()
}

#[test]
fn a_bad_shard_does_no_harm_and_deaths_change_no_verdict() {
    let clean = run_on(&text(false), GUARD).local("clean");
    assert!(outliers(&clean).is_empty(), "{:#}", clean.report);
    let run = run_on(&text(true), GUARD);
    let alone = run.local("alone");
    let mut skipped = outliers(&alone);
    skipped.sort_unstable();
    assert!((2..=4).contains(&skipped.len()), "four samples of an epoch are bad: {skipped:?}");
    let unguarded = run_on(&text(true), "").local("unguarded");
    // The loss of the last steps on good rows alone.
    let loss = |trained: &Trained| {
        let losses = trained.losses();
        let good = (50..losses.len()).filter(|step| !skipped.contains(step));
        let good: Vec<f64> = good.map(|step| losses[step]).collect();
        good.iter().sum::<f64>() / good.len() as f64
    };
    let [clean, guarded, unguarded] = [&clean, &alone, &unguarded].map(loss);
    assert!(guarded < 1.02 * clean, "{guarded} beside {clean}");
    assert!(unguarded > 1.03 * clean, "{unguarded} beside {clean}");

    // Three anchors, of which the first, the coordinator, dies once a step was skipped.
    let archive = run.path("archive");
    let archived = ["--archive", archive.to_str().expect("a plain path")];
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "5"], SLOW].concat());
    for flags in [&["--anchor"][..], &["--anchor"], &archived, &[]] {
        swarm.join(&[flags, SLOW].concat());
    }
    assert_eq!(swarm.peers[0].event("anchors")["count"], 3);
    let first = swarm.peers[1].event("outlier");
    assert_eq!(first["step"], skipped[0], "{first}");
    assert_eq!(first["rate"], 0.0, "{first}");
    swarm.peers.remove(0).kill();
    let last = loop {
        let saved = swarm.peers[2].event("checkpoint");
        if saved["version"] == STEPS {
            break saved;
        }
    };
    for peer in swarm.peers {
        let _ = peer.end().success();
    }
    assert_eq!(last["hash"], alone.hash());
}

/// A run of which many gradients exceed what the sums can hold.
fn overflowing(patience: i64) -> Run {
    let changes: [(&str, toml::Value); 6] = [
        ("training.steps", 3.into()),
        ("training.stages", 2.into()),
        ("training.gradient_fraction_bits", 56.into()),
        ("training.microbatches", 8.into()),
        ("model.initializer_range", 1.0.into()),
        ("training.microbatch_size", 1.into()),
    ];
    let guard = toml::Table::from_iter([("patience".to_owned(), patience.into())]);
    Run::with_section(("guard", guard), &changes)
}

#[test]
fn gradients_out_of_range_skip_their_step_in_a_swarm_too() {
    let run = overflowing(3);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    swarm.join(&[]);
    swarm.join(&[]);
    let trained = swarm.finish();
    let all = json!({"0": "not_finite", "1": "not_finite", "2": "not_finite"});
    assert_eq!(trained.report["outliers"], all);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn too_many_gradients_out_of_range_stop_the_run() {
    let run = overflowing(2);
    let end = Process::start("local", local_command(&run.config(), &run.path("out"))).end();
    let failure = end.failure(1);
    assert!(failure.contains("the numbers diverged at step 2"), "{failure}");
    assert!(failure.contains("over the accumulator's range"), "{failure}");
}
