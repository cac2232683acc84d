//! A swarm trains the same bits as one process, with any placement and any speeds.

use std::fs;
use std::path::Path;

use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, Trained, checkpoint_hash, local, text};
use shoal_tests::swarm::Swarm;
use toml::Value;

/// Trains a run with a peer for each list of flags. The first one starts the run.
fn swarm(config: &Path, peers: &[&[&str]]) -> Trained {
    let members = peers.len().to_string();
    let (first, others) = peers.split_first().expect("at least one");
    let mut swarm = Swarm::start(config, &[&["--wait-for", &members], *first].concat());
    for flags in others {
        swarm.join(flags);
    }
    let trained = swarm.finish();
    assert_eq!(trained.report["peers"], peers.len(), "all peers took part");
    trained
}

/// Checks that a report has every step, and every microbatch exactly once.
fn assert_whole(trained: &Trained, steps: u64, microbatches: u64, stages: u64) {
    let report = &trained.report;
    assert_eq!(report["steps"].as_array().expect("a list").len() as u64, steps);
    assert_eq!(report["stages"], stages);
    assert_eq!(report["kills"], 0);
    let numbers = &report["microbatches"];
    assert_eq!(numbers["counted"], steps * microbatches * stages);
    assert_eq!(numbers["missing"], 0);
    assert_eq!(numbers["duplicated"], 0);
}

#[test]
fn any_placement_gives_the_bits_of_one_process() {
    let run = Run::tiny(&[]);
    let alone = run.alone();
    let shapes: [&[&[&str]]; 2] = [
        &[&["--stage", "2"], &["--stage", "0"], &["--stage", "1"], &["--stage", "all"]],
        &[&[], &[], &[], &[], &[], &[]],
    ];
    for shape in shapes {
        let trained = swarm(&run.config(), shape);
        assert_whole(&trained, 4, 6, 3);
        assert_eq!(trained.hash(), alone.hash(), "peers: {shape:?}");
        assert_eq!(trained.losses(), alone.losses(), "peers: {shape:?}");
    }
}

