//! A real Prometheus with this project's rules, where one is installed.
//!
//! Its clock runs [`SPEEDUP`] times as fast as an operator's: the scrape interval, the evaluation interval and
//! every `for:` of the alerts are divided by it. The windows of the queries stay as they are.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::http::{page, try_get};
use crate::process::Process;
use crate::program::{prepared, root};
use crate::swarm::own_address;
use crate::{PATIENCE, skip};

/// How many times as fast as in production the clock of the rules runs.
const SPEEDUP: u32 = 25;

/// The time between two queries while a test waits: Prometheus does not notify its readers.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A Prometheus process that scrapes the peers of a test.
#[derive(Debug)]
pub struct Prometheus {
    address: SocketAddr,
    _process: Process,
    _folder: TempDir,
}

/// The folder of the rules.
#[must_use]
pub fn rules() -> PathBuf {
    root().join("docker/prometheus")
}

/// Whether a program is installed. Prints a line where it is not.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        skip(&format!("{program} is not installed (apt install prometheus)"));
    }
    found
}

impl Prometheus {
    /// Starts a Prometheus with the project's configuration and rules on the faster clock. Each of `changes`
    /// replaces a text of the alerts, such as a threshold. `None` where Prometheus is not installed.
    ///
    /// # Panics
    /// When Prometheus does not start.
    #[must_use]
    pub fn start(peers: &[SocketAddr], changes: &[(&str, &str)]) -> Option<Self> {
        if !is_installed("prometheus") {
            return None;
        }
        let folder = tempfile::tempdir().expect("room for a folder");
        let write = |name: &str, text: String| {
            fs::write(folder.path().join(name), text).expect("room for a file");
        };
        let read = |name: &str| fs::read_to_string(rules().join(name)).expect("a file of rules");
        write("recording.yml", read("recording.yml"));
        write("alerts.yml", sped_up(&replaced(read("alerts.yml"), changes)));
        write("prometheus.yml", configuration(&read("prometheus.yml"), peers));
        let address = own_address();
        let mut command = Command::new("prometheus");
        command
            .current_dir(folder.path())
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"])
            .arg(format!("--web.listen-address={address}"));
        let process = Process::start("prometheus", prepared(command));
        let started = Self { address, _process: process, _folder: folder };
        started.wait("its start", || {
            try_get(address, "/-/ready").is_some_and(|(code, _)| code == 200)
        });
        Some(started)
    }

    /// The samples that answer a query now.
    ///
    /// # Panics
    /// When Prometheus rejects the query.
    #[must_use]
    pub fn query(&self, expression: &str) -> Vec<Value> {
        let mut encoded = String::new();
        for byte in expression.bytes() {
            write!(encoded, "%{byte:02X}").expect("a string takes everything");
        }
        let answer = page(self.address, &format!("/api/v1/query?query={encoded}"));
        let answer: Value = serde_json::from_str(&answer).expect("it answers in JSON");
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().expect("a list").clone()
    }

    /// The names of the alerts that fire now.
    #[must_use]
    pub fn firing(&self) -> BTreeSet<String> {
        let firing = self.query(r#"ALERTS{alertstate="firing"}"#);
        let name = |sample: Value| sample["metric"]["alertname"].as_str().map(str::to_owned);
        firing.into_iter().filter_map(name).collect()
    }

    /// Waits until an alert fires.
    ///
    /// # Panics
    /// When it does not fire.
    pub fn await_alert(&self, name: &str) {
        self.wait(name, || self.firing().contains(name));
    }

    /// Waits until a query has an answer.
    ///
    /// # Panics
    /// When it gets none.
    pub fn await_answer(&self, query: &str) {
        self.wait(query, || !self.query(query).is_empty());
    }

    /// Waits until a condition holds. `what` names it in the message of a failure.
    ///
    /// # Panics
    /// When the condition does not come to hold.
    pub fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "Prometheus does not see {what}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// The project's `prometheus.yml` on the faster clock, with the peers of a test instead of its targets.
fn configuration(text: &str, peers: &[SocketAddr]) -> String {
    let (global, _) = text.split_once("scrape_configs:").expect("the configuration scrapes");
    let targets: Vec<_> = peers.iter().map(ToString::to_string).collect();
    let job = format!("[{{ job_name: shoal, static_configs: [{{ targets: {targets:?} }}] }}]");
    format!("{}scrape_configs: {job}\n", sped_up(global))
}

/// A text with replacements made in it.
fn replaced(text: String, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "no alert contains {from}");
        text.replace(from, to)
    })
}

/// YAML with its intervals and its alerts' `for:` divided by the speed-up.
fn sped_up(yaml: &str) -> String {
    let faster = |line: &str| {
        let keys = ["for: ", "scrape_interval: ", "evaluation_interval: "];
        let key = keys.into_iter().find(|key| line.trim_start().starts_with(key));
        let parts =
            key.and_then(|key| line.split_once(key).map(|(indent, time)| (indent, key, time)));
        parts.map_or(line.to_owned(), |(indent, key, time)| {
            format!("{indent}{key}{}ms", (milliseconds(time) / SPEEDUP).max(1))
        })
    };
    yaml.lines().flat_map(|line| [faster(line), "\n".to_owned()]).collect()
}

/// A duration as Prometheus writes it: a number and a unit.
fn milliseconds(text: &str) -> u32 {
    let unit = text.trim_start_matches(|letter: char| letter.is_ascii_digit());
    let number: u32 = text[..text.len() - unit.len()].parse().expect("a duration has a number");
    let one = match unit {
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => panic!("an unknown unit in {text:?}"),
    };
    number * one
}

/// The sum of a metric over its labels, in the text of a scrape.
///
/// # Panics
/// When the text has no such metric.
#[must_use]
pub fn value(text: &str, name: &str) -> f64 {
    let samples = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        // Further labels may follow those of the name.
        let labelled = rest.starts_with([' ', '{', ',']);
        labelled.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
    });
    let samples: Vec<f64> = samples.collect();
    assert!(!samples.is_empty(), "no {name} in:\n{text}");
    samples.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_rules_are_divided_and_other_lines_stay() {
        let rules = "      - alert: A\n        expr: increase(x[10m]) > 0\n        for: 5m\n";
        let faster = "      - alert: A\n        expr: increase(x[10m]) > 0\n        for: 12000ms\n";
        assert_eq!(sped_up(rules), faster);
        assert_eq!(
            sped_up("global:\n  scrape_interval: 5s"),
            "global:\n  scrape_interval: 200ms\n"
        );
    }
}
