//! Status, health and readiness of peers and observers.

use serde_json::Value as Json;
use shoal_tests::http::get;
use shoal_tests::run::Run;
use shoal_tests::swarm::{Swarm, own_address};
use toml::Value;

/// The number of queries for a status that must come.
const TRIES: usize = 200;

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
    let seen = swarm.status(1);
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
    assert_eq!(swarm.ask(1, &["healthcheck", "--ready"]).success(), "ready\n");
    let table = swarm.ask(1, &["status"]).success();
    assert!(table.contains("STAGE  PEER") && table.contains("○ watching"), "{table}");

    swarm.peers[3].kill();
    let shown = (0..TRIES).any(|_| {
        swarm.peers[1].event("committed");
        swarm.status(1)["events"].to_string().contains("is gone from stage 1")
    });
    assert!(shown, "{:#}", swarm.status(1));

    // A query of a peer that has ended fails at once.
    swarm.peers[1].terminate();
    let _ = swarm.peers.remove(1).end().success();
    let refused = swarm.ask(1, &["healthcheck"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("no peer that is shown over HTTP runs"), "{}", refused.stderr);
}

#[test]
fn the_curves_of_a_late_joiner_begin_at_the_first_step() {
    let run = Run::tiny(&[("training.steps", Value::from(1_000_000))]);
    let mut swarm = Swarm::start(&run.config(), &["--stage", "all", "--slow-down", "10"]);
    while swarm.peers[0].event("committed")["step"].as_u64() < Some(20) {}
    swarm.join(&["--observer"]);
    swarm.join(&["--stage", "all", "--slow-down", "10"]);
    let first = |swarm: &Swarm, peer| swarm.status(peer)["curves"]["loss"][0][0].as_u64();
    for peer in [1, 2] {
        let joined = swarm.peers[peer].event("committed")["step"].as_u64().expect("a number");
        assert!(joined > 10, "it joins late: {joined}");
        let shown = (0..TRIES).any(|_| {
            swarm.peers[peer].event("committed");
            first(&swarm, peer) == Some(1)
        });
        assert!(shown, "{:#}", swarm.status(peer)["curves"]);
    }
    let [one, other] = [0, 2].map(|peer| swarm.status(peer)["curves"]["loss"].clone());
    let values = |curve: &Json| curve.as_array().expect("a list")[..10].to_vec();
    for (one, other) in values(&one).iter().zip(&values(&other)) {
        let [one, other] = [one, other].map(|point| point[1].as_f64().expect("a loss"));
        assert!((one - other).abs() < 1e-5, "{one} and {other}");
    }
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

#[test]
fn prices_of_members_become_the_cost_of_the_run() {
    let run = Run::of_two_stages(30, 0);
    let priced = |price| ["--price", price, "--slow-down", "15"];
    let mut swarm =
        Swarm::start(&run.config(), &[&["--wait-for", "3"], &priced("0.5")[..]].concat());
    swarm.join(&["--observer"]);
    swarm.join(&priced("2"));
    swarm.peers[1].event("committed");
    let seen = swarm.status(1);
    assert_eq!(seen["cost"]["per_hour"], 2.5, "{seen:#}");
    assert!(seen["cost"]["total"].as_f64().is_some_and(|total| total > 0.0), "{seen:#}");
    let members = seen["members"].as_array().expect("a list");
    let mut prices: Vec<_> = members.iter().filter_map(|member| member["price"].as_f64()).collect();
    prices.sort_by(f64::total_cmp);
    assert_eq!(prices, [0.5, 2.0]);
    let table = swarm.ask(1, &["status"]).success();
    assert!(table.contains(" so far, 2.5000 an hour"), "{table}");

    let report = swarm.finish().report;
    let number = |value: &Json| value.as_f64().expect("a number");
    let steps = report["steps"].as_array().expect("a list");
    // The first step also has the time in which members joined.
    for step in &steps[1..] {
        let expected = 2.5 * number(&step["seconds"]) / 3600.0;
        assert!((number(&step["cost"]) / expected - 1.0).abs() < 1e-6, "{step}");
    }
    let total: f64 = steps.iter().map(|step| number(&step["cost"])).sum();
    assert!((number(&report["cost"]) / total - 1.0).abs() < 1e-6);
    let tokens: f64 = steps.iter().map(|step| number(&step["tokens"])).sum();
    assert!((number(&report["tokens_per_currency_unit"]) / (tokens / total) - 1.0).abs() < 1e-6);
}

#[test]
fn a_run_without_prices_has_no_cost() {
    let report = Run::tiny(&[]).local("alone").report;
    assert_eq!(report.get("cost"), None);
    assert_eq!(report.get("tokens_per_currency_unit"), None);
    assert!(report["steps"].as_array().is_some_and(|steps| steps[0].get("cost").is_none()));
}
