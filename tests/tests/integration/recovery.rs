//! Peers die and join: the run continues, and the model is bit-identical.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use shoal_tests::PATIENCE;
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, Trained, text};
use shoal_tests::swarm::{SLOW, Swarm, own_address, start_command};
use tempfile::TempDir;

fn assert_whole(trained: &Trained, steps: u64) {
    let report = &trained.report;
    assert_eq!(report["steps"].as_array().expect("a list").len() as u64, steps);
    assert_eq!(report["microbatches"]["counted"], steps * 6 * 2);
    assert_eq!(report["microbatches"]["missing"], 0);
}

#[test]
fn a_stage_with_another_replica_survives_a_death() {
    let run = Run::of_two_stages(8, 0);
    let mut swarm = Swarm::slow_at(&run.config(), 4, 2);
    let mut victim = swarm.peers.remove(3);
    victim.kill();
    let trained = swarm.finish();
    assert_whole(&trained, 8);
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// One of two replicas of a stage is killed, and a newcomer takes its place with a snapshot.
#[test]
fn a_run_in_a_subspace_survives_a_death() {
    let changes =
        [("training.steps", toml::Value::from(8)), ("training.stages", toml::Value::from(2))];
    let run = Run::with_boundary("subspace", 6, &changes);
    let mut swarm = Swarm::slow_at(&run.config(), 4, 2);
    swarm.peers.remove(3).kill();
    swarm.join(SLOW);
    let trained = swarm.finish();
    assert_whole(&trained, 8);
    let alone = run.alone();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
}

#[test]
fn an_output_log_on_disk_is_replayed_after_a_death() {
    let run = Run::of_two_stages(8, 0);
    let flags = &[SLOW, &["--log-memory", "0"]].concat();
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "4"], &flags[..]].concat());
    for _ in 1..4 {
        swarm.join(flags);
    }
    swarm.reach(2);
    swarm.peers.remove(3).kill();
    let trained = swarm.finish();
    assert_whole(&trained, 8);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_newcomer_catches_up_while_training_runs_and_serves() {
    let run = Run::of_two_stages(40, 0);
    let mut swarm = Swarm::slow_at(&run.config(), 2, 1);
    swarm.join(SLOW);
    let serving = swarm.peers[2].event("serving");
    assert!(serving["version"].as_u64().expect("a number") > 1, "{serving}");
    let applied = swarm.peers[2].event("committed");
    assert!(applied["step"].as_u64() >= serving["version"].as_u64(), "{applied}");
    let trained = swarm.finish();
    assert_whole(&trained, 40);
    assert_eq!(trained.report["peers"], 3);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_stage_without_replicas_is_restored_from_a_checkpoint() {
    let run = Run::of_two_stages(10, 2);
    let mut swarm = Swarm::slow_at(&run.config(), 2, 4);
    let mut victim = swarm.peers.remove(1);
    victim.kill();
    swarm.join(SLOW);
    let rewound = swarm.peers[0].event("rewound");
    assert!(rewound["version"].as_u64().expect("a number") >= 2, "{rewound}");
    let trained = swarm.finish();
    assert_whole(&trained, 10);
    assert_eq!(trained.report["rewinds"], 1);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// A swarm whose first peer can be started again at the same address. The others host the second stage and the
/// first in turn, so two of them host both.
fn lasting_swarm(homes: &Path, run: &Run, address: &str, peers: usize) -> Swarm {
    let flags = ["--listen", address, "--wait-for", &peers.to_string()];
    let mut swarm = Swarm::start_in(homes, &run.config(), &[&flags, SLOW].concat());
    for peer in 1..peers {
        swarm.join(&[&["--stage", if peer % 2 == 0 { "0" } else { "1" }], SLOW].concat());
    }
    swarm
}

#[test]
fn the_run_waits_for_its_only_anchor_and_continues_with_it() {
    let run = Run::of_two_stages(10, 2);
    let homes = tempfile::tempdir().expect("room for a folder");
    let address = own_address().to_string();
    let mut swarm = lasting_swarm(homes.path(), &run, &address, 3);
    swarm.reach(4);
    swarm.peers[0].kill();
    let mut again = lasting_swarm(homes.path(), &run, &address, 1);
    assert_eq!(again.peers[0].event("became_coordinator")["term"], 2);
    again.peers.extend(swarm.peers.drain(1..));
    let trained = again.finish();
    // The others hosted every stage, so their work counts.
    assert_eq!(trained.report["rewinds"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// A swarm of five peers, of which the first three are anchors, after a few steps.
fn anchored_swarm(homes: &Path, run: &Run, address: &str, archive: &Path) -> Swarm {
    let archive = archive.to_str().expect("a plain path");
    let mut swarm = Swarm::start_in(
        homes,
        &run.config(),
        &[&["--listen", address, "--wait-for", "5"], SLOW].concat(),
    );
    for flags in [&["--anchor"][..], &["--anchor"], &["--archive", archive], &[]] {
        swarm.join(&[flags, SLOW].concat());
    }
    reach_three_anchors(&mut swarm);
    swarm
}

/// Such a swarm with 30 steps at an address of its own, with its run, its folder and the archive in that folder.
fn anchored() -> (Run, TempDir, PathBuf, Swarm) {
    let run = Run::of_two_stages(30, 5);
    let homes = tempfile::tempdir().expect("room for a folder");
    let archive = homes.path().join("archive");
    let swarm = anchored_swarm(homes.path(), &run, &own_address().to_string(), &archive);
    (run, homes, archive, swarm)
}

/// Waits until the run has three anchors, and for a few more steps.
fn reach_three_anchors(swarm: &mut Swarm) {
    assert_eq!(swarm.peers[0].event("anchors")["count"], 3);
    let step = swarm.peers[0].event("committed")["step"].as_u64().expect("a number");
    swarm.reach(step + 2);
}

/// Waits until a peer has archived the last checkpoint and all peers have ended, and gives its event.
fn archived(mut swarm: Swarm, mut archivist: Process, steps: u64) -> Value {
    let last = loop {
        let saved = archivist.event("checkpoint");
        if saved["version"] == steps {
            break saved;
        }
    };
    for peer in swarm.peers.drain(..).chain([archivist]) {
        let _ = peer.end().success();
    }
    last
}

#[test]
fn the_run_survives_the_coordinator_with_three_anchors() {
    let (run, _homes, archive, mut swarm) = anchored();
    swarm.peers.remove(0).kill();
    // The coordinator does not come back. Another peer has every checkpoint.
    let archivist = swarm.peers.remove(2);
    let last = archived(swarm, archivist, 30);
    assert_eq!(last["hash"], run.alone().hash());
    assert!(archive.join("checkpoint").is_dir());
}

#[test]
fn an_anchor_that_returns_after_the_end_learns_that_the_run_is_over() {
    let (run, _homes, _, mut swarm) = anchored();
    swarm.peers[1].kill();
    // The run has expelled the anchor and continued.
    assert_eq!(swarm.peers[0].event("lost")["peer"], swarm.peer_id(1));
    swarm.peers[0].event("finished");
    let latecomer = swarm.newcomer(&swarm.address, 1, &[&["--anchor"], SLOW].concat());
    swarm.peers[1] = latecomer;
    swarm.peers[1].event("finished");
    let trained = swarm.finish();
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_finished_run_succeeds_each_time_it_is_started_again() {
    let run = Run::of_two_stages(2, 0);
    for life in ["first", "second", "third"] {
        let mut start = start_command(&run.config(), &run.path("home"), &run.path("out"));
        start.args(["--stage", "all"]);
        let _ = Process::start(life, start).end().success();
    }
    assert_whole(&Trained::read(&run.path("out")), 2);
}

#[test]
fn peers_without_a_stage_keep_the_log_and_every_checkpoint() {
    let run = Run::of_two_stages(30, 5);
    let homes = tempfile::tempdir().expect("room for a folder");
    let archive = homes.path().join("archive");
    let mut swarm =
        Swarm::start_in(homes.path(), &run.config(), &[&["--wait-for", "6"], SLOW].concat());
    let archive_flag = archive.to_str().expect("a plain path");
    for flags in [
        &["--stage", "none", "--anchor"][..],
        &["--stage", "none", "--anchor", "--archive", archive_flag],
        &["--stage", "0"],
        &["--stage", "1"],
        &["--stage", "1"],
    ] {
        swarm.join(&[flags, SLOW].concat());
    }
    reach_three_anchors(&mut swarm);
    swarm.peers.remove(0).kill();
    let mut archivist = swarm.peers.remove(1);
    assert_eq!(archivist.event("joined")["span"].as_array().map(Vec::len), Some(0));
    let last = archived(swarm, archivist, 30);
    assert_eq!(last["hash"], run.alone().hash());
}

#[test]
fn the_newest_checkpoint_can_be_fetched_from_a_running_swarm() {
    let run = Run::of_two_stages(1_000_000, 2);
    let listen = own_address();
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    swarm.join(&[]);
    let member = swarm.newcomer(&swarm.address, 2, &["--listen", &listen.to_string()]);
    swarm.peers.push(member);
    let saved = swarm.peers[0].event("checkpoint");
    let address = format!("/ip4/{}/tcp/{}/p2p/{}", listen.ip(), listen.port(), swarm.peer_id(2));
    let folder = tempfile::tempdir().expect("room for a folder");
    let out = folder.path().join("model");
    // Every peer knows the checkpoint, and not only the coordinator.
    for address in [&swarm.address, &address] {
        let mut fetch = shoal(["checkpoint", "fetch", address, "-o"]);
        fetch.arg(&out);
        let printed = Process::start("fetch", fetch).end().success();
        assert!(printed.starts_with("version"), "{printed}");
        let verified = shoal(["checkpoint".as_ref(), "verify".as_ref(), out.as_os_str()]);
        let verified = Process::start("verify", verified).end().success();
        let version: u64 =
            verified.split(' ').find_map(|word| word.parse().ok()).expect("a version");
        assert!(version >= saved["version"].as_u64().expect("a number"), "{verified}");
    }
}

#[test]
fn with_two_of_three_anchors_dead_the_run_pauses_until_one_is_back() {
    let run = Run::of_two_stages(30, 5);
    let homes = tempfile::tempdir().expect("room for a folder");
    let address = own_address().to_string();
    let archive = homes.path().join("archive");
    let mut swarm = anchored_swarm(homes.path(), &run, &address, &archive);
    for mut victim in swarm.peers.drain(..2) {
        victim.kill();
    }
    let paused = swarm.peers[0].event("paused");
    assert_eq!((&paused["answering"], &paused["anchors"]), (&1.into(), &3.into()));
    let mut again = lasting_swarm(homes.path(), &run, &address, 1);
    again.peers.append(&mut swarm.peers);
    let trained = again.finish();
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_run_continues_after_all_peers_were_killed_and_started_again() {
    let run = Run::of_two_stages(24, 2);
    let homes = tempfile::tempdir().expect("room for a folder");
    for (step, address) in [(0, own_address()), (6, own_address()), (12, own_address())] {
        let mut swarm = lasting_swarm(homes.path(), &run, &address.to_string(), 3);
        swarm.reach(step);
        for peer in &mut swarm.peers {
            peer.kill();
        }
    }
    let trained = lasting_swarm(homes.path(), &run, &own_address().to_string(), 3).finish();
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_drained_peer_leaves_in_order_and_the_others_continue() {
    let run = Run::of_two_stages(40, 0);
    let mut swarm = Swarm::slow_at(&run.config(), 5, 1);
    let leaving = swarm.peers.remove(4);
    leaving.terminate();
    let _ = leaving.end().success();
    let notice = swarm.data_dir(0).join("notice");
    let flags = ["--preempt-file", notice.to_str().expect("a plain path")];
    swarm.join(&[SLOW, &flags].concat());
    swarm.peers[4].event("serving");
    fs::write(&notice, "").expect("room for a file");
    let _ = swarm.peers.remove(4).end().success();
    let trained = swarm.finish();
    assert_whole(&trained, 40);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_run_whose_last_peer_is_told_to_leave_goes_on_where_it_was() {
    let run = Run::tiny(&[
        ("checkpoint.interval", toml::Value::from(300)),
        ("training.steps", toml::Value::from(30)),
    ]);
    let homes = tempfile::tempdir().expect("room for a folder");
    let flags = ["--stage", "all"];
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &[&flags[..], SLOW].concat());
    swarm.reach(4);
    let leaving = swarm.peers.remove(0);
    leaving.terminate();
    let _ = leaving.end().success();
    let mut swarm = Swarm::start_in(homes.path(), &run.config(), &flags);
    assert!(swarm.peers[0].event("committed")["step"].as_u64() > Some(4), "nothing is repeated");
    assert_eq!(swarm.finish().hash(), run.alone().hash());
}

#[test]
fn another_replica_writes_the_checkpoint_of_a_full_disk() {
    let run = Run::of_two_stages(6, 2);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3", "--stage", "0"]);
    // A file in place of the folder of written checkpoints: even root cannot write into it.
    let home = swarm.data_dir(1);
    fs::create_dir_all(&home).expect("room for a folder");
    fs::write(home.join("stored"), "").expect("room for a file");
    for _ in 0..2 {
        swarm.join(&["--stage", "1"]);
    }
    let trained = swarm.finish();
    assert_whole(&trained, 6);
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_demo_with_delayed_updates_and_killed_peers_gives_the_reference_bits() {
    // Not less: on a busy machine peers would be killed before they can start.
    kill_in_a_demo(1, 2, &["--codec", "f32", "--staleness", "4"]);
}

#[test]
fn a_demo_with_a_killed_coordinator_gives_the_reference_bits() {
    // Rounding loses the same on every peer and in every repetition.
    kill_in_a_demo(3, 3, &["--codec", "int8"]);
}

#[test]
fn a_demo_of_workers_with_killed_peers_gives_the_reference_bits() {
    kill_in_a_demo_of("--workers 3 --every 2 --steps 8", 3, 4, &[]);
}

/// Runs a demo that kills a peer about every `seconds`.
fn kill_in_a_demo(anchors: u32, seconds: u32, kind: &[&str]) {
    kill_in_a_demo_of("--stages 2 --steps 16", anchors, seconds, kind);
}

/// The same with another number of stages and steps.
fn kill_in_a_demo_of(shape: &str, anchors: u32, seconds: u32, kind: &[&str]) {
    let folder = tempfile::tempdir().expect("room for a folder");
    let out = folder.path().join("demo");
    let mut demo = shoal(["demo"]);
    demo.args("--peers 5 --seed 5".split(' ')).args(shape.split(' '));
    demo.args(["--anchors", &anchors.to_string(), "--kill-every", &seconds.to_string()]);
    demo.args(kind).arg("--data").arg(text()).arg("--out").arg(&out);
    let shown = Process::start("demo", demo).end_within(4 * PATIENCE).success();
    let report = Trained::read(&out).report;
    assert!(report["kills"].as_u64() > Some(0), "the demo killed a peer");
    assert_eq!(report["microbatches"]["missing"], 0);
    assert_eq!(report["microbatches"]["duplicated"], 0);
    assert_eq!(report["reference_hash"], report["checkpoint_hash"]);
    assert!(shown.contains("killed") && shown.contains("identical"), "{shown}");
}
