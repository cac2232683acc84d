//! A real Prometheus looks at real peers: every query of the dashboards and every rule has an answer, and
//! alerts fire when what they are about is caused. `make test-system` runs these.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;

use serde_json::Value as Json;
use shoal_tests::process::Process;
use shoal_tests::program::{prepared, root};
use shoal_tests::prometheus::{Prometheus, is_installed, rules};
use shoal_tests::run::Run;
use shoal_tests::swarm::{Swarm, own_address};
use toml::Value;

const ENDLESS: (&str, Value) = ("training.steps", Value::Integer(1_000_000));

/// A run of two stages that goes on until it is ended.
fn endless(more: &[(&str, Value)]) -> Run {
    let mut changes = vec![ENDLESS, ("training.stages", Value::from(2))];
    changes.extend_from_slice(more);
    Run::tiny(&changes)
}

/// Every query of a dashboard, and every choice's, as Grafana would ask them.
fn queries(name: &str) -> Vec<String> {
    let path = root().join("docker/grafana/dashboards").join(name);
    let text = fs::read_to_string(path).expect("a dashboard");
    let dashboard: Json = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("a list");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("a list"));
    let choices = dashboard["templating"]["list"].as_array().expect("a list").iter();
    let values = choices.filter_map(|choice| {
        let query = choice["query"]["query"].as_str()?.strip_prefix("label_values(")?;
        let (series, label) = query.strip_suffix(')')?.rsplit_once(", ")?;
        Some(format!("count by ({label}) ({series})"))
    });
    let expressions = targets.map(|target| target["expr"].as_str().expect("text").to_owned());
    expressions.chain(values).collect()
}

/// What the rules compute beforehand.
fn recorded() -> Vec<String> {
    let text = fs::read_to_string(rules().join("recording.yml")).expect("a file of rules");
    let name = |line: &str| Some(line.trim().strip_prefix("- record: ")?.to_owned());
    text.lines().filter_map(name).collect()
}

#[test]
fn every_query_has_an_answer() {
    let run = endless(&[("checkpoint.every", Value::from(10))]);
    let addresses = [own_address(), own_address(), own_address()];
    let flags: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let Some(prometheus) = Prometheus::start(&addresses, &[]) else { return };
    let mut swarm = Swarm::start(
        &run.config(),
        &["--wait-for", "3", "--stage", "0", "--metrics", &flags[0], "--packing", "zstd"],
    );
    swarm.join(&["--stage", "1", "--metrics", &flags[1]]);
    swarm.join(&["--stage", "1", "--metrics", &flags[2]]);
    swarm.peers[0].event("checkpoint");
    let seen = |query: &str| !prometheus.query(query).is_empty();
    prometheus.wait("a run", || seen("run:shoal_tokens:rate5m > 0"));
    let name = prometheus.query("shoal_steps_total")[0]["metric"]["run"].clone();
    let name = name.as_str().expect("a run has a name").to_owned();
    for address in &addresses {
        let asked = |query: &String| {
            query
                .replace("$__rate_interval", "1m")
                .replace("$run", &name)
                .replace("$instance", &address.to_string())
        };
        let all: Vec<_> = ["run.json", "node.json"].iter().flat_map(|file| queries(file)).collect();
        for query in all.iter().map(asked).chain(recorded()) {
            prometheus.wait(&query, || seen(&query));
        }
    }
    assert_eq!(prometheus.firing(), BTreeSet::new(), "nothing is wrong");
}

#[test]
fn who_is_refused_lost_or_gone_is_noticed() {
    let run = endless(&[("checkpoint.every", Value::from(5))]);
    let address = own_address();
    let metrics = address.to_string();
    // Steps are so short here that most rounds are good ones all the same.
    let soon = [("mean, 60)", "mean, 3)"), ("> 0.2 *", "> 0 *")];
    let Some(prometheus) = Prometheus::start(&[address], &soon) else { return };
    let mut swarm =
        Swarm::start(&run.config(), &["--wait-for", "2", "--stage", "0", "--metrics", &metrics]);
    swarm.join(&["--stage", "1"]);
    swarm.peers[0].event("checkpoint");
    prometheus.wait("the run", || !prometheus.query("run:shoal_tokens:rate5m > 0").is_empty());

    // There is no such stage.
    let reason = swarm.newcomer(&swarm.address, 9, &["--stage", "7"]).end().failure(3);
    assert!(reason.contains("no stage 7"), "{reason}");
    prometheus.await_alert("ShoalPeersRefused");

    // More than five newcomers that die in their first all-reduce.
    for _ in 0..7 {
        swarm.join_to_die("reducing:1", &["--stage", "1"]);
        swarm.peers[0].event("lost");
    }
    prometheus.await_alert("ShoalMembersLost");
    prometheus.await_alert("ShoalRoundsFailing");

    // The last replica of a stage. One that was expelled and came back counts twice among the lost, so a
    // newcomer may still live; with the other replica it dies too.
    for newcomer in swarm.peers.drain(2..) {
        let _ = newcomer.end();
    }
    swarm.peers[1].kill();
    prometheus.await_alert("ShoalStageUncovered");
    prometheus.await_alert("ShoalStalled");
    swarm.join(&["--stage", "1"]);
    swarm.peers[0].event("rewound");
    prometheus.await_alert("ShoalRewound");
    swarm.peers[0].event("committed");
    let over = |name: &str| !prometheus.firing().contains(name);
    prometheus.wait("its end", || over("ShoalStageUncovered") && over("ShoalStalled"));

    // All of them.
    for peer in &mut swarm.peers {
        peer.kill();
    }
    prometheus.await_alert("ShoalRunGone");
}

