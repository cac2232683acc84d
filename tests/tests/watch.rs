//! Status, health and readiness of peers and observers.

use std::process::Command;

use serde_json::Value as Json;
use shoal_tests::http::get;
use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::run::Run;
use shoal_tests::swarm::{Swarm, own_address};
use toml::Value;

/// The number of queries for a status that must come.
const TRIES: usize = 200;

/// Runs a command that queries peer number `index` of a swarm.
fn ask(swarm: &Swarm, index: usize, words: &[&str]) -> Outcome {
    let home = swarm.data_dir(index);
    let mut command: Command = shoal(words);
    command.arg("--data-dir").arg(home);
    Process::start("ask", command).end()
}

fn status(swarm: &Swarm, index: usize) -> Json {
    let text = ask(swarm, index, &["status", "-o", "json"]).success();
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn an_observer_shows_the_events_of_the_swarm() {
    let run = Run::tiny(&[
        ("training.steps", Value::from(1_000_000)),
        ("training.stages", Value::from(2)),
    ]);
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "4", "--stage", "all"]);
    swarm.join(&["--observer"]);
    swarm.join(&["--stage", "0"]);
    swarm.join(&["--stage", "1"]);
    swarm.peers[1].event("committed");
    let seen = status(&swarm, 1);
    assert_eq!(seen["node"]["state"], "watching", "{seen:#}");
    assert_eq!(seen["node"]["ready"], true, "{seen:#}");
    let members = seen["members"].as_array().expect("a list");
    let hosting: Vec<&Json> = members.iter().map(|member| &member["stages"]).collect();
    assert_eq!(members.len(), 4, "{seen:#}");
    assert_eq!(hosting.iter().filter(|stages| stages == &&&serde_json::json!([])).count(), 1);
    assert_eq!(members.iter().filter(|member| member["coordinator"] == true).count(), 1);
    assert_eq!(seen["run"]["stages"], 2);
    assert!(seen["training"]["loss"].as_f64().is_some_and(|loss| loss > 1.0), "{seen:#}");
    assert!(seen["curves"]["loss"].as_array().is_some_and(|points| !points.is_empty()));
    assert_eq!(ask(&swarm, 1, &["healthcheck", "--ready"]).success(), "ready\n");
    let table = ask(&swarm, 1, &["status"]).success();
    assert!(table.contains("STAGE  PEER") && table.contains("○ watching"), "{table}");

    swarm.peers[3].kill();
    let shown = (0..TRIES).any(|_| {
        swarm.peers[1].event("committed");
        status(&swarm, 1)["events"].to_string().contains("is gone from stage 1")
    });
    assert!(shown, "{:#}", status(&swarm, 1));

    // A query of a peer that has ended fails at once.
    swarm.peers[1].terminate();
    let _ = swarm.peers.remove(1).end().success();
    let refused = ask(&swarm, 1, &["healthcheck"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("no peer that is shown over HTTP runs"), "{}", refused.stderr);
}

#[test]
fn a_peer_is_ready_from_serving_until_it_drains() {
    let run = Run::tiny(&[("training.steps", Value::from(1_000_000))]);
    let addresses = [own_address(), own_address()];
    let http = addresses.map(|address| address.to_string());
    let slow = ["--stage", "all", "--slow-down", "300"];
    let flags = [&["--wait-for", "2", "--http", &http[0]], &slow[..]].concat();
    let mut swarm = Swarm::start(&run.config(), &flags);
    swarm.join(&[&["--http", &http[1]], &slow[..]].concat());
    swarm.peers[1].event("committed");
    assert_eq!(get(addresses[1], "/readyz"), (200, "ready\n".into()));
    swarm.peers[1].terminate();
    swarm.peers[1].event("draining");
    assert_eq!(get(addresses[1], "/readyz"), (503, "not ready\n".into()));
    let _ = swarm.peers.remove(1).end().success();
    // The other peer continues.
    assert_eq!(get(addresses[0], "/readyz").0, 200);
    assert_eq!(get(addresses[0], "/livez"), (200, "live\n".into()));
}
