//! Virtual workers: swarms that sync now and then have the bits of one process.

use shoal_tests::process::Process;
use shoal_tests::run::{Run, local_command};
use shoal_tests::swarm::{SLOW, Swarm, own_address};
use toml::{Table, Value};

/// A run of six outer steps of three workers, each of four steps, with a checkpoint after every second outer step.
fn run(codec: &str, moments: &str, overlap: u32) -> Run {
    run_with(codec, moments, overlap, &[])
}

fn run_with(codec: &str, moments: &str, overlap: u32, changes: &[(&str, Value)]) -> Run {
    let outer = Table::from_iter([
        ("workers".to_owned(), Value::from(3)),
        ("every".to_owned(), Value::from(4)),
        ("codec".to_owned(), Value::from(codec)),
        ("moments".to_owned(), Value::from(moments)),
        ("overlap".to_owned(), Value::from(overlap)),
    ]);
    let values = [
        ("training.steps", Value::from(24)),
        ("training.stages", Value::from(1)),
        ("training.microbatches", Value::from(2)),
        ("checkpoint.every", Value::from(8)),
    ];
    Run::with_section(("outer", outer), &[&values, changes].concat())
}

/// The swarm ends with the bits of one process.
fn assert_ends_as_alone(swarm: Swarm, run: &Run) {
    let trained = swarm.finish();
    let alone = run.alone();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
    let losses = alone.losses();
    assert!(losses.len() == 6 && losses[5] < losses[0], "{losses:?}");
}

/// Three peers, one of which has two devices, sync; one dies and comes back, and the one with two devices dies.
fn assert_survives_deaths(run: &Run) {
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "3"], SLOW].concat());
    swarm.join(&[&["--device", "cpu:2"], SLOW].concat());
    swarm.join(SLOW);
    swarm.reach(2);
    swarm.peers.remove(2).kill();
    swarm.join(SLOW);
    swarm.reach(4);
    swarm.peers.remove(1).kill();
    assert_ends_as_alone(swarm, run);
}

// Every kind of worker once, with the codecs and moments among them: what these change is arithmetic, which the engine's
// tests compare, and what deaths do to workers is the simulator's to try.

#[test]
fn workers_survive_deaths() {
    assert_survives_deaths(&run("int4", "mean", 0));
}

#[test]
fn workers_that_train_while_sums_travel_survive_deaths() {
    assert_survives_deaths(&run("f32", "zero", 4));
}

#[test]
fn workers_that_join_a_sync_on_their_way_survive_deaths() {
    assert_survives_deaths(&run("int4", "zero", 3));
}

#[test]
fn workers_of_devices_that_share_slices_survive_deaths() {
    assert_survives_deaths(&run_with("f32", "zero", 0, &[("model.slices", Value::from(2))]));
}

/// Two pipelines of two stages; peers of both stages die, one in the middle of an exchange.
fn assert_pipelines_survive_deaths(run: &Run) {
    let homes = tempfile::tempdir().expect("room for a folder");
    let flags = ["--stage", "0", "--wait-for", "4"];
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &[&flags, SLOW].concat());
    swarm.join(&[&["--stage", "1", "--device", "cpu:2"], SLOW].concat());
    swarm.join(&[&["--stage", "0"], SLOW].concat());
    swarm.join_to_die("gradient-unsent:5", &["--stage", "1"]);
    assert_eq!(swarm.peers.remove(3).end().code, None, "it dies at its fault point");
    swarm.join(&[&["--stage", "1"], SLOW].concat());
    swarm.reach(1);
    swarm.peers.remove(3).kill();
    swarm.join(&[&["--stage", "0"], SLOW].concat());
    swarm.reach(3);
    swarm.peers.remove(2).kill();
    assert_ends_as_alone(swarm, run);
}

#[test]
fn workers_of_several_peers_survive_deaths() {
    let stages = [("training.stages", Value::from(2))];
    assert_pipelines_survive_deaths(&run_with("int8", "mean", 0, &stages));
    assert_pipelines_survive_deaths(&run_with("int4", "zero", 2, &stages));
}

#[test]
fn workers_go_on_with_their_only_anchor_from_a_checkpoint() {
    assert_goes_on_from_a_checkpoint(&run("int8", "mean", 0));
    assert_goes_on_from_a_checkpoint(&run("int8", "zero", 2));
}

fn assert_goes_on_from_a_checkpoint(run: &Run) {
    let homes = tempfile::tempdir().expect("room for a folder");
    let address = own_address().to_string();
    let start = || {
        let flags = ["--listen", &address, "--wait-for", "1"];
        Swarm::start_in(homes.path(), &run.config(), &[&flags, SLOW].concat())
    };
    let mut swarm = start();
    swarm.reach(3);
    swarm.peers[0].kill();
    let mut again = start();
    let rewound = again.peers[0].event("rewound");
    assert!(rewound["version"].as_u64().expect("a number") >= 2, "{rewound}");
    assert_eq!(again.finish().hash(), run.alone().hash());
}

#[test]
fn workers_that_cannot_be_are_refused() {
    let refused = |changes: &[(&str, Value)]| {
        let outer = Table::from_iter([
            ("workers".to_owned(), Value::from(3)),
            ("every".to_owned(), Value::from(4)),
        ]);
        let steps = [("training.steps", Value::from(24)), ("training.stages", Value::from(1))];
        let run = Run::with_section(("outer", outer), &[&steps, changes].concat());
        Process::start("local", local_command(&run.config(), &run.path("none"))).end().failure(2)
    };
    let text = refused(&[("training.steps", Value::from(26))]);
    assert!(text.contains("training.steps = 26") && text.contains("a multiple of outer.every = 4"));
    let two = Value::from(2);
    let text = refused(&[("training.stages", two.clone()), ("model.slices", two)]);
    assert!(text.contains("outer workers do not go with model.slices and"), "{text}");
    let text = refused(&[("outer.codec", Value::from("int3"))]);
    assert!(text.contains("unknown variant `int3`"), "{text}");
    let text = refused(&[
        ("outer.moments", Value::from("mean")),
        ("codec.all_reduce", Value::from("bf16")),
    ]);
    assert!(text.contains("where codec.all_reduce rounds"), "{text}");
    let text = refused(&[("training.staleness", Value::from(1))]);
    assert!(text.contains("in place of which there is outer.overlap"), "{text}");
    let text = refused(&[("outer.overlap", Value::from(5))]);
    assert!(text.contains("outer.overlap = 5 is out of range"), "{text}");
    let text = refused(&[("outer.overlap", Value::from(true))]);
    assert!(text.contains("expected u32"), "{text}");
    let text = refused(&[("model.slices", Value::from(2)), ("outer.overlap", Value::from(1))]);
    assert!(text.contains("an outer.overlap of fewer than outer.every steps"), "{text}");
    let text = refused(&[("outer.momentum", Value::from(1.5))]);
    assert!(text.contains("outer.momentum = 1.5 is out of range"), "{text}");
}
