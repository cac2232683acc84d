//! Disks that fill or fail under a peer: it ends with one line, the others go on, and the model is the same.

use std::path::Path;
use std::process::Command;

use nix::errno::Errno;
use shoal_tests::failing_disk::{Call, FailingDisk, SmallDisk};
use shoal_tests::process::Process;
use shoal_tests::run::{Run, checkpoint_hash, local_command};
use shoal_tests::skip;
use shoal_tests::swarm::{SLOW, Swarm, join_command, start_command};
use tempfile::TempDir;

/// Memory of a peer that has to swap four of the eight stages of [`eight_stages`].
const SWAPS: &[&str] = &["--memory", "22MiB", "--stage"];

/// The exit code of a peer that is not admitted.
const NOT_ADMITTED: i32 = 3;

fn eight_stages() -> Run {
    Run::of_stages(8, 192, 5)
}

/// A swarm whose first peer swaps stages 0 to 3, and waits for so many peers.
fn swapping_swarm(run: &Run, peers: usize) -> (TempDir, Swarm) {
    let homes = tempfile::tempdir().expect("room for a folder");
    let peers = peers.to_string();
    let first = [SWAPS, &["0-3", "--wait-for", &peers]].concat();
    let swarm = Swarm::start_in(homes.path(), &run.config(), &first);
    (homes, swarm)
}

/// The command of a peer that joins a swarm and swaps stages 4 to 7.
fn second_half(swarm: &Swarm, data_dir: &Path) -> Command {
    let mut command = join_command(&swarm.address, data_dir);
    command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(SWAPS).arg("4-7");
    command
}

/// Checks the only line about a disk that failed under a process.
fn names_the_disk(reason: &str, data_dir: &Path, error: Errno) {
    assert!(reason.starts_with("stage ") && reason.contains("the swap file"), "{reason}");
    assert!(reason.contains(data_dir.to_str().expect("a plain path")), "{reason}");
    assert!(reason.contains(&format!("os error {}", error as i32)), "{reason}");
    assert!(reason.contains("--data-dir"), "it says what to do: {reason}");
}

#[test]
fn a_disk_that_fails_under_one_of_two_replicas_costs_the_others_nothing() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let (_homes, mut swarm) = swapping_swarm(&run, 3);
    let mut command = second_half(&swarm, &swarm.data_dir(1));
    disk.fail(&mut command, Call::Read, 100, Errno::EIO);
    let failing = Process::start("peer-1", command);
    swarm.peers.push(Process::start("peer-2", second_half(&swarm, &swarm.data_dir(2))));
    names_the_disk(&failing.end().failure(1), &swarm.data_dir(1), Errno::EIO);
    let committed = swarm.peers[0].event_before("committed", "lost");
    assert!(committed.is_some(), "it fails in the middle of the training");
    let lost = swarm.peers[0].event("lost");
    assert_eq!(lost["how"], "it left", "nobody waits for it");
    let trained = swarm.finish();
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// The other device waits for its slices, and stops with it.
#[test]
fn a_disk_that_fails_under_one_of_two_devices_is_named() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = Run::of_sliced_stages(8, 192, 5, 2);
    let (_homes, mut swarm) = swapping_swarm(&run, 2);
    let mut command = join_command(&swarm.address, &swarm.data_dir(1));
    command.args(["--no-mdns", "--listen", "127.0.0.1:0", "--device", "cpu:2"]);
    command.args(["--memory", "28MiB", "--stage", "4-7"]);
    disk.fail(&mut command, Call::Read, 100, Errno::EIO);
    let failing = Process::start("peer-1", command);
    names_the_disk(&failing.end().failure(1), &swarm.data_dir(1), Errno::EIO);
    swarm.peers.push(Process::start("peer-2", second_half(&swarm, &swarm.data_dir(2))));
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

