//! The findings of `shoal doctor`, each with a fix.

use std::net::TcpListener;
use std::path::Path;

use serde_json::Value as Json;
use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;
use toml::Value;

/// The exit code where something must be fixed.
const WRONG: i32 = 1;

fn doctor(data_dir: &Path, words: &[&str]) -> Outcome {
    let mut command = shoal(["doctor", "--json", "--device", "cpu"]);
    if !words.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    command.args(words).arg("--data-dir").arg(data_dir);
    Process::start("doctor", command).end()
}

/// The state and the fix of the first finding about a subject.
fn found(printed: &str, about: &str) -> (String, String) {
    let findings: Vec<Json> = serde_json::from_str(printed).expect("it is JSON");
    let finding = findings.iter().find(|finding| finding["about"] == about);
    let finding = finding.unwrap_or_else(|| panic!("nothing about {about} in {printed}"));
    let text = |key: &str| finding[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("fix") + " | " + &text("says"))
}

#[test]
fn a_machine_that_can_join_has_no_findings() {
    let run = Run::tiny(&[
        ("admission.mode", Value::from("invite")),
        ("training.steps", Value::from(1_000_000)),
    ]);
    let swarm = Swarm::start(&run.config(), &["--wait-for", "9"]);
    let mut invite = shoal(["invite", "new", "--data-dir"]);
    invite.arg(swarm.data_dir(0));
    let ticket = Process::start("invite", invite).end().success().trim().to_owned();
    let printed = doctor(&swarm.data_dir(1), &[&ticket]).success();
    let admitted = ["ticket", "peer, TCP", "peer, UDP", "clock"];
    for about in [&["data directory", "libtorch", "TCP port", "UDP port"][..], &admitted].concat() {
        assert_eq!(found(&printed, about).0, "well", "{about}: {printed}");
    }
    // The check counts as the same use of the ticket.
    let mut peer = swarm.newcomer(&ticket, 1, &["--listen", "127.0.0.1:0"]);
    peer.event("joined");
    // The doctor checks a running peer as well, with the peers that it knows.
    let printed = doctor(&swarm.data_dir(1), &[]).success();
    assert_eq!(found(&printed, "certificate").0, "well", "{printed}");
}

#[test]
fn each_problem_comes_with_a_fix() {
    let run = Run::tiny(&[("training.steps", Value::from(1_000_000))]);
    let swarm = Swarm::start(&run.config(), &["--wait-for", "9"]);
    let folder = tempfile::tempdir().expect("a folder");
    // The address has the id of another peer.
    let mut id = shoal(["id", "--data-dir"]);
    id.arg(folder.path().join("stranger"));
    let stranger = Process::start("id", id).end().success().trim().to_owned();
    let wrong = swarm.address.replace(&swarm.peer_id(0), &stranger);
    let outcome = doctor(folder.path(), &[&wrong]);
    let (state, fix) = found(&outcome.stdout, "peer, UDP");
    assert_eq!(state, "wrong");
    assert!(fix.contains(&swarm.peer_id(0)), "{fix}");
    let reason = outcome.failure(WRONG);
    assert!(reason.contains("must be mended"), "{reason}");
    // No process listens at the address.
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let nobody = format!("/ip4/127.0.0.1/tcp/{}/p2p/{stranger}", closed.port());
    let outcome = doctor(folder.path(), &[&nobody]);
    assert!(found(&outcome.stdout, "peer, TCP").1.contains("nobody listens there"));
    assert!(found(&outcome.stdout, "peer, UDP").1.contains("open UDP port"));
    // Another process has the port, and the data directory is a file.
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = taken.local_addr().expect("bound").to_string();
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("room for a file");
    let outcome = doctor(&file, &["--listen", &listen]);
    assert_eq!(found(&outcome.stdout, "TCP port").0, "wrong");
    assert!(found(&outcome.stdout, "data directory").1.contains("another --data-dir"));
    let _ = outcome.failure(WRONG);
}

#[test]
fn a_peer_joins_through_known_peers_when_the_given_one_is_gone() {
    let run = Run::tiny(&[("training.steps", Value::from(1_000_000))]);
    let flags = ["--wait-for", "9", "--anchor"];
    let mut swarm = Swarm::start(&run.config(), &flags[..2]);
    for index in 1..4 {
        swarm.join(&["--anchor"]);
        swarm.peers[index].event("joined");
    }
    // Waits until the peer knows the others, by its file.
    let runs = swarm.data_dir(3).join("runs");
    let name = std::fs::read_dir(&runs).expect("it takes part").flatten().next().expect("in one");
    let met = name.path().join("admission/peers");
    let others = [swarm.peer_id(1), swarm.peer_id(2)];
    let deadline = std::time::Instant::now() + shoal_tests::PATIENCE;
    while !others
        .iter()
        .all(|peer| std::fs::read_to_string(&met).is_ok_and(|text| text.contains(peer.as_str())))
    {
        assert!(std::time::Instant::now() < deadline, "the peer does not learn of the others");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    swarm.peers[0].kill();
    swarm.peers[3].kill();
    let mut again = swarm.newcomer(&swarm.address, 3, &["--listen", "127.0.0.1:0"]);
    again.event("joined");
}
