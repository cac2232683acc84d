//! Peers with different addresses, as on several machines.

use std::path::Path;

use shoal_tests::emulator::link::{Access, Config};
use shoal_tests::emulator::network::Machines;
use shoal_tests::namespace::Star;
use shoal_tests::process::Process;
use shoal_tests::run::{Run, Trained};
use shoal_tests::skip;
use shoal_tests::swarm::{join_command, start_command};

/// Starts the first peer in the middle. Gives it and the address that it prints.
fn first(star: &Star, run: &Run, out: &Path, flags: &[&str]) -> (Process, String) {
    // The flag has only the port: each peer finds out its own addresses.
    let mut start = start_command(&run.config(), &run.path("peer-0"), out);
    start.args(["--listen", "0.0.0.0:7411"]).args(flags);
    let mut first = Process::start("peer-0", star.within(Star::MIDDLE, &start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    (first, address)
}

fn end_all(peers: impl IntoIterator<Item = Process>) {
    for peer in peers {
        let _ = peer.end().success();
    }
}

#[test]
fn peers_in_two_network_namespaces_train_together() {
    let star = match Star::new(1) {
        Ok(star) => star,
        Err(reason) => return skip(&format!("network namespaces: {reason}")),
    };
    let run = Run::tiny(&[]);
    let out = run.path("out");
    let (first, address) = first(&star, &run, &out, &["--wait-for", "4"]);
    assert!(address.contains(&Star::middle(1)), "{address}");
    let mut peers = vec![first];
    for (index, place) in [(1, 1), (2, 1), (3, Star::MIDDLE)] {
        let name = format!("peer-{index}");
        let join = join_command(&address, &run.path(&name));
        peers.push(Process::start(&name, star.within(place, &join)));
    }
    end_all(peers);
    let trained = Trained::read(&out);
    assert_eq!(trained.report["peers"], 4);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// The machine in the middle is in two networks, and each end is in one of them: the ticket has an address of both.
#[test]
fn two_members_without_a_path_join_by_one_ticket_and_train_through_a_relay() {
    let star = match Star::new(2) {
        Ok(star) => star,
        Err(reason) => return skip(&format!("network namespaces: {reason}")),
    };
    let run = Run::tiny(&[
        ("training.steps", 4.into()),
        ("training.stages", 2.into()),
        ("admission.mode", "invite".into()),
    ]);
    let (out, file) = (run.path("out"), run.path("ticket"));
    // The peer in the middle hosts no stage: all tensors go from one end to the other.
    let file_name = file.to_str().expect("a path in UTF-8");
    let flags = ["--wait-for", "3", "--stage", "none", "--address-file", file_name];
    let (first, _) = first(&star, &run, &out, &flags);
    let ticket = std::fs::read_to_string(&file).expect("a ticket");
    let ends = [1, 2].map(|end| {
        let name = format!("peer-{end}");
        let mut join = join_command(ticket.trim(), &run.path(&name));
        join.args(["--stage", &(end - 1).to_string()]);
        Process::start(&name, star.within(end, &join))
    });
    end_all([first].into_iter().chain(ends));
    let trained = Trained::read(&out);
    assert_eq!(trained.report["microbatches"]["replayed"], 0, "no peer was expelled");
    assert_eq!(trained.hash(), run.alone().hash());
}

#[test]
fn machines_train_over_slow_links_that_lose_packets() {
    let access = Access { up_mbit: Some(50.0), down_mbit: Some(200.0) };
    let config = Config {
        ends: vec![access; 3],
        delay_ms: 10.0,
        jitter_ms: 2.0,
        queue_ms: 20.0,
        loss: 0.01,
        seed: 1,
    };
    let mut machines = match Machines::new(&config) {
        Ok(machines) => machines,
        Err(reason) => return skip(&format!("an emulated network: {reason}")),
    };
    let run = Run::tiny(&[]);
    let out = run.path("out");
    let mut start = start_command(&run.config(), &run.path("peer-0"), &out);
    start.args(["--listen", "0.0.0.0:7411", "--wait-for", "3"]);
    let mut first = Process::start("peer-0", machines.within(0, &start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    let others = [1, 2].map(|end| {
        let name = format!("peer-{end}");
        let join = join_command(&address, &run.path(&name));
        Process::start(&name, machines.within(end, &join))
    });
    end_all([first].into_iter().chain(others));
    let counts = machines.stop();
    assert!(counts.iter().all(|end| end.lost > 0), "every machine lost packets: {counts:?}");
    let trained = Trained::read(&out);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}

/// Two distant places have two peers each, one at each stage. All-reduces, which are the largest traffic, cross the
/// long link until two peers exchange their stages.
#[test]
fn distant_members_exchange_stages_and_the_bits_are_the_same() {
    let access = Access { up_mbit: Some(20.0), down_mbit: Some(20.0) };
    let config = Config {
        ends: vec![access; 2],
        delay_ms: 20.0,
        jitter_ms: 1.0,
        queue_ms: 50.0,
        loss: 0.0,
        seed: 1,
    };
    let machines = match Machines::new(&config) {
        Ok(machines) => machines,
        Err(reason) => return skip(&format!("an emulated network: {reason}")),
    };
    let run = Run::tiny(&[
        ("training.stages", toml::Value::from(2)),
        ("training.steps", toml::Value::from(60)),
        ("model.layers", toml::Value::from(4)),
        ("model.hidden", toml::Value::from(128)),
        ("model.intermediate", toml::Value::from(344)),
    ]);
    let out = run.path("out");
    // A wait in each pass, which makes all peers about equally fast, and one stage at each.
    let slow = ["--slow-down", "25", "--stage", "auto:1"];
    let mut start = start_command(&run.config(), &run.path("peer-0"), &out);
    start.args(["--listen", "0.0.0.0:7411", "--wait-for", "4", "--rebalance", "1"]).args(slow);
    let mut first = Process::start("peer-0", machines.within(0, &start));
    let address = first.event("listening")["address"].as_str().expect("text").to_owned();
    let mut peers = vec![first];
    let mut stages = vec![peers[0].joined_stage()];
    for (index, place) in [(1, 0), (2, 1), (3, 1)] {
        let name = format!("peer-{index}");
        let mut join = join_command(&address, &run.path(&name));
        join.args(slow);
        peers.push(Process::start(&name, machines.within(place, &join)));
        stages.push(peers[index].joined_stage());
    }
    assert_ne!(stages[0], stages[1], "the first two peers host different stages");

    let moves = [peers[0].event("moves"), peers[0].event("moves")];
    assert!(moves.iter().all(|moves| moves["reason"] == "nearer"), "{moves:?}");
    // The events of the first peer have been read.
    let own =
        |moves: &&serde_json::Value| address.ends_with(moves["peer"].as_str().expect("an id"));
    if let Some(moves) = moves.iter().find(own) {
        stages[0] = moves["to"][0].as_u64().expect("a stage");
    }
    for (peer, stage) in peers.iter_mut().zip(&mut stages).skip(1) {
        *stage = peer.last_stage(*stage);
    }
    assert_eq!((stages[0], stages[2]), (stages[1], stages[3]), "{stages:?}");
    assert_ne!(stages[0], stages[2], "{stages:?}");
    end_all(peers);
    let trained = Trained::read(&out);
    assert_eq!(trained.report["microbatches"]["missing"], 0);
    assert_eq!(trained.hash(), run.alone().hash());
}