/// The other anchors elect a coordinator, and the other archive gets the last checkpoint.
#[test]
fn a_disk_that_fails_under_the_coordinator_makes_another_peer_the_coordinator() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let homes = tempfile::tempdir().expect("room for a folder");
    let (data_dir, archive) = (homes.path().join("peer-0"), homes.path().join("archive"));
    let mut command = start_command(&run.config(), &data_dir, &homes.path().join("out"));
    disk.fail(&mut command, Call::Write, 120, Errno::EIO);
    let first = [SWAPS, &["0-3", "--wait-for", "3"]].concat();
    let mut swarm = Swarm::started_by(command, homes.path(), &first);
    let archive_flag = archive.to_str().expect("a plain path");
    swarm.join(&[SWAPS, &["0-3", "--anchor", "--archive", archive_flag]].concat());
    swarm.join(&[SWAPS, &["4-7", "--anchor"]].concat());
    names_the_disk(&swarm.peers.remove(0).end().failure(1), &data_dir, Errno::EIO);
    for peer in swarm.peers {
        let _ = peer.end().success();
    }
    assert_eq!(checkpoint_hash(&archive.join("checkpoint")), run.alone().hash());
}

/// The file system reserves nothing, and is full in the middle of the training.
#[test]
fn a_disk_that_fills_under_the_only_replica_is_replaced_by_another() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let (_homes, mut swarm) = swapping_swarm(&run, 2);
    let mut command = second_half(&swarm, &swarm.data_dir(1));
    disk.fail(&mut command, Call::Write, 120, Errno::ENOSPC);
    let failing = Process::start("peer-1", command);
    names_the_disk(&failing.end().failure(1), &swarm.data_dir(1), Errno::ENOSPC);
    swarm.peers.push(Process::start("peer-2", second_half(&swarm, &swarm.data_dir(2))));
    let trained = swarm.finish();
    assert_eq!(trained.report["rewinds"], 1);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_process_that_trains_alone_names_the_disk_too() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let out = run.path("out");
    let mut command = local_command(&run.config(), &out);
    command.args(["--memory", "30MiB"]);
    disk.fail(&mut command, Call::Read, 40, Errno::EIO);
    names_the_disk(&Process::start("local", command).end().failure(1), &out, Errno::EIO);
}

/// A new data directory is as good as the old one: `--out` has the checkpoints.
#[test]
fn a_peer_alone_goes_on_from_its_checkpoint_on_a_good_disk() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let homes = tempfile::tempdir().expect("room for a folder");
    let flags = ["--memory", "30MiB", "--stage", "all"];
    let (bad, good) = (homes.path().join("bad"), homes.path().join("good"));
    let out = homes.path().join("out");
    for (call, after) in [(Call::Write, 100), (Call::Read, 100)] {
        let mut command = start_command(&run.config(), &bad, &out);
        command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(flags);
        disk.fail(&mut command, call, after, Errno::EIO);
        let reason = Process::start("peer-0", command).end().failure(1);
        names_the_disk(&reason, &bad, Errno::EIO);
    }
    let command = start_command(&run.config(), &good, &out);
    let mut again = Swarm::started_by(command, homes.path(), &flags);
    let serving = again.peers[0].event("serving");
    assert!(serving["version"].as_u64() > Some(0), "{serving}");
    assert_eq!(again.finish().hash(), run.alone().hash());
}

#[test]
fn a_disk_without_room_for_the_stages_is_refused_with_what_would_do() {
    let disk = match SmallDisk::new(16 << 20) {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let (_homes, swarm) = swapping_swarm(&run, 2);
    let command = second_half(&swarm, &disk.path().join("peer-1"));
    let reason = Process::start("peer-1", command).end().failure(NOT_ADMITTED);
    assert!(reason.starts_with("hosting stage 4-7 takes "), "{reason}");
    assert!(reason.contains(" of disk and ") && reason.contains("--data-dir"), "{reason}");
    assert!(reason.contains(disk.path().to_str().expect("a plain path")), "{reason}");
}

/// Another program takes the room between the measurement and the reservation.
#[test]
fn a_disk_that_is_full_when_the_stages_are_reserved_is_named() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let (_homes, swarm) = swapping_swarm(&run, 2);
    let mut command = second_half(&swarm, &swarm.data_dir(1));
    disk.fail(&mut command, Call::Reserve, 9, Errno::ENOSPC);
    let reason = Process::start("peer-1", command).end().failure(1);
    let path = swarm.data_dir(1);
    assert!(reason.contains(path.to_str().expect("a plain path")), "{reason}");
    assert!(reason.contains(" has no room for ") && reason.contains("--data-dir"), "{reason}");
}

