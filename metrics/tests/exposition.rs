//! The text format for Prometheus: names, types and help as documented, and the rules of `promtool
//! check metrics`.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use shoal_metrics::{Direction, Metrics, NodeState, PeerState, Phase, Queue, TrafficKind};

/// A metric as described by the text.
#[derive(Default)]
struct Described {
    kind: String,
    help: String,
}

fn filled() -> Metrics {
    let metrics = Metrics::new().expect("the metrics do not clash");
    metrics.name_run("ab12");
    metrics.run.tokens.inc_by(4096);
    metrics.run.step.set(7);
    metrics.run.training_loss.set(2.5);
    metrics.run.step_duration.observe(0.2);
    metrics.run.peers.set(0, PeerState::Serving, 2);
    metrics.run.peers.set(1, PeerState::Serving, 3);
    metrics.run.peers.set(1, PeerState::Joining, 1);
    metrics.links.sent_bytes.of(TrafficKind::Tensor).inc_by(100);
    metrics.links.rtt.observe(0.1);
    metrics.links.congestion_window.observe(2e6);
    metrics.links.received_bytes.of(TrafficKind::Control).inc_by(3);
    metrics.node.queue_length.of(Queue::Offers).set(2);
    metrics.node.microbatches.of(Direction::Backward).inc();
    metrics.node.compute_busy.inc_by(1.5);
    metrics.node.phase_duration.of(Phase::Apply).observe(0.003);
    metrics.node.state.choose(NodeState::Joining);
    metrics.node.state.choose(NodeState::Serving);
    metrics.node.hosted.set(1, true);
    metrics.node.expert_load.set(1, 1.25);
    metrics.node.router_entropy.set(1, 2.0);
    metrics.checkpoints.scores.set([("gone", 1.0)]);
    metrics.checkpoints.scores.set([("accuracy", 0.5)]);
    metrics.node.info.set("other", "JrKP92", "", "AMD EPYC");
    metrics.node.info.set("gpu-7", "JrKP92", "us-east-1", "NVIDIA H200");
    metrics
}

fn describe(text: &str) -> BTreeMap<String, Described> {
    let mut found = BTreeMap::<String, Described>::new();
    for line in text.lines() {
        let Some((what, rest)) = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
        let described = found.entry(name.to_owned()).or_default();
        match what {
            "HELP" => value.clone_into(&mut described.help),
            "TYPE" => value.clone_into(&mut described.kind),
            _ => panic!("unknown comment: {line}"),
        }
    }
    found
}

/// The name of a sample line.
fn name(line: &str) -> &str {
    line.split(['{', ' ']).next().expect("split returns at least one part")
}

/// Label names of a sample line.
fn label_names(line: &str) -> Vec<&str> {
    let Some((_, rest)) = line.split_once('{') else { return Vec::new() };
    let (labels, _) = rest.rsplit_once('}').expect("braces are balanced");
    labels.split(',').filter_map(|pair| pair.split_once('=')).map(|(name, _)| name).collect()
}

#[test]
fn the_text_has_exactly_the_metrics_of_the_table() {
    let text = filled().encode().unwrap();
    let found = describe(&text);
    let table = Metrics::table();
    let specs: Vec<_> = table.iter().flat_map(|(_, specs)| *specs).collect();
    for spec in &specs {
        let described = found.get(spec.name).unwrap_or_else(|| panic!("{} is missing", spec.name));
        assert_eq!(described.kind, spec.kind.name(), "{}", spec.name);
        assert_eq!(described.help, spec.help(), "{}", spec.name);
    }
    let promised = |name: &str| specs.iter().any(|spec| spec.name == name);
    let unknown: Vec<_> =
        found.keys().filter(|name| !name.starts_with("process_") && !promised(name)).collect();
    assert!(unknown.is_empty(), "not in the table: {unknown:?}");
    for line in text.lines().filter(|line| line.starts_with("shoal_")) {
        let spec = specs.iter().find(|spec| spec.is_sampled_by(name(line))).expect("in the table");
        let mut labels = label_names(line);
        labels.retain(|label| *label != "le");
        assert_eq!(labels, [spec.labels, &["run"]].concat(), "{line}");
    }
}

#[test]
fn a_metric_knows_the_names_of_its_samples() {
    let table = Metrics::table();
    let named = |name: &str| {
        let mut specs = table.iter().flat_map(|(_, specs)| *specs);
        specs.find(|spec| spec.is_sampled_by(name)).map(|spec| spec.name)
    };
    assert_eq!(named("shoal_link_rtt_seconds_bucket"), Some("shoal_link_rtt_seconds"));
    assert_eq!(named("shoal_step"), Some("shoal_step"));
    assert_eq!(named("shoal_link_rtt_seconds"), None, "a histogram has no sample of its name");
    assert_eq!(named("shoal_step_sum"), None);
    assert_eq!(named("shoal_steps"), None);
}

