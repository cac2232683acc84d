//! Peers that host more stages than their memory holds: the model is the same, with kills too.

use std::fs;

use shoal_tests::cgroup::MemoryGroup;
use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained, local_command, trained_by};
use shoal_tests::skip;
use shoal_tests::swarm::{Swarm, own_address};

/// Bytes of a run's checkpoint: 12 for a weight. Its state in training is more than twice as large.
fn checkpoint_bytes(trained: &Trained) -> u64 {
    let files = fs::read_dir(trained.checkpoint()).expect("it is there");
    files.map(|file| file.and_then(|file| file.metadata()).expect("readable").len()).sum()
}

/// The kernel kills a process that needs more than its group may have.
#[test]
fn a_process_ends_within_a_third_of_the_memory_of_its_state() {
    // Most of it is the program and libtorch. Many small stages make a state of three times as much with the fewest
    // bytes on the disk, which has 50 for a weight.
    const LIMIT: u64 = 245 << 20;
    let group = match MemoryGroup::new(LIMIT) {
        Ok(group) => group,
        Err(reason) => return skip(&format!("no control group: {reason}")),
    };
    let run = Run::of_stages(36, 256, 1);
    let out = run.path("swapped");
    let mut command = local_command(&run.config(), &out);
    command.args(["--memory", "48MiB"]);
    group.hold(&mut command);
    let swapped = trained_by(command, &out);
    // Weights, moments, accumulator and mean gradient: 24 bytes for a weight.
    assert!(2 * checkpoint_bytes(&swapped) > 3 * LIMIT, "{}", checkpoint_bytes(&swapped));
    assert!(group.peak() <= LIMIT, "{}", group.peak());
    assert_eq!(swapped.hash(), run.local("whole").hash());
}

#[test]
fn too_little_memory_for_one_stage_is_refused_with_what_would_do() {
    let run = Run::of_stages(8, 64, 1);
    let mut command = local_command(&run.config(), &run.path("out"));
    command.args(["--memory", "1MiB"]);
    let reason = Process::start("local", command).end().failure(3);
    assert!(reason.starts_with("hosting stage 0-7 takes ") && reason.contains("1.0 MiB is there"));
}

/// Two peers host half of the stages each, in half of the memory of their state.
#[test]
#[cfg(debug_assertions)]
fn two_peers_that_swap_are_killed_while_they_do() {
    const FLAGS: &[&str] = &["--memory", "22MiB", "--stage"];
    let run = Run::of_stages(8, 192, 5);
    let homes = tempfile::tempdir().expect("room for a folder");
    let address = own_address().to_string();
    let listen = &["--listen", &address, "--wait-for", "2"];
    let first = [FLAGS, &["0-3"], listen].concat();
    let second = [FLAGS, &["4-7"]].concat();
    let mut swarm = Swarm::start_to_die(homes.path(), &run.config(), "swapping:25", &first);
    swarm.join_to_die("swapping:12", &second);
    let died = |peer: Process| {
        let outcome = peer.end();
        assert_eq!(outcome.code, None, "it dies while it swaps: {}", outcome.stderr);
    };
    died(swarm.peers.pop().expect("it joined"));
    swarm.join(&second);
    let other = swarm.peers.pop().expect("it joined");
    died(swarm.peers.pop().expect("it started"));
    let mut again = Swarm::start_in(homes.path(), &run.config(), &first);
    again.peers.push(other);
    let trained = again.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert!(checkpoint_bytes(&trained) > 2 * (22 << 20), "{}", checkpoint_bytes(&trained));
    assert_eq!(trained.hash(), run.local("whole").hash());
}