/// A peer takes the stages of another that died beside its own, and only then needs the disk. As long as that is full the
/// run waits for a peer with room.
#[test]
fn a_disk_that_is_full_when_a_peer_gets_further_stages_is_named() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = Run::of_stages(4, 192, 6);
    let memory = &["--memory", "40MiB"];
    let homes = tempfile::tempdir().expect("room for a folder");
    let flags = &[&["--wait-for", "2", "--extend-after", "1"], &memory[..]].concat();
    let data_dir = homes.path().join("peer-0");
    let mut command = start_command(&run.config(), &data_dir, &homes.path().join("out"));
    // The first is the measurement of the disk.
    disk.fail(&mut command, Call::Reserve, 2, Errno::ENOSPC);
    let mut swarm = Swarm::started_by(command, homes.path(), &[flags, SLOW].concat());
    swarm.join(&[memory, SLOW].concat());
    swarm.reach(1);
    swarm.peers.remove(1).kill();
    let reason = swarm.peers.remove(0).end().failure(1);
    assert!(reason.contains(data_dir.to_str().expect("a plain path")), "{reason}");
    assert!(reason.contains(" has no room for ") && reason.contains("--data-dir"), "{reason}");
    let again = Swarm::start_in(homes.path(), &run.config(), flags);
    let trained = again.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// The swap file has its room, so passes go on. The parts of checkpoints wait.
#[test]
fn a_checkpoint_waits_for_room_on_the_disk_of_a_peer_that_swaps() {
    let disk = match SmallDisk::new(256 << 20) {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = eight_stages();
    let (_homes, mut swarm) = swapping_swarm(&run, 2);
    let mut command = second_half(&swarm, &disk.path().join("peer-1"));
    command.args(SLOW);
    swarm.peers.push(Process::start("peer-1", command));
    swarm.reach(0);
    let full = disk.fill();
    let _ = swarm.peers[1].stderr_line("a part of a checkpoint is not written");
    swarm.reach(4);
    drop(full);
    let trained = swarm.finish();
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// What the disk does not take stays in memory; what it does not give back is lost with its peer.
#[test]
fn an_output_log_on_a_disk_that_fails_costs_one_peer_at_most() {
    let disk = match FailingDisk::new() {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    let run = Run::of_two_stages(8, 0);
    let flags = &[SLOW, &["--log-memory", "0"]].concat();
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "4"], &flags[..]].concat());
    for (call, error) in
        [(Call::Reserve, Errno::EOPNOTSUPP), (Call::Write, Errno::ENOSPC), (Call::Read, Errno::EIO)]
    {
        let index = swarm.peers.len();
        let mut command = join_command(&swarm.address, &swarm.data_dir(index));
        command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(flags);
        disk.fail(&mut command, call, 5, error);
        swarm.peers.push(Process::start(&format!("peer-{index}"), command));
    }
    let reason = swarm.peers.remove(3).end().failure(1);
    assert!(reason.starts_with("the output log cannot be read back"), "{reason}");
    let trained = swarm.finish();
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// An anchor may forget nothing that it has logged, so it ends where it cannot write.
#[test]
fn the_only_anchor_ends_on_a_full_disk_and_goes_on_when_there_is_room() {
    let disk = match SmallDisk::new(64 << 20) {
        Ok(disk) => disk,
        Err(reason) => return skip(&reason),
    };
    // The log fills a page of the disk within some steps.
    let run = Run::of_two_stages(60, 1);
    let homes = tempfile::tempdir().expect("room for a folder");
    let (data_dir, out) = (disk.path().join("peer-0"), homes.path().join("out"));
    let begin = |flags: &[&str]| {
        let command = start_command(&run.config(), &data_dir, &out);
        Swarm::started_by(command, homes.path(), &[&["--stage", "all"], flags].concat())
    };
    let mut first = begin(SLOW);
    first.reach(2);
    let full = disk.fill();
    let ended = first.peers.remove(0).end();
    let said = ended.stderr.matches("a part of a checkpoint is not written").count();
    assert!(said <= 2, "once for each stage: {}", ended.stderr);
    let reason = ended.failure(1);
    assert!(reason.contains("cannot write ") && reason.contains("free disk space"), "{reason}");
    assert!(reason.contains(disk.path().to_str().expect("a plain path")), "{reason}");
    drop(full);
    let trained = begin(&[]).finish();
    assert_eq!(trained.hash(), run.alone().hash());
}