#[test]
fn a_disk_that_takes_no_checkpoints_is_noticed() {
    let run = endless(&[("checkpoint.every", Value::from(5))]);
    let addresses = [own_address(), own_address()];
    let metrics = addresses.map(|address| address.to_string());
    let Some(prometheus) = Prometheus::start(&addresses, &[]) else { return };
    let flags = ["--wait-for", "2", "--stage", "0", "--metrics", &metrics[0]];
    let mut swarm = Swarm::start(&run.config(), &flags);
    // A file where the folder of what is written should be: even root cannot write into it.
    fs::create_dir_all(swarm.data_dir(1)).expect("room for a folder");
    fs::write(swarm.data_dir(1).join("stored"), "").expect("room for a file");
    swarm.join(&["--stage", "1", "--metrics", &metrics[1]]);
    prometheus.await_alert("ShoalCheckpointStale");
    prometheus.await_alert("ShoalCheckpointFailing");
}

#[test]
fn a_loss_that_rises_is_noticed() {
    let run = Run::tiny(&[
        ENDLESS,
        ("training.stages", Value::from(1)),
        ("optimizer.learning_rate", Value::from(5.0)),
        ("optimizer.warmup_steps", Value::from(12)),
    ]);
    let address = own_address();
    let Some(prometheus) = Prometheus::start(&[address], &[]) else { return };
    // Slow enough for Prometheus to see what it was before.
    let flags = ["--metrics", &address.to_string(), "--slow-down", "50"];
    let mut swarm = Swarm::start(&run.config(), &flags);
    swarm.peers[0].event("committed");
    prometheus.await_alert("ShoalLossDiverged");
}

/// No peer commits such a step, so this one only says that it did.
#[test]
fn a_loss_that_is_no_number_is_noticed() {
    let listener = TcpListener::bind(own_address()).expect("a free port");
    let address = listener.local_addr().expect("bound");
    let Some(prometheus) = Prometheus::start(&[address], &[]) else { return };
    let metrics = "shoal_training_loss{run=\"r\"} NaN\nshoal_gradient_norm{run=\"r\"} 1\n";
    for steps in [0, 1] {
        let text = format!("{metrics}shoal_steps_total{{run=\"r\"}} {steps}\n");
        answer(&listener, &text);
        prometheus.wait("it", || !prometheus.query("shoal_steps_total").is_empty());
        if steps == 0 {
            assert_eq!(prometheus.firing(), BTreeSet::new(), "before the first step it never is");
        }
    }
    prometheus.await_alert("ShoalLossDiverged");
}

/// Answers one question for metrics.
fn answer(listener: &TcpListener, metrics: &str) {
    let (mut stream, _) = listener.accept().expect("Prometheus asks");
    let mut question = [0; 4096];
    let _ = stream.read(&mut question).expect("it says what it asks for");
    let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n";
    stream.write_all(format!("{head}{metrics}").as_bytes()).expect("it listens");
}

#[test]
fn a_log_that_too_few_keep_is_noticed() {
    let run = endless(&[]);
    let address = own_address();
    let metrics = address.to_string();
    let Some(prometheus) = Prometheus::start(&[address], &[]) else { return };
    let mut swarm =
        Swarm::start(&run.config(), &["--wait-for", "3", "--metrics", &metrics, "--stage", "all"]);
    swarm.join(&["--anchor"]);
    swarm.join(&["--anchor"]);
    while swarm.peers[0].event("anchors")["count"] != 3 {}
    prometheus.wait("three anchors", || !prometheus.query("shoal_anchors == 3").is_empty());
    swarm.peers[1].kill();
    swarm.peers[2].kill();
    prometheus.await_alert("ShoalLogPaused");
}

/// What promtool says of a file, if it is there.
fn promtool(arguments: &[&str]) {
    if !is_installed("promtool") {
        return;
    }
    let mut command = Command::new("promtool");
    command.current_dir(rules()).args(arguments);
    let printed = Process::start("promtool", prepared(command)).end().success();
    assert!(!printed.contains("FAILED") && !printed.contains("WARNING"), "{printed}");
}

#[test]
fn promtool_has_nothing_to_say() {
    promtool(&["check", "config", "prometheus.yml"]);
    promtool(&["check", "rules", "recording.yml", "alerts.yml"]);
}

#[test]
fn every_alert_fires_when_it_should_and_not_before() {
    promtool(&["test", "rules", "alerts_test.yml"]);
    let read = |name: &str| fs::read_to_string(rules().join(name)).expect("a file of rules");
    let (alerts, tests) = (read("alerts.yml"), read("alerts_test.yml"));
    for name in alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        let summary = format!("runbook: docs/operations.md#{}", name.to_lowercase());
        assert!(tests.contains(&summary), "no test has {name} fire");
    }
}
