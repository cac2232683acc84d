//! The reference of all metrics.

use std::fmt::Write;

use shoal_metrics::Metrics;

const HEAD: &str = "\
# Metrics

Written by `cargo run -p shoal-metrics --example monitoring` from the table in `metrics/src/groups.rs`.

Every metric has the label `run`, the first digits of the run's id, once the peer knows which run it is in.
Prometheus tells peers apart by `instance`; `shoal_peer_info` has the name of each:
`shoal_link_packets_total * on (instance) group_left (name) shoal_peer_info`. Beside these come the usual
`process_` metrics: memory, processor time, open files.
";

pub(crate) fn text() -> String {
    let mut text = HEAD.to_owned();
    let mut line = |line: String| writeln!(text, "{line}").expect("a string takes everything");
    for (group, specs) in Metrics::table() {
        line(format!("\n## {group}\n\n|metric|kind|labels|meaning|\n|---|---|---|---|"));
        for spec in specs {
            let labels: Vec<_> = spec.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, labels) = (spec.name, spec.kind.name(), labels.join(", "));
            line(format!("|`{name}`|{kind}|{labels}|{}|", spec.help()));
        }
    }
    text
}