#[test]
fn slow_peers_change_the_routes_but_not_the_bits() {
    let run = Run::tiny(&[("training.microbatches", Value::from(12))]);
    let (slow, slower): (&[&str], &[&str]) = (&["--slow-down", "15"], &["--slow-down", "60"]);
    let trained = swarm(&run.config(), &[slow, &[], slower, &[], slow, &[]]);
    assert_whole(&trained, 4, 12, 3);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_run_in_bf16_gives_the_bits_of_one_process() {
    let bf16 = || Value::from("bf16");
    let run = Run::tiny(&[
        ("training.dtype", bf16()),
        ("codec.activations", bf16()),
        ("codec.activation_gradients", bf16()),
    ]);
    let trained = swarm(&run.config(), &[&[], &[], &[], &[]]);
    let alone = run.alone();
    assert_whole(&trained, 4, 6, 3);
    assert_eq!(trained.hash(), alone.hash());
    assert_ne!(alone.hash(), Run::tiny(&[]).alone().hash(), "bf16 is not f32");
}

/// Peers with one stage each, two of some stages.
const SPREAD: &[&[&str]] = &[&[], &[], &[], &[], &[]];
/// A peer with all stages, beside one that packs its messages.
const WHOLE: &[&[&str]] = &[&["--stage", "all"], &["--packing", "zstd"]];

/// Trains a run in one process and in a swarm, and checks that the bits are the same.
fn trained_by(peers: &[&[&str]], run: &Run, what: &str) -> Trained {
    let trained = swarm(&run.config(), peers);
    assert_whole(&trained, 4, 6, 3);
    assert_eq!(trained.hash(), run.alone().hash(), "{what}");
    trained
}

#[test]
fn lossy_codecs_give_the_bits_of_one_process_with_any_placement() {
    let lossy = |activations: &str, gradients: &str| {
        Run::tiny(&[
            ("codec.activations", Value::from(activations)),
            ("codec.activation_gradients", Value::from(gradients)),
            ("codec.gradient_rounding", Value::from("stochastic")),
        ])
    };
    let mut hashes = vec![Run::tiny(&[]).alone().hash()];
    for (activations, gradients, peers) in
        [("int8", "int8:32", SPREAD), ("fp8", "int4:16", WHOLE), ("f16", "fp8:128", WHOLE)]
    {
        let what = format!("{activations}, {gradients}");
        let hash = trained_by(peers, &lossy(activations, gradients), &what).hash();
        assert!(!hashes.contains(&hash), "{what} change something");
        hashes.push(hash);
    }
}

#[test]
fn narrow_boundaries_give_the_bits_of_one_process_with_any_placement() {
    for (kind, width, codec, peers) in [
        ("bottleneck", 12, "f32", WHOLE),
        ("maxout", 8, "int8", WHOLE),
        ("subspace", 8, "int8", SPREAD),
    ] {
        let codecs = [
            ("codec.activations", Value::from(codec)),
            ("codec.activation_gradients", Value::from(codec)),
        ];
        let run = Run::with_boundary(kind, width, &codecs);
        let losses = trained_by(peers, &run, kind).losses();
        assert!(losses.last() < losses.first(), "{kind} learns: {losses:?}");
    }
}

#[test]
fn rounded_sums_count_every_microbatch_once_and_stay_close() {
    let exact = Run::tiny(&[]).alone();
    let run = Run::tiny(&[("codec.all_reduce", Value::from("int8:32"))]);
    // Two replicas of each stage, which must agree after every step.
    let trained = swarm(&run.config(), &[&[], &[], &[], &[], &[], &[]]);
    assert_whole(&trained, 4, 6, 3);
    for (loss, expected) in trained.losses().iter().zip(exact.losses()) {
        assert!((loss - expected).abs() < 0.01, "{loss} instead of {expected}");
    }
}

#[test]
fn delayed_updates_give_the_bits_of_one_process_with_any_placement() {
    let prompt = Run::tiny(&[]).alone();
    let placements: [(&str, &[&[&str]]); 2] =
        [("f32", &[&[], &[], &[], &[]]), ("int8:32", &[&["--stage", "all"], &["--stage", "all"]])];
    for (codec, peers) in placements {
        let run = Run::tiny(&[
            ("training.staleness", Value::from(1)),
            ("codec.activations", Value::from(codec)),
            // Checkpoints contain the older weights as well.
            ("checkpoint.every", Value::from(2)),
        ]);
        let alone = run.alone();
        let trained = swarm(&run.config(), peers);
        assert_whole(&trained, 4, 6, 3);
        assert_eq!(trained.hash(), alone.hash(), "{codec}");
        assert_eq!(trained.losses(), alone.losses(), "{codec}");
        assert_ne!(alone.hash(), prompt.hash(), "its steps read older weights");
    }
}

#[test]
fn recomputed_graphs_give_the_bits_of_kept_ones() {
    let trained = Run::tiny(&[("training.recompute", Value::from(true))]).local("recomputed");
    assert_whole(&trained, 4, 6, 3);
    let kept = Run::tiny(&[]).local("kept");
    assert_ne!(trained.report["run_hash"], kept.report["run_hash"], "another manifest");
    assert_eq!(trained.hash(), kept.hash());
}

#[test]
fn a_run_without_steps_writes_the_initial_checkpoint() {
    let run = Run::tiny(&[("training.steps", Value::from(0))]);
    let trained = swarm(&run.config(), &[&[], &[], &[]]);
    assert_whole(&trained, 0, 6, 3);
    let alone = run.alone();
    assert_eq!(trained.hash(), alone.hash());
    assert_ne!(alone.hash(), Run::tiny(&[]).alone().hash(), "training changes weights");
}

#[test]
fn a_demo_leaves_a_run_that_can_be_repeated() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let out = folder.path().join("demo");
    let flags = "--peers 5 --stages 3 --steps 3 --seed 11 --slow-peer 1=20 --slow-peer 3=50";
    let mut demo = shoal(["demo"]);
    demo.args(flags.split(' ')).arg("--data").arg(text()).arg("--out").arg(&out);
    let shown = Process::start("demo", demo).end().success();
    let trained = Trained::read(&out);
    assert_whole(&trained, 3, 8, 3);
    assert_eq!(trained.report["peers"], 5);
    assert_eq!(trained.report["seed"], 11);
    assert_eq!(trained.report["reference_hash"], trained.report["checkpoint_hash"]);
    assert_eq!(checkpoint_hash(&out.join("reference/checkpoint")), trained.hash());
    let hash = trained.hash();
    let line = shown.lines().find(|line| line.contains("identical")).expect("a comparison");
    assert_eq!(line.matches(&hash[..16]).count(), 2, "both hashes are shown: {line}");
    for left in ["run.toml", "loss.svg", "logs/peer-0.log", "logs/peer-4.log"] {
        assert!(out.join(left).is_file(), "the demo leaves {left}");
    }

    let config = out.join("run.toml");
    assert_eq!(local(&config, &folder.path().join("local")).hash(), hash);
    assert_eq!(swarm(&config, &[&[], &[], &[]]).hash(), hash);
}

#[test]
fn a_first_stage_without_the_text_fetches_it_by_hash() {
    let run = Run::tiny(&[]);
    let mut swarm = Swarm::start(&run.config(), &["--stage", "2", "--wait-for", "3"]);
    swarm.join(&["--stage", "1"]);
    swarm.join(&["--stage", "0"]);
    let homes = [0, 1, 2].map(|index| swarm.data_dir(index));
    for peer in &mut swarm.peers {
        peer.event("finished");
    }
    let texts = homes.map(|home| home.join("tokens")).map(|folder| token_file(&folder));
    assert!(texts[0].is_some(), "the first peer made the tokens");
    assert_eq!(texts[1], None, "a middle stage needs no tokens");
    assert_eq!(texts[2], texts[0]);
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

/// The name and the bytes of the token file in a folder.
fn token_file(folder: &Path) -> Option<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).ok()?;
    let paths = entries.map(|entry| entry.expect("readable").path());
    let path =
        paths.into_iter().find(|path| path.extension().is_some_and(|end| end == "tokens"))?;
    Some((path.file_name()?.to_str()?.to_owned(), fs::read(&path).expect("readable")))
}
