//! Dashboards in Grafana's format.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use shoal_metrics::Metrics;

use crate::queries;

/// The columns of Grafana's grid.
const COLUMNS: u64 = 24;

/// The unit of a number, for Grafana.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    None,
    Seconds,
    Bytes,
    BytesPerSecond,
    PerSecond,
    /// From 0 to 1.
    Ratio,
    Flops,
    Watts,
    Celsius,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::None => "short",
            Self::Seconds => "s",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "Bps",
            Self::PerSecond => "cps",
            Self::Ratio => "percentunit",
            Self::Flops => "flops",
            Self::Watts => "watt",
            Self::Celsius => "celsius",
        }
    }
}

/// The presentation of a panel's queries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// The present value.
    Number,
    /// Curves over time.
    Curves,
    /// A row for each peer. The legends of the queries are the titles of their columns.
    Table,
}

impl Shape {
    /// Its name, width and height.
    fn layout(self) -> (&'static str, u64, u64) {
        match self {
            Self::Number => ("stat", 4, 4),
            Self::Curves => ("timeseries", 8, 8),
            Self::Table => ("table", 24, 8),
        }
    }
}

/// A panel: queries, each with its legend.
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    pub(crate) shape: Shape,
    pub(crate) unit: Unit,
    pub(crate) queries: &'static [(&'static str, &'static str)],
}

/// A panel with the present value.
pub(crate) const fn number(
    title: &'static str,
    unit: Unit,
    queries: &'static [(&'static str, &'static str)],
) -> Panel {
    Panel { title, shape: Shape::Number, unit, queries }
}

/// A panel with curves over time.
pub(crate) const fn curves(
    title: &'static str,
    unit: Unit,
    queries: &'static [(&'static str, &'static str)],
) -> Panel {
    Panel { title, shape: Shape::Curves, unit, queries }
}

/// A panel with a row for each peer.
pub(crate) const fn table(
    title: &'static str,
    queries: &'static [(&'static str, &'static str)],
) -> Panel {
    Panel { title, shape: Shape::Table, unit: Unit::None, queries }
}

impl Panel {
    /// The help texts of the metrics in its queries.
    fn description(&self) -> String {
        let table = Metrics::table();
        let queried: BTreeSet<String> =
            self.queries.iter().flat_map(|(_, query)| queries::names(query)).collect();
        let specs = table.iter().flat_map(|(_, specs)| *specs);
        let named = specs.filter(|spec| queried.iter().any(|name| spec.is_sampled_by(name)));
        let lines: Vec<_> = named.map(|spec| format!("`{}`: {}", spec.name, spec.help())).collect();
        lines.join("\n\n")
    }

    fn to_json(&self, id: usize, (x, y): (u64, u64)) -> Value {
        let (shape, width, height) = self.shape.layout();
        let targets: Vec<_> = ('A'..)
            .zip(self.queries)
            .map(|(name, (legend, query))| {
                json!({
                    "refId": name.to_string(),
                    "datasource": source(),
                    "expr": query,
                    "legendFormat": legend,
                    "instant": self.shape != Shape::Curves,
                    "range": self.shape == Shape::Curves,
                    "format": if self.shape == Shape::Table { "table" } else { "time_series" },
                })
            })
            .collect();
        let mut panel = json!({
            "id": id,
            "type": shape,
            "title": self.title,
            "description": self.description(),
            "datasource": source(),
            "gridPos": { "x": x, "y": y, "w": width, "h": height },
            "fieldConfig": {
                "defaults": self.values(),
                "overrides": [],
            },
            "options": options(self.shape),
            "targets": targets,
        });
        if self.shape == Shape::Table {
            panel["transformations"] = self.columns();
        }
        panel
    }

    /// Makes one table of the queries, each with a column for its values. A query without a legend has texts as labels,
    /// and no column.
    fn columns(&self) -> Value {
        let value = |name: char| format!("Value #{name}");
        let named = || ('A'..).zip(self.queries).map(|(name, (legend, _))| (value(name), *legend));
        let (shown, hidden): (Vec<_>, Vec<_>) = named().partition(|(_, legend)| !legend.is_empty());
        let titles: Map<String, Value> =
            shown.into_iter().map(|(column, legend)| (column, legend.into())).collect();
        let times = (1..=self.queries.len()).map(|number| format!("Time {number}"));
        let without = hidden.into_iter().map(|(column, _)| column).chain(times);
        let without: Map<String, Value> =
            without.chain(["Time".to_owned()]).map(|column| (column, true.into())).collect();
        json!([
            { "id": "joinByField", "options": { "byField": "instance", "mode": "outer" } },
            { "id": "organize", "options": {
                "excludeByName": without, "indexByName": {}, "renameByName": titles,
            } },
        ])
    }

