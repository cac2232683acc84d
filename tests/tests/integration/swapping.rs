//! Peers that host more stages than their memory holds: the model is the same, with kills too.

use std::fs;
#[cfg(debug_assertions)]
use std::{path::Path, process::Command};

#[cfg(debug_assertions)]
use nix::sys::statvfs::statvfs;
use shoal_tests::cgroup::MemoryGroup;
use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained, local_command, trained_by};
use shoal_tests::skip;
#[cfg(debug_assertions)]
use shoal_tests::swarm::{DIE_AT, Swarm, join_command, own_address, start_command};

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
    assert_eq!(swapped.hash(), run.alone().hash());
}

#[test]
fn too_little_memory_for_one_stage_is_refused_with_what_would_do() {
    let run = Run::of_stages(8, 64, 1);
    let mut command = local_command(&run.config(), &run.path("out"));
    command.args(["--memory", "1MiB"]);
    let reason = Process::start("local", command).end().failure(3);
    assert!(reason.starts_with("hosting stage 0-7 takes ") && reason.contains("1.0 MiB is there"));
}

#[test]
fn too_little_memory_of_a_device_for_one_stage_is_refused_with_what_would_do() {
    let run = Run::of_stages(8, 64, 1);
    let mut command = local_command(&run.config(), &run.path("out"));
    command.args(["--device-memory", "100KiB"]);
    let reason = Process::start("local", command).end().failure(3);
    assert!(reason.starts_with("the weights of one stage and a pass take "));
    assert!(reason.contains("100.0 KiB is there"), "{reason}");
}

/// A machine without a GPU, too, can have weights pass through a device of so much memory.
#[test]
fn weights_that_pass_through_a_device_make_the_same_model() {
    let run = Run::of_stages(8, 64, 3);
    let out = run.path("device");
    let mut command = local_command(&run.config(), &out);
    command.args(["--device-memory", "1MiB"]);
    let events = Process::start("local", command).end().success();
    let through = Trained::read(&out);
    let last = events.lines().last().expect("the end is an event");
    let last: serde_json::Value = serde_json::from_str(last).expect("an event is JSON");
    let copied = &last["swapped"]["copied"];
    assert!(copied.as_u64() > Some(checkpoint_bytes(&through)), "{last}");
    assert_eq!(through.hash(), run.alone().hash());
}

/// Two peers that host half of the stages each.
#[cfg(debug_assertions)]
struct Halves<'a> {
    run: &'a Run,
    homes: &'a Path,
    /// Further flags of each.
    flags: [&'a [&'a str]; 2],
    /// Holds both.
    group: Option<&'a MemoryGroup>,
}

#[cfg(debug_assertions)]
impl Halves<'_> {
    /// Kills each while it swaps, starts it again, and returns what came out.
    fn killed_while_they_swap(&self, [first, second]: [&str; 2]) -> Trained {
        let address = own_address().to_string();
        let start = |moment| {
            let out = self.homes.join("out");
            let command = start_command(&self.run.config(), &self.homes.join("peer-0"), &out);
            let flags = [self.flags[0], &["--listen", &address, "--wait-for", "2"]].concat();
            Swarm::started_by(self.held(command, moment), self.homes, &flags)
        };
        let join = |swarm: &Swarm, moment| {
            let mut command = join_command(&swarm.address, &self.homes.join("peer-1"));
            command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(self.flags[1]);
            Process::start("peer-1", self.held(command, moment))
        };
        let died = |peer: Process| {
            let outcome = peer.end();
            assert_eq!(outcome.code, None, "it dies while it swaps: {}", outcome.stderr);
        };
        let mut swarm = start(Some(first));
        died(join(&swarm, Some(second)));
        let other = join(&swarm, None);
        died(swarm.peers.pop().expect("it started"));
        let mut again = start(None);
        again.peers.push(other);
        let trained = again.finish();
        assert_eq!(trained.report["microbatches"]["missing"], 0);
        trained
    }

    fn held(&self, mut command: Command, moment: Option<&str>) -> Command {
        if let Some(moment) = moment {
            command.env(DIE_AT, moment);
        }
        if let Some(group) = self.group {
            group.hold(&mut command);
        }
        command
    }
}

