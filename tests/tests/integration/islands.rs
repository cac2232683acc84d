//! Peers of several devices train the bits of one device, alone and beside others.

use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained, local_command, trained_by};
use shoal_tests::swarm::{SLOW, Swarm};
use toml::Value;

/// A run of two stages and ten steps, with a checkpoint after every second step.
fn run() -> Run {
    Run::of_two_stages(10, 2)
}

#[test]
fn one_process_with_several_devices_has_the_bits_of_one_device() {
    let run = Run::tiny(&[
        ("training.steps", Value::from(6)),
        ("training.stages", Value::from(3)),
        ("training.microbatches", Value::from(5)),
        ("training.staleness", Value::from(1)),
    ]);
    let alone = run.alone();
    let out = run.path("islands");
    let mut command = local_command(&run.config(), &out);
    command.args(["--device", "cpu:3"]);
    let trained = trained_by(command, &out);
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
}

/// Peers with these devices train beside one with one; the last of them dies and comes back with two.
fn assert_survives_a_death(run: &Run, joining: [&str; 3]) {
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "4"], SLOW].concat());
    for devices in joining {
        swarm.join(&[&["--device", devices], SLOW].concat());
    }
    swarm.reach(2);
    swarm.peers.remove(3).kill();
    swarm.join(&[&["--device", "cpu:2"], SLOW].concat());
    let trained = swarm.finish();
    let alone = run.alone();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
}

#[test]
fn a_swarm_of_unlike_peers_survives_the_death_of_one_with_two_devices() {
    assert_survives_a_death(&run(), ["cpu:2", "cpu:3", "cpu:2"]);
}

/// Devices of a peer that divide its stages: of all four, of the last three, and of those that the coordinator chooses.
#[test]
fn devices_that_divide_the_stages_of_a_peer_survive_deaths() {
    // Enough steps that those who come last find the run under way.
    let run = Run::of_stages(4, 32, 24);
    let alone = run.alone();
    let out = run.path("pipeline");
    let mut command = local_command(&run.config(), &out);
    command.args(["--device", "cpu:2", "--pipeline"]);
    let trained = trained_by(command, &out);
    assert_eq!((trained.hash(), trained.losses()), (alone.hash(), alone.losses()));

    let divided =
        |stages, devices| [&["--stage", stages, "--device", devices, "--pipeline"], SLOW].concat();
    let flags = [&["--wait-for", "3"], &divided("all", "cpu:2")[..]].concat();
    let mut swarm = Swarm::start(&run.config(), &flags);
    swarm.join(&[&["--stage", "0-2"], SLOW].concat());
    swarm.join(&divided("1-3", "cpu:3"));
    swarm.reach(2);
    swarm.peers.remove(2).kill();
    swarm.join(&divided("auto:3", "cpu:2"));
    swarm.reach(5);
    swarm.peers.remove(2).kill();
    swarm.join(&divided("0-1", "cpu:2"));
    let trained = swarm.finish();
    assert_eq!((trained.hash(), trained.losses()), (alone.hash(), alone.losses()));
}

#[test]
fn devices_that_cannot_divide_the_stages_are_refused() {
    let run = sliced();
    let refused = |flags: &[&str]| {
        let mut command = local_command(&run.config(), &run.path("none"));
        command.arg("--pipeline").args(flags);
        Process::start("local", command).end().failure(2)
    };
    let text = refused(&["--device", "cpu"]);
    assert!(text.contains("--pipeline divides the stages among several devices"), "{text}");
    let text = refused(&["--device", "cpu:2"]);
    assert!(text.contains("--pipeline is for runs without slices"), "{text}");
}

#[test]
fn a_stage_whose_only_peer_has_several_devices_is_restored_from_a_checkpoint() {
    let run = run();
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "2"], SLOW].concat());
    swarm.join(&[&["--device", "cpu:2"], SLOW].concat());
    swarm.reach(4);
    swarm.peers.remove(1).kill();
    swarm.join(&[&["--device", "cpu:3"], SLOW].concat());
    let _ = swarm.peers[0].event("rewound");
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

#[test]
fn devices_whose_replicas_do_not_fit_are_refused_with_the_memory_that_they_need() {
    let run = run();
    let mut command = local_command(&run.config(), &run.path("none"));
    command.args(["--device", "cpu:4", "--memory", "1MiB"]);
    let text = Process::start("local", command).end().failure(3);
    assert!(text.contains("of memory and 1.0 MiB is there"), "{text}");
}

/// A run of two stages in two slices.
fn sliced() -> Run {
    Run::tiny(&[
        ("training.steps", Value::from(10)),
        ("training.stages", Value::from(2)),
        ("checkpoint.every", Value::from(2)),
        ("evaluation.every", Value::from(4)),
        ("model.slices", Value::from(2)),
    ])
}

#[test]
fn peers_that_share_slices_among_devices_train_beside_others_and_may_die() {
    // The first has two groups of two.
    assert_survives_a_death(&sliced(), ["cpu:4", "cpu", "cpu:2"]);
}