    /// The format of values. Axes of amounts begin at zero.
    fn values(&self) -> Value {
        match self.unit {
            Unit::None => json!({ "unit": self.unit.name() }),
            _ => json!({ "unit": self.unit.name(), "min": 0 }),
        }
    }
}

fn options(shape: Shape) -> Value {
    match shape {
        Shape::Number => json!({
            "reduceOptions": { "calcs": ["lastNotNull"], "fields": "", "values": false },
            "textMode": "auto",
        }),
        Shape::Curves => json!({
            "legend": { "displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": [] },
            "tooltip": { "mode": "multi", "sort": "desc" },
        }),
        Shape::Table => json!({ "showHeader": true, "cellHeight": "sm" }),
    }
}

/// The Prometheus instance selected at the top of the page.
fn source() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

/// A dashboard of an identifier and a title, with its selectors and panels.
pub(crate) fn page((uid, title): (&str, &str), selectors: &[Value], panels: &[Value]) -> String {
    let dashboard = json!({
        "uid": uid,
        "title": title,
        "tags": ["shoal"],
        "schemaVersion": 39,
        "version": 1,
        "editable": true,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": { "from": "now-1h", "to": "now" },
        "timezone": "browser",
        "annotations": { "list": [] },
        "links": [{
            "type": "dashboards", "tags": ["shoal"], "title": "Shoal", "asDropdown": false,
            "includeVars": true, "keepTime": true, "targetBlank": false, "icon": "dashboard",
            "tooltip": "", "url": "",
        }],
        "templating": { "list": selectors },
        "panels": panels,
    });
    let text = serde_json::to_string_pretty(&dashboard).expect("plain data");
    format!("{text}\n")
}

/// A selector at the top of the page: its name, and the query for its values.
pub(crate) type Choice = (&'static str, &'static str);

/// A dashboard.
pub(crate) struct Dashboard {
    pub(crate) uid: &'static str,
    pub(crate) title: &'static str,
    pub(crate) choices: &'static [Choice],
    /// Numbers first.
    pub(crate) panels: &'static [Panel],
}

impl Dashboard {
    pub(crate) fn to_json(&self) -> String {
        let datasource = json!({
            "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus",
        });
        let choices = self.choices.iter().map(|(name, query)| {
            json!({
                "name": name,
                "label": name,
                "type": "query",
                "datasource": source(),
                "query": { "query": query, "refId": name },
                "refresh": 2,
                "sort": 1,
                "includeAll": false,
                "multi": false,
            })
        });
        let list: Vec<_> = std::iter::once(datasource).chain(choices).collect();
        let panels: Vec<_> = self
            .panels
            .iter()
            .zip(self.places())
            .enumerate()
            .map(|(index, (panel, place))| panel.to_json(index + 1, place))
            .collect();
        page((self.uid, self.title), &list, &panels)
    }

    /// Positions of the panels: from left to right, continued in the next row.
    fn places(&self) -> Vec<(u64, u64)> {
        let (mut x, mut y, mut row) = (0, 0, 0);
        let place = |panel: &Panel| {
            let (_, width, height) = panel.shape.layout();
            if x + width > COLUMNS || height != row {
                (x, y) = (0, y + row);
            }
            let place = (x, y);
            (x, row) = (x + width, height);
            place
        };
        self.panels.iter().map(place).collect()
    }

    /// All queries.
    #[cfg(test)]
    pub(crate) fn expressions(&self) -> Vec<String> {
        let queries = self.panels.iter().flat_map(|panel| panel.queries);
        let choices = self.choices.iter().map(|(_, query)| (*query).to_owned());
        queries.map(|(_, query)| (*query).to_owned()).chain(choices).collect()
    }

    #[cfg(test)]
    pub(crate) fn check(&self) {
        let titles: BTreeSet<_> = self.panels.iter().map(|panel| panel.title).collect();
        assert_eq!(titles.len(), self.panels.len(), "{}: titles are unique", self.title);
        let mut taken = BTreeSet::new();
        for (panel, (x, y)) in self.panels.iter().zip(self.places()) {
            let (_, width, height) = panel.shape.layout();
            assert!(x + width <= COLUMNS, "{} exceeds the width", panel.title);
            assert!(!panel.queries.is_empty(), "{} has no queries", panel.title);
            for cell in (x..x + width).flat_map(|x| (y..y + height).map(move |y| (x, y))) {
                assert!(taken.insert(cell), "{} overlaps another panel", panel.title);
            }
        }
    }
}
