//! `shoal status`: prints a running peer's status, as text or JSON.

use std::fmt::{self, Write as _};

use super::training;
use crate::cli::StatusArgs;
use crate::http::client;
use crate::status::Status;
use crate::status::labels::{TITLES, age, rows_of, standing};
use crate::terminal::{out, outln};

/// Newest events that are printed.
const NEWEST: usize = 12;

/// Asks the peer and prints its status.
///
/// # Errors
/// If it does not answer.
pub(super) fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let address = args.node.address()?;
    let status = training::runtime()?.block_on(client::status(address))?;
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        out!("{}", table(&status)?);
    }
    Ok(())
}

fn table(status: &Status) -> Result<String, fmt::Error> {
    let mut text = String::new();
    for (name, line) in standing(status) {
        writeln!(text, "{name:<11} {line}")?;
    }
    if !status.members.is_empty() {
        members(status, &mut text)?;
    }
    if !status.events.is_empty() {
        writeln!(text)?;
    }
    let old = status.events.len().saturating_sub(NEWEST);
    for event in &status.events[old..] {
        writeln!(text, "{:>10}  {}", age(status.at_ms, event.at_ms), event.text)?;
    }
    Ok(text)
}

fn members(status: &Status, text: &mut String) -> fmt::Result {
    let mut rows = vec![TITLES.map(str::to_owned)];
    rows.extend(rows_of(status));
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..TITLES.len()).map(width).collect();
    writeln!(text)?;
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use shoal_formats::open_step::OpenStep;

    use super::*;
    use crate::status::example;

    #[test]
    fn a_long_step_shows_its_microbatches() {
        let mut status = example::status();
        status.node.open_step = Some(OpenStep { step: 40, done: 3, microbatches: 16 });
        let open = "step 41: 3 of 16 microbatches done by this peer";
        assert!(!table(&status).expect("it is text").contains(open), "steps are short");
        status.training.seconds_per_step = Some(75.0);
        assert!(table(&status).expect("it is text").contains(open));
        status.training.step = None;
        let text = table(&status).expect("it is text");
        assert!(text.contains("no step is committed yet, step 41: 3 of 16"), "{text}");
    }

    #[test]
    fn a_table_has_a_row_for_each_replica_and_each_gap() {
        let text = table(&example::status()).expect("it is text");
        let lines: Vec<&str> = text.lines().collect();
        let row = |stage: &str| lines.iter().filter(|line| line.starts_with(stage)).count();
        // One replica of stage 0, two of stage 1, none of stage 2, and an observer.
        assert_eq!((row("0 "), row("1 "), row("2 "), row("- ")), (1, 2, 1, 1), "{text}");
        assert!(text.contains("2      none\n"), "{text}");
        assert!(text.contains("◐ catching up"), "{text}");
        let cost = "cost        1.5000 so far, 0.3500 an hour, 2.50M tokens per unit of currency\n";
        assert!(text.contains(cost), "{text}");
        assert!(text.contains("\nsurvives    any one peer: no, stage 2 has no replica"), "{text}");
        assert!(text.contains("\nwould help  more peers: `shoal join ...`\n"), "{text}");
        assert!(text.contains(", 0.50 s a step, 6s ago, 80 s left\n"), "{text}");
        assert!(text.contains("paused: stage 2 has no replica"), "{text}");
        assert!(text.contains("5s ago  the run goes back to step 40"), "{text}");
    }
}
