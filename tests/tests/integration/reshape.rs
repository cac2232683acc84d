//! Runs that go on from a checkpoint of another run, with other stages and another batch.

use std::fs;
use std::path::{Path, PathBuf};

use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, Trained, local};
use shoal_tests::swarm::{SLOW, Swarm, start_command};
use toml::Value;

/// The exit codes for unusable arguments, and for damaged checkpoints.
const USAGE: i32 = 2;
const CORRUPT: i32 = 4;

/// A run of a model that can be cut into five stages.
fn run_of(stages: i64, steps: i64, checkpoint_every: i64) -> Run {
    Run::tiny(&[
        ("model.layers", Value::from(5)),
        ("training.stages", Value::from(stages)),
        ("training.steps", Value::from(steps)),
        ("checkpoint.every", Value::from(checkpoint_every)),
    ])
}

/// Runs `shoal checkpoint reshape` with the configuration of a run.
fn reshape(checkpoint: &Path, run: &Run, out: &Path, flags: &[&str]) -> Outcome {
    let mut command = shoal(["checkpoint", "reshape"]);
    command.arg(checkpoint).arg(run.config()).arg("-o").arg(out).args(flags);
    Process::start("reshape", command).end()
}

/// The configuration of a run that goes on from a checkpoint.
fn reshaped(checkpoint: &Path, run: &Run, flags: &[&str]) -> PathBuf {
    let out = run.path("later.toml");
    let printed = reshape(checkpoint, run, &out, flags).success();
    assert!(printed.contains("kept: weights"), "{printed}");
    out
}

/// A swarm of a number of peers.
fn swarm_of(config: &Path, peers: usize) -> Swarm {
    let members = peers.to_string();
    let mut swarm = Swarm::start(config, &[&["--wait-for", &members], SLOW].concat());
    for _ in 1..peers {
        swarm.join(SLOW);
    }
    swarm
}

/// Kills a peer after a step, and starts it again.
fn replace(swarm: &mut Swarm, peer: usize, step: u64) {
    while swarm.peers[0].event("committed")["step"] != step {}
    swarm.peers[peer].kill();
    let flags = [&["--listen", "127.0.0.1:0"], SLOW].concat();
    swarm.peers[peer] = swarm.newcomer(&swarm.address, peer, &flags);
}

/// The numbers of the committed steps.
fn steps(trained: &Trained) -> Vec<u64> {
    let steps = trained.report["steps"].as_array().expect("a list");
    steps.iter().map(|step| step["step"].as_u64().expect("a number")).collect()
}

/// An edited run.toml does not begin again at the first step beside the run that is in the data directory.
#[test]
fn an_edited_run_is_refused_with_what_differs_and_what_would_do() {
    let run = run_of(1, 40, 1);
    let homes = tempfile::tempdir().expect("room for a folder");
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), SLOW);
    swarm.reach(2);
    swarm.peers[0].kill();
    let (home, out) = (swarm.data_dir(0), homes.path().join("other"));
    let edited =
        fs::read_to_string(run.config()).expect("a file").replace("steps = 40", "steps = 41");
    fs::write(run.path("edited.toml"), edited).expect("room for a file");
    let start = |config: &Path, home: &Path| {
        let mut command = start_command(config, home, &out);
        command.args(["--listen", "127.0.0.1:0", "--no-mdns"]);
        command
    };
    let outcome = Process::start("edited", start(&run.path("edited.toml"), &home)).end();
    assert_eq!(outcome.code, Some(USAGE), "{}", outcome.stderr);
    for part in [
        "training.steps is 40 there and 41 here",
        &format!("{} has run", home.display()),
        "of 40, and run.toml describes another run",
        "shoal checkpoint reshape",
        "another --data-dir",
    ] {
        assert!(outcome.stderr.contains(part), "{part} is not in {}", outcome.stderr);
    }
    // Another data directory begins, and the run itself goes on.
    let mut other =
        Process::start("other", start(&run.path("edited.toml"), &homes.path().join("new")));
    other.event("listening");
    drop(other);
    let mut again = Process::start("again", start(&run.config(), &home));
    assert!(again.event("committed")["step"].as_u64() > Some(0));
}

