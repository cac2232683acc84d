//! A real Prometheus scrapes real peers: every query of the dashboards and every rule has an answer, and each
//! alert fires once its cause is there. `make test-system` runs these.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::Value as Json;
use shoal_tests::process::Process;
use shoal_tests::program::{prepared, root};
use shoal_tests::prometheus::{Prometheus, is_installed, rules};
use shoal_tests::run::Run;
use shoal_tests::swarm::{Swarm, own_address};
use toml::{Table, Value};

const ENDLESS: (&str, Value) = ("training.steps", Value::Integer(1_000_000));

/// A run of two stages that does not end by itself.
fn endless(more: &[(&str, Value)]) -> Run {
    let mut changes = vec![ENDLESS, ("training.stages", Value::from(2))];
    changes.extend_from_slice(more);
    Run::tiny(&changes)
}

/// Every query of a dashboard and of its variables, as Grafana sends them.
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

/// The names of the recorded series.
fn recorded() -> Vec<String> {
    let text = fs::read_to_string(rules().join("recording.yml")).expect("a file of rules");
    let name = |line: &str| Some(line.trim().strip_prefix("- record: ")?.to_owned());
    text.lines().filter_map(name).collect()
}

#[test]
fn every_query_of_the_dashboards_has_an_answer() {
    let experts: Table = "count = 4\nper_token = 2\nintermediate = 16".parse().expect("valid TOML");
    let experts = ("model.experts", Value::from(experts));
    let run = endless(&[("checkpoint.every", Value::from(10)), experts]);
    let addresses = [own_address(), own_address(), own_address()];
    let flags: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    let Some(prometheus) = Prometheus::start(&addresses, &[]) else { return };
    let scored = ["--on-checkpoint", r#"echo '{"accuracy": 0.5}'"#];
    let first = ["--wait-for", "3", "--stage", "0", "--metrics", &flags[0], "--packing", "zstd"];
    let mut swarm = Swarm::start(&run.config(), &[&first[..], &scored].concat());
    swarm.join(&[&["--stage", "1", "--metrics", &flags[1]][..], &scored].concat());
    swarm.join(&[&["--stage", "1", "--metrics", &flags[2]][..], &scored].concat());
    swarm.peers[0].event("checkpoint");
    prometheus.await_answer("run:shoal_tokens:rate5m > 0");
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
            prometheus.await_answer(&query);
        }
    }
    assert_eq!(prometheus.firing(), BTreeSet::new(), "nothing is wrong");
}

/// An endless run with a checkpoint every few steps.
fn checkpointed() -> Run {
    endless(&[("checkpoint.every", Value::from(5))])
}

#[test]
fn refused_lost_and_missing_peers_raise_alerts() {
    let run = checkpointed();
    let address = own_address();
    let metrics = address.to_string();
    // A stall of three seconds counts, not of a minute.
    let Some(prometheus) = Prometheus::start(&[address], &[("mean, 60)", "mean, 3)")]) else {
        return;
    };
    let mut swarm =
        Swarm::start(&run.config(), &["--wait-for", "2", "--stage", "0", "--metrics", &metrics]);
    swarm.join(&["--stage", "1"]);
    swarm.peers[0].event("checkpoint");
    prometheus.await_answer("run:shoal_tokens:rate5m > 0");

    // There is no such stage.
    let reason = swarm.newcomer(&swarm.address, 9, &["--stage", "7"]).end().failure(3);
    assert!(reason.contains("no stage 7"), "{reason}");
    prometheus.await_alert("ShoalPeersRefused");

    // More than five newcomers die in their first all-reduce. Each of these rounds is mended: a death alone
    // starts none anew.
    for _ in 0..7 {
        swarm.join_to_die("reducing:1", &["--stage", "1"]);
        swarm.peers[0].event("lost");
    }
    prometheus.await_alert("ShoalMembersLost");
    prometheus.await_answer("shoal_rounds_mended_total > 0");
    assert!(!prometheus.firing().contains("ShoalRoundsFailing"), "no all-reduce timed out");

    // The last replica of a stage dies. A peer that was expelled and came back counts twice among the lost, so
    // a newcomer may still live; it ends first.
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

    // All peers die.
    for peer in &mut swarm.peers {
        peer.kill();
    }
    prometheus.await_alert("ShoalRunGone");
}

#[test]
fn a_disk_that_takes_no_checkpoints_raises_alerts() {
    let run = checkpointed();
    let addresses = [own_address(), own_address()];
    let metrics = addresses.map(|address| address.to_string());
    let Some(prometheus) = Prometheus::start(&addresses, &[]) else { return };
    let flags = ["--wait-for", "2", "--stage", "0", "--metrics", &metrics[0]];
    let mut swarm = Swarm::start(&run.config(), &flags);
    // A file in place of the folder of written checkpoints: even root cannot write into it.
    fs::create_dir_all(swarm.data_dir(1)).expect("room for a folder");
    fs::write(swarm.data_dir(1).join("stored"), "").expect("room for a file");
    swarm.join(&["--stage", "1", "--metrics", &metrics[1]]);
    prometheus.await_alert("ShoalCheckpointStale");
    prometheus.await_alert("ShoalCheckpointFailing");
}