#[test]
fn values_arrive_under_their_labels() {
    let text = filled().encode().unwrap();
    for line in [
        "shoal_tokens_total{run=\"ab12\"} 4096",
        "shoal_step{run=\"ab12\"} 7",
        "shoal_training_loss{run=\"ab12\"} 2.5",
        "shoal_held_out_loss{run=\"ab12\"} NaN",
        "shoal_step_duration_seconds_bucket{run=\"ab12\",le=\"0.125\"} 0",
        "shoal_step_duration_seconds_bucket{run=\"ab12\",le=\"0.25\"} 1",
        "shoal_step_duration_seconds_bucket{run=\"ab12\",le=\"4096\"} 1",
        "shoal_link_rtt_seconds_bucket{run=\"ab12\",le=\"0.064\"} 0",
        "shoal_link_rtt_seconds_bucket{run=\"ab12\",le=\"0.128\"} 1",
        "shoal_link_congestion_window_bytes_bucket{run=\"ab12\",le=\"1048576\"} 0",
        "shoal_link_congestion_window_bytes_bucket{run=\"ab12\",le=\"2097152\"} 1",
        "shoal_sent_bytes_total{kind=\"tensor\",run=\"ab12\"} 100",
        "shoal_sent_bytes_total{kind=\"file\",run=\"ab12\"} 0",
        "shoal_received_bytes_total{kind=\"control\",run=\"ab12\"} 3",
        "shoal_queue_length{queue=\"offers\",run=\"ab12\"} 2",
        "shoal_queue_length{queue=\"accepted\",run=\"ab12\"} 0",
        "shoal_microbatches_computed_total{direction=\"backward\",run=\"ab12\"} 1",
        "shoal_microbatches_computed_total{direction=\"forward\",run=\"ab12\"} 0",
        "shoal_compute_busy_seconds_total{run=\"ab12\"} 1.5",
        "shoal_phase_duration_seconds_bucket{phase=\"apply\",run=\"ab12\",le=\"0.002\"} 0",
        "shoal_phase_duration_seconds_bucket{phase=\"apply\",run=\"ab12\",le=\"0.004\"} 1",
        "shoal_node_state{state=\"joining\",run=\"ab12\"} 0",
        "shoal_node_state{state=\"serving\",run=\"ab12\"} 1",
        "shoal_stage_hosted{pipeline_stage=\"1\",run=\"ab12\"} 1",
        "shoal_peers{pipeline_stage=\"0\",state=\"serving\",run=\"ab12\"} 2",
        "shoal_peers{pipeline_stage=\"1\",state=\"serving\",run=\"ab12\"} 3",
        "shoal_peers{pipeline_stage=\"1\",state=\"joining\",run=\"ab12\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
    }
    let infos: Vec<_> = text.lines().filter(|line| line.starts_with("shoal_peer_info{")).collect();
    let info = r#"shoal_peer_info{hardware="NVIDIA H200",island="us-east-1",name="gpu-7",peer="JrKP92",run="ab12"} 1"#;
    assert_eq!(infos, [info], "a new name replaces the old one");
    let version = env!("CARGO_PKG_VERSION");
    assert!(text.contains(&format!("shoal_build_info{{version=\"{version}\",run=\"ab12\"}} 1")));
}

#[test]
fn the_run_label_is_absent_until_the_run_is_known() {
    let metrics = Metrics::new().unwrap();
    assert!(metrics.encode().unwrap().lines().any(|line| line == "shoal_tokens_total 0"));
}

#[test]
fn two_peers_in_one_process_do_not_share_metrics() {
    let (one, other) = (filled(), Metrics::new().unwrap());
    assert_eq!((one.run.tokens.get(), other.run.tokens.get()), (4096, 0));
    assert!(other.encode().unwrap().contains("shoal_tokens_total 0"));
}

#[test]
fn the_text_follows_promtools_rules() {
    let text = filled().encode().unwrap();
    let found = describe(&text);
    assert!(!found.is_empty());
    for (name, described) in &found {
        check_metric(name, described);
    }
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let histogram = line.contains("_bucket{");
        for label in label_names(line) {
            assert!(snake_case(label), "{line}: label {label} is not in snake case");
            assert!(label != "le" || histogram, "{line}: `le` belongs to histograms");
            assert!(label != "quantile", "{line}: `quantile` belongs to summaries");
        }
    }
}

fn check_metric(name: &str, Described { kind, help }: &Described) {
    const WORDS: [&str; 34] = [
        // Types do not belong in a name.
        "counter",
        "gauge",
        "histogram",
        "summary",
        "untyped",
        // Abbreviated units.
        "s",
        "ms",
        "us",
        "ns",
        "sec",
        "b",
        "kb",
        "mb",
        "gb",
        "tb",
        "pb",
        "m",
        "h",
        "d",
        // Units that are not base units.
        "milliseconds",
        "microseconds",
        "nanoseconds",
        "minutes",
        "hours",
        "days",
        "weeks",
        "bits",
        "kilobytes",
        "megabytes",
        "gigabytes",
        "percent",
        "kilograms",
        "fahrenheit",
        "miles",
    ];
    assert!(!help.is_empty(), "{name} has no help");
    assert!(snake_case(name), "{name} is not in snake case");
    assert_eq!(name.ends_with("_total"), kind == "counter", "{name}: only counters end in _total");
    for suffix in ["_bucket", "_count", "_sum"] {
        assert!(!name.ends_with(suffix), "{name} has a suffix that histograms use");
    }
    for word in name.split('_') {
        assert!(!WORDS.contains(&word), "{name}: `{word}` does not belong in a name");
    }
}

fn snake_case(name: &str) -> bool {
    let legal = |character: char| {
        character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_'
    };
    name.chars().all(legal) && name.starts_with(|first: char| first.is_ascii_lowercase())
}

#[test]
fn promtool_has_no_complaints() {
    let started = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut promtool) = started else {
        println!("skipped: promtool is not installed (apt install prometheus)");
        return;
    };
    let text = filled().encode().unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&printed));
    assert!(printed.is_empty(), "{}", String::from_utf8_lossy(&printed));
}
