//! What Prometheus sees: names, types and help as they were promised, and the rules that
//! `promtool check metrics` applies to them.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use shoal_metrics::{Direction, Metrics, Queue, TrafficKind};

/// Every metric of ours, with its type.
const EXPECTED: [(&str, &str); 37] = [
    ("shoal_build_info", "gauge"),
    ("shoal_checkpoint_failures_total", "counter"),
    ("shoal_claims_recalled_total", "counter"),
    ("shoal_compute_busy_seconds_total", "counter"),
    ("shoal_gradient_norm", "gauge"),
    ("shoal_held_out_loss", "gauge"),
    ("shoal_in_flight_bytes", "gauge"),
    ("shoal_learning_rate", "gauge"),
    ("shoal_link_congestion_window_bytes", "histogram"),
    ("shoal_link_lost_bytes_total", "counter"),
    ("shoal_link_lost_packets_total", "counter"),
    ("shoal_link_packets_total", "counter"),
    ("shoal_link_rtt_seconds", "histogram"),
    ("shoal_members_lost_total", "counter"),
    ("shoal_microbatches_computed_total", "counter"),
    ("shoal_microbatches_duplicated_total", "counter"),
    ("shoal_microbatches_replayed_total", "counter"),
    ("shoal_output_log_bytes", "gauge"),
    ("shoal_output_log_disk_bytes", "gauge"),
    ("shoal_spill_failures_total", "counter"),
    ("shoal_peers", "gauge"),
    ("shoal_pieces_sent_total", "counter"),
    ("shoal_queue_length", "gauge"),
    ("shoal_received_bytes_total", "counter"),
    ("shoal_refused_total", "counter"),
    ("shoal_rewinds_total", "counter"),
    ("shoal_terms_total", "counter"),
    ("shoal_rounds_aborted_total", "counter"),
    ("shoal_sent_bytes_total", "counter"),
    ("shoal_step", "gauge"),
    ("shoal_step_duration_seconds", "histogram"),
    ("shoal_steps_total", "counter"),
    ("shoal_tensors_sent_total", "counter"),
    ("shoal_tokens_total", "counter"),
    ("shoal_unpacked_bytes_total", "counter"),
    ("shoal_training_loss", "gauge"),
    ("process_resident_memory_bytes", "gauge"),
];

/// A metric as the text tells it.
#[derive(Default)]
struct Described {
    kind: String,
    help: String,
}

fn filled() -> Metrics {
    let metrics = Metrics::new().expect("the metrics do not clash");
    metrics.tokens.inc_by(4096);
    metrics.step.set(7);
    metrics.training_loss.set(2.5);
    metrics.step_duration.observe(0.2);
    metrics.sent_bytes.of(TrafficKind::Tensor).inc_by(100);
    metrics.links.rtt.observe(0.1);
    metrics.links.congestion_window.observe(2e6);
    metrics.received_bytes.of(TrafficKind::Control).inc_by(3);
    metrics.queue_length.of(Queue::Offers).set(2);
    metrics.microbatches.of(Direction::Backward).inc();
    metrics.compute_busy.inc_by(1.5);
    metrics.set_peers([2, 3]);
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

/// Label names of a sample line.
fn label_names(line: &str) -> Vec<&str> {
    let Some((_, rest)) = line.split_once('{') else { return Vec::new() };
    let (labels, _) = rest.rsplit_once('}').expect("what opens also closes");
    labels.split(',').filter_map(|pair| pair.split_once('=')).map(|(name, _)| name).collect()
}

#[test]
fn names_and_types_are_the_promised_ones() {
    let found = describe(&filled().encode().unwrap());
    for (name, kind) in EXPECTED {
        assert_eq!(found.get(name).map(|described| described.kind.as_str()), Some(kind), "{name}");
    }
    let promised = |name: &str| EXPECTED.iter().any(|(expected, _)| *expected == name);
    let unknown: Vec<_> =
        found.keys().filter(|name| !name.starts_with("process_") && !promised(name)).collect();
    assert!(unknown.is_empty(), "not in the list: {unknown:?}");
}

#[test]
fn values_arrive_under_their_labels() {
    let text = filled().encode().unwrap();
    for line in [
        "shoal_tokens_total 4096",
        "shoal_step 7",
        "shoal_training_loss 2.5",
        "shoal_held_out_loss NaN",
        "shoal_step_duration_seconds_bucket{le=\"0.125\"} 0",
        "shoal_step_duration_seconds_bucket{le=\"0.25\"} 1",
        "shoal_step_duration_seconds_bucket{le=\"2048\"} 1",
        "shoal_link_rtt_seconds_bucket{le=\"0.064\"} 0",
        "shoal_link_rtt_seconds_bucket{le=\"0.128\"} 1",
        "shoal_link_rtt_seconds_bucket{le=\"2.048\"} 1",
        "shoal_link_congestion_window_bytes_bucket{le=\"1048576\"} 0",
        "shoal_link_congestion_window_bytes_bucket{le=\"2097152\"} 1",
        "shoal_link_congestion_window_bytes_bucket{le=\"268435456\"} 1",
        "shoal_sent_bytes_total{kind=\"tensor\"} 100",
        "shoal_sent_bytes_total{kind=\"blob\"} 0",
        "shoal_received_bytes_total{kind=\"control\"} 3",
        "shoal_queue_length{queue=\"offers\"} 2",
        "shoal_queue_length{queue=\"accepted\"} 0",
        "shoal_microbatches_computed_total{direction=\"backward\"} 1",
        "shoal_microbatches_computed_total{direction=\"forward\"} 0",
        "shoal_compute_busy_seconds_total 1.5",
        "shoal_peers{pipeline_stage=\"0\"} 2",
        "shoal_peers{pipeline_stage=\"1\"} 3",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
    }
    assert!(
        text.contains(&format!("shoal_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn two_peers_in_one_process_do_not_share_metrics() {
    let (one, other) = (filled(), Metrics::new().unwrap());
    assert_eq!((one.tokens.get(), other.tokens.get()), (4096, 0));
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
        // Types do not belong into a name.
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
        assert!(!WORDS.contains(&word), "{name}: `{word}` does not belong into a name");
    }
}

fn snake_case(name: &str) -> bool {
    let legal = |character: char| {
        character.is_ascii_lowercase() || character.is_ascii_digit() || character == '_'
    };
    name.chars().all(legal) && name.starts_with(|first: char| first.is_ascii_lowercase())
}

#[test]
fn promtool_has_nothing_to_say() {
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
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    assert!(said.is_empty(), "{}", String::from_utf8_lossy(&said));
}