#[test]
fn a_rising_loss_raises_an_alert() {
    let run = Run::tiny(&[
        ENDLESS,
        ("training.stages", Value::from(1)),
        ("optimizer.learning_rate", Value::from(5.0)),
        ("optimizer.warmup_steps", Value::from(12)),
    ]);
    let address = own_address();
    let Some(prometheus) = Prometheus::start(&[address], &[]) else { return };
    // The loss rises from the third step on, and the run stops at step 20, when gradients are out of range. Steps take
    // a second, so that this is longer than the alert's `for:`.
    let flags = ["--metrics", &address.to_string(), "--slow-down", "100"];
    let mut swarm = Swarm::start(&run.config(), &flags);
    swarm.peers[0].event("committed");
    prometheus.await_alert("ShoalLossDiverged");
}

/// A stand-in for a peer, which answers every scrape with a text: it shows what no healthy peer does.
struct Exposition {
    text: Arc<Mutex<String>>,
    address: SocketAddr,
}

impl Exposition {
    fn start(text: &str) -> Self {
        let listener = TcpListener::bind(own_address()).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let shown = Arc::new(Mutex::new(text.to_owned()));
        let text = Arc::clone(&shown);
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shown = shown.lock().expect("no thread panics with it").clone();
                // Prometheus may have given up on this scrape.
                let _ = answer(stream.expect("a connection"), &shown);
            }
        });
        Self { text, address }
    }

    fn show(&self, text: &str) {
        text.clone_into(&mut self.text.lock().expect("no thread panics with it"));
    }
}

/// Answers one scrape.
fn answer(mut stream: TcpStream, metrics: &str) -> io::Result<()> {
    let mut request = [0; 4096];
    let _ = stream.read(&mut request)?;
    let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n";
    stream.write_all(format!("{head}{metrics}").as_bytes())
}

#[test]
fn a_loss_that_is_no_number_raises_an_alert() {
    let metrics = "shoal_training_loss{run=\"r\"} NaN\nshoal_gradient_norm{run=\"r\"} 1\n";
    let after = |steps: u32| format!("{metrics}shoal_steps_total{{run=\"r\"}} {steps}\n");
    let peer = Exposition::start(&after(0));
    let Some(prometheus) = Prometheus::start(&[peer.address], &[]) else { return };
    prometheus.await_answer("shoal_steps_total");
    assert_eq!(prometheus.firing(), BTreeSet::new(), "before the first step it never is");
    peer.show(&after(1));
    prometheus.await_alert("ShoalLossDiverged");
}

#[test]
fn all_reduces_that_time_out_raise_an_alert_and_those_that_lost_a_member_do_not() {
    let failed = |late: u32, lost: u32| {
        let of = |reason: &str, count: u32| {
            format!("shoal_rounds_failed_total{{run=\"r\",reason=\"{reason}\"}} {count}\n")
        };
        format!("{}{}", of("late", late), of("member_lost", lost))
    };
    let peer = Exposition::start(&failed(0, 0));
    let Some(prometheus) = Prometheus::start(&[peer.address], &[]) else { return };
    // With fewer samples increase() extrapolates two to three.
    prometheus.await_answer("count_over_time(shoal_rounds_failed_total[30m]) > 8");
    peer.show(&failed(2, 100));
    prometheus.await_answer("increase(shoal_rounds_failed_total{reason=\"member_lost\"}[30m]) > 0");
    assert_eq!(prometheus.firing(), BTreeSet::new(), "two late rounds are no trouble");
    peer.show(&failed(3, 100));
    prometheus.await_alert("ShoalRoundsFailing");
}

#[test]
fn a_log_without_a_majority_raises_an_alert() {
    let run = endless(&[]);
    let address = own_address();
    let metrics = address.to_string();
    let Some(prometheus) = Prometheus::start(&[address], &[]) else { return };
    let mut swarm =
        Swarm::start(&run.config(), &["--wait-for", "3", "--metrics", &metrics, "--stage", "all"]);
    swarm.join(&["--anchor"]);
    swarm.join(&["--anchor"]);
    while swarm.peers[0].event("anchors")["count"] != 3 {}
    prometheus.await_answer("shoal_anchors == 3");
    swarm.peers[1].kill();
    swarm.peers[2].kill();
    prometheus.await_alert("ShoalLogPaused");
}

/// Runs promtool in the folder of the rules, where it is installed, and checks that it reports nothing.
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
fn promtool_accepts_the_rules() {
    promtool(&["check", "config", "prometheus.yml"]);
    promtool(&["check", "rules", "recording.yml", "alerts.yml"]);
}

#[test]
fn every_alert_fires_in_its_test_and_not_before() {
    promtool(&["test", "rules", "alerts_test.yml"]);
    let read = |name: &str| fs::read_to_string(rules().join(name)).expect("a file of rules");
    let (alerts, tests) = (read("alerts.yml"), read("alerts_test.yml"));
    let operations =
        fs::read_to_string(root().join("docs/guide/operations.md")).expect("the document");
    for name in alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        // Expected alerts have lines; what is not to fire is on one line.
        let fires = format!("- alertname: {name}\n");
        assert!(tests.contains(&fires), "no test has {name} fire");
        assert!(operations.contains(&format!("\n### {name}\n")), "no section explains {name}");
    }
}
