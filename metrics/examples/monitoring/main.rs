//! Generates files from the table of metrics: the reference in `docs/` and Grafana's dashboards in
//! `docker/grafana/`.
//!
//!     cargo run -p shoal-metrics --example monitoring
//!
//! Its tests detect outdated files and check the rules of `docker/prometheus/`.

mod alerts;
mod dashboard;
mod node;
mod queries;
mod reference;
mod run;

use std::io;
use std::path::{Path, PathBuf};

/// The text that explains the alerts.
const OPERATIONS: &str = "docs/guide/operations.md";

/// Each generated file and its content.
///
/// # Errors
/// If the text that explains the alerts cannot be read.
fn files() -> io::Result<Vec<(PathBuf, String)>> {
    let dashboards = root().join("docker/grafana/dashboards");
    let operations = std::fs::read_to_string(root().join(OPERATIONS))?;
    Ok(vec![
        (root().join("docs/reference/metrics.md"), reference::text()),
        (dashboards.join("run.json"), run::dashboard().to_json()),
        (dashboards.join("node.json"), node::dashboard().to_json()),
        (dashboards.join("alerts.json"), alerts::to_json(&operations)),
    ])
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of a workspace")
}

fn main() -> io::Result<()> {
    for (path, text) in files()? {
        std::fs::write(&path, text)?;
        println!("{}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fs;

    use shoal_metrics::Metrics;

    use super::*;

    fn read(path: &str) -> String {
        fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// The names of the recording rules.
    fn recorded() -> BTreeSet<String> {
        let rules = read("docker/prometheus/recording.yml");
        let name = |line: &str| Some(line.trim().strip_prefix("- record: ")?.to_owned());
        rules.lines().filter_map(name).collect()
    }

    /// All texts with queries, and their names.
    fn queried_texts() -> Vec<(&'static str, String)> {
        let paths = ["docker/prometheus/recording.yml", "docker/prometheus/alerts.yml"];
        let mut texts: Vec<_> = paths.iter().map(|path| (*path, read(path))).collect();
        texts.push(("the dashboard of a run", run::dashboard().expressions().join("\n")));
        texts.push(("the dashboard of a node", node::dashboard().expressions().join("\n")));
        texts
    }

    #[test]
    fn generated_files_are_up_to_date() {
        for (path, text) in files().expect("the texts") {
            let found = fs::read_to_string(&path).unwrap_or_default();
            let path = path.display();
            assert!(
                found == text,
                "{path} is out of date: cargo run -p shoal-metrics --example monitoring"
            );
        }
    }

    #[test]
    fn all_queried_metrics_exist() {
        let (table, recorded) = (Metrics::table(), recorded());
        for (source, text) in queried_texts() {
            let names = queries::names(&text);
            assert!(!names.is_empty(), "{source} has no queries");
            for name in names {
                let mut specs = table.iter().flat_map(|(_, specs)| *specs);
                let known = recorded.contains(&name) || specs.any(|spec| spec.is_sampled_by(&name));
                assert!(known, "{source} queries {name}, which is not a metric");
            }
        }
    }

    #[test]
    fn every_metric_is_used() {
        let queried: BTreeSet<String> =
            queried_texts().iter().flat_map(|(_, text)| queries::names(text)).collect();
        for spec in Metrics::table().iter().flat_map(|(_, specs)| *specs) {
            let is_used = queried.iter().any(|name| spec.is_sampled_by(name));
            assert!(is_used, "no dashboard and no rule uses {}", spec.name);
        }
    }

    /// Each alert has a section on its meaning and remedies, and a link to the section's panel.
    #[test]
    fn every_alert_has_a_page() {
        let rules = read("docker/prometheus/alerts.yml");
        let pages = read(OPERATIONS);
        let mut links = BTreeMap::new();
        let mut alert = None;
        for line in rules.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix("- alert: ") {
                alert = Some(name);
            } else if let Some(link) = line.strip_prefix("runbook_url: ") {
                links.insert(alert.expect("the name comes first"), link);
            }
        }
        assert_eq!(links.len(), rules.matches("- alert: ").count(), "each alert has a link");
        assert!(links.len() >= 6, "{links:?}");
        for (name, link) in links {
            let panel = alerts::panel_of(&pages, name);
            let panel = panel.unwrap_or_else(|| panic!("no section on {name}"));
            let grafana = "{{ $externalLabels.grafana }}";
            assert_eq!(link, format!("\"{grafana}/d/{}?viewPanel={panel}\"", alerts::UID));
        }
    }

    #[test]
    fn panels_do_not_overlap_and_have_unique_titles() {
        for dashboard in [run::dashboard(), node::dashboard()] {
            dashboard.check();
        }
    }
}
