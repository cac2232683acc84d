//! Errors between peers end with one clear line, and never hang.

use std::fs;
use std::net::UdpSocket;

use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, Trained};
use shoal_tests::swarm::{Swarm, own_address, start_command};
use toml::Value;

/// The exit code where no peer can be reached, or none admits the newcomer.
const NOT_ADMITTED: i32 = 3;

/// The exit code for unusable arguments.
const USAGE: i32 = 2;

/// A run with more steps than a test has time for.
fn endless() -> Run {
    Run::tiny(&[("training.steps", Value::from(1_000_000)), ("evaluation.every", Value::from(0))])
}

#[test]
fn a_peer_lost_before_the_first_step_is_replaced() {
    let run = Run::tiny(&[]);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    swarm.join(&[]);
    swarm.peers[1].event("joined");
    swarm.peers[1].kill();
    let lost = swarm.peer_id(1);
    assert_eq!(swarm.peers[0].event("lost")["peer"], lost);
    drop(swarm.peers.remove(1));
    // The second life of the killed peer has the data directory of its first.
    swarm.join(&[]);
    swarm.join(&[]);
    let trained = swarm.finish();
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn a_host_that_never_answers_is_named() {
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let run = endless();
    let mut swarm = Swarm::start(&run.config(), &[]);
    let peer = swarm.peer_id(0);
    swarm.peers[0].kill();
    let port = silent.local_addr().expect("bound").port();
    let address = format!("/ip4/127.0.0.1/tcp/{port}/p2p/{peer}");
    let reason = swarm.newcomer(&address, 1, &["--wait", "0"]).end().failure(NOT_ADMITTED);
    assert!(reason.contains(&address), "{reason}");
}

#[test]
fn a_member_that_is_not_the_coordinator_redirects_a_newcomer() {
    let run = endless();
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    let listen = own_address();
    let member = swarm.newcomer(&swarm.address, 1, &["--listen", &listen.to_string()]);
    swarm.peers.push(member);
    swarm.peers[1].event("joined");
    let address = format!("/ip4/{}/tcp/{}/p2p/{}", listen.ip(), listen.port(), swarm.peer_id(1));
    let mut redirected = swarm.newcomer(&address, 2, &[]);
    redirected.event("joined");
    swarm.peers[0].event("admitted");
}

#[test]
fn a_stage_outside_the_run_is_refused() {
    let run = endless();
    let swarm = Swarm::start(&run.config(), &["--wait-for", "2"]);
    let reason = swarm.newcomer(&swarm.address, 1, &["--stage", "3"]).end().failure(NOT_ADMITTED);
    assert!(reason.contains("stage 3"), "{reason}");
}

#[test]
fn a_machine_without_enough_memory_names_the_shortage() {
    let run = endless();
    let swarm = Swarm::start(&run.config(), &["--wait-for", "2"]);
    let small = ["--memory", "64KiB"];
    let reason = swarm.newcomer(&swarm.address, 1, &small).end().failure(NOT_ADMITTED);
    assert!(reason.contains("of memory and 64.0 KiB is there"), "{reason}");
    let both = ["--memory", "64KiB", "--stage", "none"];
    let mut log_only = swarm.newcomer(&swarm.address, 1, &both);
    log_only.event("joined");
}

#[test]
fn a_data_directory_is_used_by_one_process_at_a_time() {
    let run = endless();
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    swarm.join(&[]);
    swarm.peers[1].event("joined");
    let reason = swarm.newcomer(&swarm.address, 1, &[]).end().failure(2);
    assert!(reason.contains("in use by another process"), "{reason}");
}

#[test]
fn two_concurrent_runs_do_not_mix() {
    let (one, other) = (Run::tiny(&[]), Run::tiny(&[("training.seed", Value::from(8))]));
    let swarms = [&one, &other].map(|run| Swarm::start(&run.config(), &["--wait-for", "3"]));
    let hashes = swarms.map(|mut swarm| {
        swarm.join(&[]);
        swarm.join(&[]);
        swarm.finish().hash()
    });
    assert_eq!(hashes, [&one, &other].map(|run| run.alone().hash()));
    assert_ne!(hashes[0], hashes[1]);
}

#[test]
fn a_peer_takes_part_in_one_run_after_another() {
    let (one, other) = (Run::tiny(&[]), Run::tiny(&[("training.seed", Value::from(8))]));
    let homes = tempfile::tempdir().expect("room for a folder");
    let hashes = [&one, &other].map(|run| {
        let mut swarm = Swarm::start_in(homes.path(), &run.config(), &["--wait-for", "3"]);
        swarm.join(&[]);
        swarm.join(&[]);
        let hash = swarm.finish().hash();
        // The next run would refuse to overwrite the model.
        fs::rename(homes.path().join("out"), run.path("out")).expect("one disk");
        hash
    });
    assert_eq!(hashes, [&one, &other].map(|run| run.alone().hash()));
}

#[test]
fn a_run_does_not_overwrite_the_model_of_another() {
    let (run, other) = (Run::tiny(&[]), Run::tiny(&[("training.steps", Value::from(5))]));
    let first = run.local("out");
    let hash = first.hash();
    let out = run.path("out");
    let config = other.config();
    let start = start_command(&config, &other.path("data"), &out);
    let local = shoal(["local".as_ref(), config.as_os_str(), "--out".as_ref(), out.as_os_str()]);
    for command in [start, local] {
        let reason = Process::start("other", command).end().failure(USAGE);
        assert!(
            reason.contains("belongs to another run") && reason.contains("training.steps"),
            "{reason}"
        );
    }
    assert_eq!(Trained::read(&out).hash(), hash);
    // The same run may overwrite its model.
    assert_eq!(run.local("out").hash(), hash);
}
