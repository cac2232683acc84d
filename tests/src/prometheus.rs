//! A real Prometheus with this project's rules, where one is installed.

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

/// From one look to the next: it tells nobody when something is there.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A Prometheus that asks some peers every second.
#[derive(Debug)]
pub struct Prometheus {
    address: SocketAddr,
    _process: Process,
    _folder: TempDir,
}

/// Where the rules are.
#[must_use]
pub fn rules() -> PathBuf {
    root().join("docker/prometheus")
}

/// Whether a program is installed. Says so where it is not.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        skip(&format!("{program} is not installed (apt install prometheus)"));
    }
    found
}

impl Prometheus {
    /// Starts one, with the project's rules, but alerts that wait for nothing: `changes` in their text make
    /// some of their thresholds small besides. None where it is not installed.
    ///
    /// # Panics
    /// When it does not start.
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
        write("alerts.yml", hasty(&read("alerts.yml"), changes));
        let targets: Vec<_> = peers.iter().map(ToString::to_string).collect();
        let mut config = "global: { scrape_interval: 1s, evaluation_interval: 1s }\n".to_owned();
        config += "rule_files: [recording.yml, alerts.yml]\n";
        let job = format!("[{{ job_name: shoal, static_configs: [{{ targets: {targets:?} }}] }}]");
        writeln!(config, "scrape_configs: {job}").expect("a string takes everything");
        write("prometheus.yml", config);
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

    /// What it answers to a query: the samples that there are now.
    ///
    /// # Panics
    /// When it makes nothing of the query.
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

    /// The alerts that fire.
    #[must_use]
    pub fn firing(&self) -> BTreeSet<String> {
        let firing = self.query(r#"ALERTS{alertstate="firing"}"#);
        let name = |sample: Value| sample["metric"]["alertname"].as_str().map(str::to_owned);
        firing.into_iter().filter_map(name).collect()
    }

    /// Waits until an alert fires.
    ///
    /// # Panics
    /// When it does not.
    pub fn await_alert(&self, name: &str) {
        self.wait(name, || self.firing().contains(name));
    }

    /// Waits until something is there.
    ///
    /// # Panics
    /// When it does not come.
    pub fn wait(&self, what: &str, is_there: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_there() {
            assert!(Instant::now() < deadline, "Prometheus does not see {what}");
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Alerts that fire as soon as what they are about is there.
fn hasty(alerts: &str, changes: &[(&str, &str)]) -> String {
    let waits = |line: &&str| line.trim_start().starts_with("for: ");
    let mut text: String =
        alerts.lines().filter(|line| !waits(line)).flat_map(|line| [line, "\n"]).collect();
    for (from, to) in changes {
        assert!(text.contains(from), "no alert says {from}");
        text = text.replace(from, to);
    }
    text
}
