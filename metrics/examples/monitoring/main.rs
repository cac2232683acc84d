//! Writes what follows from the table of metrics: the reference in `docs/`, Grafana's dashboards in
//! `docker/grafana/`.
//!
//!     cargo run -p shoal-metrics --example monitoring
//!
//! Its tests say when those files are out of date, and look through the rules of `docker/prometheus/`.

mod dashboard;
mod node;
mod queries;
mod reference;
mod run;

use std::io;
use std::path::{Path, PathBuf};

/// Each file and what is to be in it.
fn files() -> Vec<(PathBuf, String)> {
    let dashboards = root().join("docker/grafana/dashboards");
    vec![
        (root().join("docs/metrics.md"), reference::text()),
        (dashboards.join("run.json"), run::dashboard().to_json()),
        (dashboards.join("node.json"), node::dashboard().to_json()),
    ]
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of a workspace")
}

fn main() -> io::Result<()> {
    for (path, text) in files() {
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

    /// What the rules compute beforehand.
    fn recorded() -> BTreeSet<String> {
        let rules = read("docker/prometheus/recording.yml");
        let name = |line: &str| Some(line.trim().strip_prefix("- record: ")?.to_owned());
        rules.lines().filter_map(name).collect()
    }

    /// Every text that asks for metrics.
    fn asking() -> Vec<(&'static str, String)> {
        let paths = ["docker/prometheus/recording.yml", "docker/prometheus/alerts.yml"];
        let mut texts: Vec<_> = paths.iter().map(|path| (*path, read(path))).collect();
        texts.push(("the dashboard of a run", run::dashboard().expressions().join("\n")));
        texts.push(("the dashboard of a node", node::dashboard().expressions().join("\n")));
        texts
    }

    #[test]
    fn what_follows_from_the_table_is_up_to_date() {
        for (path, text) in files() {
            let found = fs::read_to_string(&path).unwrap_or_default();
            let path = path.display();
            assert!(
                found == text,
                "{path} is out of date: cargo run -p shoal-metrics --example monitoring"
            );
        }
    }

    #[test]
    fn nobody_asks_for_what_there_is_not() {
        let (table, recorded) = (Metrics::table(), recorded());
        for (whose, text) in asking() {
            let names = queries::names(&text);
            assert!(!names.is_empty(), "{whose} asks for nothing");
            for name in names {
                let mut specs = table.iter().flat_map(|(_, specs)| *specs);
                let known = recorded.contains(&name) || specs.any(|spec| spec.is_sampled_by(&name));
                assert!(known, "{whose} asks for {name}, which is no metric");
            }
        }
    }

    #[test]
    fn every_metric_is_looked_at() {
        let asked: BTreeSet<String> =
            asking().iter().flat_map(|(_, text)| queries::names(text)).collect();
        for spec in Metrics::table().iter().flat_map(|(_, specs)| *specs) {
            let looked_at = asked.iter().any(|name| spec.is_sampled_by(name));
            assert!(looked_at, "no dashboard and no rule has {}", spec.name);
        }
    }

    /// A section of its own says what each alert means and what to do.
    #[test]
    fn every_alert_has_a_page() {
        let alerts = read("docker/prometheus/alerts.yml");
        let pages = read("docs/operations.md");
        let mut links = BTreeMap::new();
        let mut alert = None;
        for line in alerts.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix("- alert: ") {
                alert = Some(name);
            } else if let Some(link) = line.strip_prefix("runbook: ") {
                links.insert(alert.expect("the name comes first"), link);
            }
        }
        assert_eq!(links.len(), alerts.matches("- alert: ").count(), "each has a link");
        assert!(links.len() >= 6, "{links:?}");
        for (name, link) in links {
            assert_eq!(link, format!("docs/operations.md#{}", name.to_lowercase()));
            assert!(pages.lines().any(|line| line == format!("### {name}")), "no page on {name}");
        }
    }

    #[test]
    fn panels_lie_beside_each_other_and_have_titles_of_their_own() {
        for dashboard in [run::dashboard(), node::dashboard()] {
            dashboard.check();
        }
    }
}