/// Devices that hold their slices of one stage's weights host both stages, alone and in a swarm.
#[test]
fn devices_that_share_slices_may_have_weights_only_while_passes_read_them() {
    const THROUGH: [&str; 4] = ["--device", "cpu:2", "--device-memory", "350KiB"];
    let run = sliced();
    let alone = run.alone();
    let out = run.path("through");
    let mut command = local_command(&run.config(), &out);
    command.args(THROUGH);
    let mut process = Process::start("local", command);
    let copied = process.event("finished")["swapped"]["copied"].as_u64();
    let _ = process.end().success();
    assert!(copied > Some(0), "{copied:?}");
    let through = Trained::read(&out);
    assert_eq!((through.hash(), through.losses()), (alone.hash(), alone.losses()));

    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "3"], SLOW].concat());
    let passing = [&THROUGH[..], &["--stage", "all"], SLOW].concat();
    swarm.join(SLOW);
    swarm.join(&passing);
    swarm.reach(2);
    swarm.peers.remove(2).kill();
    swarm.join(&passing);
    swarm.reach(5);
    swarm.peers.remove(1).kill();
    assert_eq!(swarm.finish().hash(), alone.hash());
}

#[test]
fn replicas_may_have_their_state_beside_their_devices() {
    let run = run();
    let through = |memory, name: &str| {
        let mut command = local_command(&run.config(), &run.path(name));
        command.args(["--device", "cpu:2", "--device-memory", memory]);
        Process::start("local", command)
    };
    let text = through("300KiB", "none").end().failure(3);
    assert!(text.starts_with("the weights of 2 stages and a pass take "), "{text}");
    let _ = through("600KiB", "through").end().success();
    assert_eq!(Trained::read(&run.path("through")).hash(), run.alone().hash());
}

/// Between stages on peers of unlike devices every activation and gradient crosses once, whatever the number of devices
/// at either end.
#[test]
fn what_peers_of_unlike_devices_send_each_other_crosses_once() {
    let (steps, microbatches, hidden, tokens) = (4, 6, 64, 2 * 32);
    let run = Run::tiny(&[
        ("training.steps", Value::from(steps)),
        ("training.stages", Value::from(2)),
        ("training.microbatches", Value::from(microbatches)),
        ("evaluation.every", Value::from(0)),
        ("model.hidden", Value::from(hidden)),
        ("model.key_value_heads", Value::from(4)),
        ("model.slices", Value::from(4)),
    ]);
    let least = (steps * microbatches * 2 * tokens * hidden * 4) as f64;
    let alone = run.alone();
    for [first, last] in [["cpu:2", "cpu:4"], ["cpu:4", "cpu"]] {
        let flags = |device, stage| ["--device", device, "--stage", stage];
        let waits = [&["--wait-for", "2"], &flags(first, "0")[..]].concat();
        let mut swarm = Swarm::start(&run.config(), &waits);
        swarm.join(&flags(last, "1"));
        let sent = swarm.peers.iter_mut().map(|peer| {
            peer.event("finished")["sent"]["tensor"].as_u64().expect("a number") as f64
        });
        let share = sent.sum::<f64>() / least;
        assert!((0.99..1.05).contains(&share), "{share} of the least from {first} to {last}");
        assert_eq!(swarm.finish().hash(), alone.hash());
    }
}

#[test]
fn devices_that_cannot_have_equal_parts_of_the_slices_are_refused() {
    let run = sliced();
    let mut command = local_command(&run.config(), &run.path("none"));
    command.args(["--device", "cpu:3"]);
    let text = Process::start("local", command).end().failure(2);
    assert!(text.contains("model.slices = 2 cannot be divided among 3 devices"), "{text}");
}

/// Four peers of one stage are two islands, whose sums travel on two levels. One dies while it sends its sums, and a
/// newcomer takes its place.
#[test]
fn islands_of_peers_survive_a_death_in_a_round() {
    let run = Run::tiny(&[
        ("training.steps", Value::from(8)),
        ("training.stages", Value::from(1)),
        ("training.microbatches", Value::from(8)),
    ]);
    let flags = |island| [&["--island", island], SLOW].concat();
    let mut swarm =
        Swarm::start(&run.config(), &[&["--wait-for", "4"], &flags("east")[..]].concat());
    swarm.join(&flags("east"));
    swarm.join(&flags("west"));
    // In the third round: each has three pieces to send.
    swarm.join_to_die("reducing:8", &flags("west"));
    swarm.reach(0);
    let status = swarm.status(0);
    let members = status["members"].as_array().expect("a list");
    let east = members.iter().filter(|member| member["island"] == "east").count();
    assert_eq!(east, 2, "{status}");
    assert_eq!(swarm.peers.remove(3).end().code, None, "it dies at its fault point");
    swarm.join(&flags("west"));
    let trained = swarm.finish();
    let alone = run.alone();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
}