/// In half of the memory of their state. The weights of one pass through a device, too.
#[test]
#[cfg(debug_assertions)]
fn two_peers_that_swap_are_killed_while_they_do() {
    const FIRST: &[&str] = &["--memory", "22MiB", "--stage", "0-3"];
    const SECOND: &[&str] = &["--memory", "22MiB", "--device-memory", "6MiB", "--stage", "4-7"];
    let run = Run::of_stages(8, 192, 5);
    let homes = tempfile::tempdir().expect("room for a folder");
    let flags = [FIRST, SECOND];
    let peers = Halves { run: &run, homes: homes.path(), flags, group: None };
    let trained = peers.killed_while_they_swap(["swapping:25", "swapping:12"]);
    assert!(checkpoint_bytes(&trained) > 2 * (22 << 20), "{}", checkpoint_bytes(&trained));
    assert_eq!(trained.hash(), run.alone().hash());
}

/// Two devices that share slices swap their shares, alone and beside a peer of one device, with kills.
#[test]
#[cfg(debug_assertions)]
fn devices_that_share_slices_swap_and_are_killed_while_they_do() {
    const DEVICES: [&str; 4] = ["--device", "cpu:2", "--memory", "28MiB"];
    const FIRST: &[&str] = &["--device", "cpu:2", "--memory", "28MiB", "--stage", "0-3"];
    const SECOND: &[&str] = &["--memory", "22MiB", "--stage", "4-7"];
    let run = Run::of_sliced_stages(8, 192, 5, 2);
    let whole = run.alone();
    let out = run.path("swapped");
    let mut command = local_command(&run.config(), &out);
    command.args(DEVICES);
    let mut process = Process::start("local", command);
    let read = process.event("finished")["swapped"]["read"].as_u64();
    let _ = process.end().success();
    let swapped = Trained::read(&out);
    assert!(read > Some(checkpoint_bytes(&swapped)), "{read:?}");
    assert_eq!((swapped.hash(), swapped.losses()), (whole.hash(), whole.losses()));

    let homes = tempfile::tempdir().expect("room for a folder");
    let peers = Halves { run: &run, homes: homes.path(), flags: [FIRST, SECOND], group: None };
    let trained = peers.killed_while_they_swap(["swapping:25", "swapping:12"]);
    assert_eq!(trained.hash(), whole.hash());
}

/// The kernel kills peers that together need more than a third of their state, with program, libtorch and page cache.
#[test]
#[cfg(debug_assertions)]
fn two_peers_end_within_a_third_of_the_memory_of_their_state() {
    const LIMIT: u64 = 450 << 20;
    const FIRST: &[&str] = &["--memory", "42MiB", "--stage", "0-30"];
    const SECOND: &[&str] = &["--memory", "42MiB", "--stage", "31-61"];
    let homes = tempfile::tempdir().expect("room for a folder");
    let disk = statvfs(homes.path()).expect("a file system");
    let (free, needs) = (disk.blocks_available() * disk.fragment_size(), 9 << 30);
    if free < needs {
        return skip(&format!("the disk has {} GiB and {} are used", free >> 30, needs >> 30));
    }
    let group = match MemoryGroup::new(LIMIT) {
        Ok(group) => group,
        Err(reason) => return skip(&format!("no control group: {reason}")),
    };
    let run = Run::of_stages(62, 256, 2);
    let flags = [FIRST, SECOND];
    let peers = Halves { run: &run, homes: homes.path(), flags, group: Some(&group) };
    let trained = peers.killed_while_they_swap(["swapping:120", "swapping:20"]);
    // Weights, moments, accumulator and mean gradient: 24 bytes for a weight.
    assert!(2 * checkpoint_bytes(&trained) > 3 * LIMIT, "{}", checkpoint_bytes(&trained));
    assert!(group.peak() <= LIMIT, "{}", group.peak());
    assert_eq!(trained.hash(), run.alone().hash());
}