#[test]
fn a_run_of_three_stages_goes_on_as_one_of_five_through_deaths() {
    let run = run_of(3, 6, 2);
    let mut first = swarm_of(&run.config(), 3);
    replace(&mut first, 2, 3);
    let first = first.finish();
    assert_eq!(first.hash(), run.alone().hash());

    let later = reshaped(
        &first.checkpoint(),
        &run,
        &["--stages", "5", "--microbatches", "4", "--microbatch-size", "1", "--steps", "14"],
    );
    let alone = local(&later, &run.path("later"));
    assert_eq!(steps(&alone), (6..14).collect::<Vec<_>>());
    let mut second = swarm_of(&later, 5);
    replace(&mut second, 4, 8);
    replace(&mut second, 2, 10);
    let second = second.finish();
    assert_eq!(steps(&second), steps(&alone));
    assert_eq!(second.losses(), alone.losses());
    assert_eq!(second.hash(), alone.hash());
    let loss = first.losses()[5];
    assert!((alone.losses()[0] - loss).abs() < 0.3, "{loss} and then {:?}", alone.losses());
}

#[test]
fn the_same_shape_goes_on_to_the_bits_of_one_long_run() {
    // The rates of the steps that both do must be equal: a schedule without a cosine.
    let constant = ("optimizer.final_learning_rate", Value::from(3e-3));
    let of = |steps: i64| {
        let steps = ("training.steps", Value::from(steps));
        Run::tiny(&[constant.clone(), steps])
    };
    let (short, long) = (of(3), of(7));
    let first = short.local("first");
    let later = reshaped(&first.checkpoint(), &short, &["--steps", "7"]);
    let (later, long) = (local(&later, &short.path("later")), long.local("long"));
    assert_eq!(later.losses(), long.losses()[3..]);
    assert_eq!(later.hash(), long.hash());
}

#[test]
fn a_stage_lost_before_the_first_checkpoint_goes_back_to_the_start() {
    let run = run_of(3, 3, 0);
    let first = run.local("first");
    let later = reshaped(&first.checkpoint(), &run, &["--stages", "2", "--steps", "9"]);
    let alone = local(&later, &run.path("later"));
    let mut swarm = swarm_of(&later, 2);
    replace(&mut swarm, 1, 5);
    assert_eq!(swarm.peers[0].event("rewound")["version"], 3);
    let trained = swarm.finish();
    assert_eq!(trained.report["rewinds"], 1);
    assert_eq!(steps(&trained), (3..9).collect::<Vec<_>>());
    assert_eq!(trained.hash(), alone.hash());
}

#[test]
fn what_cannot_go_on_is_refused_in_one_line() {
    let run = run_of(2, 2, 0);
    let checkpoint = run.local("first").checkpoint();
    let out = run.path("later.toml");
    let refused = |run: &Run, flags: &[&str], code| {
        let reason = reshape(&checkpoint, run, &out, flags).failure(code);
        assert!(!out.exists(), "nothing is written");
        reason
    };
    let reason = refused(&run, &[], USAGE);
    assert!(reason.contains("training.steps = 2"), "{reason}");
    let other = Run::tiny(&[("training.steps", Value::from(9))]);
    let reason = refused(&other, &[], USAGE);
    assert!(reason.contains("model.layers = 5 there and 3 here"), "{reason}");

    let config = fs::read_to_string(run.config()).expect("it is there");
    let start = toml::Table::from_iter([("from".to_owned(), Value::from("none"))]);
    let start = toml::Table::from_iter([("start".to_owned(), Value::from(start))]);
    fs::write(run.path("missing.toml"), format!("{config}\n{start}")).expect("room for a file");
    let mut command = shoal(["local", "--out"]);
    command.arg(run.path("out")).arg(run.path("missing.toml"));
    let reason = Process::start("local", command).end().failure(USAGE);
    assert!(reason.contains("start.from: ") && reason.contains("is no checkpoint"), "{reason}");

    let later = reshaped(&checkpoint, &run, &["--steps", "5"]);
    let reason = reshape(&checkpoint, &run, &out, &["--steps", "5"]).failure(USAGE);
    assert!(reason.contains("later.toml exists"), "{reason}");
    let damaged = checkpoint.join("optimizer-00001-of-00002.safetensors");
    let mut bytes = fs::read(&damaged).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::remove_file(&damaged).expect("it is there");
    fs::write(&damaged, bytes).expect("room for a file");
    let mut command = shoal(["local", "--out"]);
    command.arg(run.path("out")).arg(&later);
    let reason = Process::start("local", command).end().failure(CORRUPT);
    assert!(reason.contains("optimizer-00001-of-00002"), "{reason}");
    fs::remove_file(&later).expect("it is there");
    let reason = refused(&run, &["--steps", "5"], CORRUPT);
    assert!(reason.contains("optimizer-00001-of-00002"), "{reason}");
}
