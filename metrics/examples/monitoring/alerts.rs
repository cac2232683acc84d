//! The dashboard with the remedies of alerts, to which their links lead.

use serde_json::{Value, json};

use crate::dashboard::page;

/// The dashboard's identifier in links.
pub(crate) const UID: &str = "shoal-alerts";

/// The folder of the text, from which its links lead.
const FOLDER: &str = "docs/guide/";

/// Columns and rows of a panel.
const SIZE: (u64, u64) = (12, 9);

/// The alerts that a text explains, in their order, each with its section.
pub(crate) fn sections(operations: &str) -> Vec<(&str, &str)> {
    let (_, alerts) = operations.split_once("\n## Alerts\n").expect("it has a part on alerts");
    let alerts = alerts.split("\n## ").next().unwrap_or_default();
    alerts.split("\n### ").skip(1).filter_map(|section| section.split_once('\n')).collect()
}

/// The number of an alert's panel.
#[cfg(test)]
pub(crate) fn panel_of(operations: &str, alert: &str) -> Option<usize> {
    sections(operations).iter().position(|(name, _)| *name == alert).map(|index| index + 1)
}

/// The dashboard of a text.
pub(crate) fn to_json(operations: &str) -> String {
    let sections = sections(operations);
    let panels = sections.iter().enumerate().map(|(index, (name, text))| {
        let (width, height) = SIZE;
        let (x, y) = (index as u64 % 2 * width, index as u64 / 2 * height);
        json!({
            "id": index + 1,
            "type": "text",
            "title": name,
            "gridPos": { "x": x, "y": y, "w": width, "h": height },
            "options": { "mode": "markdown", "content": without_links(text.trim()) },
        })
    });
    let panels: Vec<Value> = panels.collect();
    page((UID, "Shoal: alerts"), &[], &panels)
}

/// Writes `[words](../place)` as `words (docs/place)`: Grafana does not have the file.
fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let mut written = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let Some((link, rest)) = part.split_once(')') else { continue };
        if let Some(bracket) = written.rfind('[') {
            written.remove(bracket);
        }
        let place = format!("{FOLDER}{link}").replace("docs/guide/../", "docs/");
        written += &format!(" ({place}){rest}");
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_become_the_names_of_files() {
        let text = "See [the page](../reference/a.md#b) and\n[another](c.md).";
        let written = "See the page (docs/reference/a.md#b) and\nanother (docs/guide/c.md).";
        assert_eq!(without_links(text), written);
    }

    #[test]
    fn sections_are_those_of_alerts() {
        let text = "# A\n\n### No\n\n## Alerts\n\nintro\n\n### One\n\na\n\n### Two\n\nb\n\n## Next\n\n### No\n";
        assert_eq!(sections(text), [("One", "\na\n"), ("Two", "\nb\n")]);
        assert_eq!((panel_of(text, "Two"), panel_of(text, "No")), (Some(2), None));
    }
}
