//! `shoal plot`: draws the loss curve of a run, from a running peer, a report or a file of events.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::training;
use crate::cli::PlotArgs;
use crate::exit::{Exit, ExitWith};
use crate::http::client;
use crate::plot::LossCurve;
use crate::progress;
use crate::report::{Report, StepNumbers};
use crate::status::Status;

/// The most bytes of a file, more than the events of a million steps.
const LARGEST: u64 = 1 << 30;

/// Draws the curve.
///
/// # Errors
/// If the peer does not answer, the file has another format, or the picture cannot be written.
pub(super) fn run(args: &PlotArgs) -> anyhow::Result<()> {
    let curve = match &args.from {
        Some(path) => LossCurve::of(&steps(path).exit_with(Exit::Usage)?, "Shoal run"),
        None => {
            let address = args.node.address()?;
            of_status(&training::runtime()?.block_on(client::status(address))?)
        }
    };
    ensure!(!curve.training.is_empty(), "no step is committed yet: nothing to draw");
    curve.write(&args.out)?;
    progress::say(&format!(
        "{}: the loss over {} points",
        args.out.display(),
        curve.training.len()
    ));
    Ok(())
}

fn of_status(status: &Status) -> LossCurve<'static> {
    let points = |curve: &[crate::status::Point]| {
        curve.iter().map(|point| (point.0 as f64, point.1)).collect()
    };
    LossCurve {
        training: points(&status.curves.loss),
        held_out: points(&status.curves.held_out_loss),
        unigram_entropy: None,
        title: "Shoal run",
    }
}

/// The part of a `report.json` that is read.
#[derive(Deserialize)]
struct Saved {
    steps: Vec<StepNumbers>,
}

/// The steps of a report or a file of events.
fn steps(path: &Path) -> anyhow::Result<Vec<StepNumbers>> {
    let named = || path.display().to_string();
    let mut text = String::new();
    let file = File::open(path).with_context(named)?;
    file.take(LARGEST).read_to_string(&mut text).with_context(named)?;
    if let Ok(Saved { steps }) = serde_json::from_str(&text) {
        return Ok(steps);
    }
    let mut report = Report::new();
    for (number, line) in (1..).zip(text.lines()) {
        let event = serde_json::from_str(line).with_context(|| {
            format!("{}:{number}: this is neither a report.json nor a file of --events", named())
        })?;
        report.note(&event);
    }
    Ok(report.steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::RunEvent;
    use crate::status::example;

    fn committed(step: u64, loss: f64) -> String {
        let text = format!(
            "{{\"event\":\"committed\",\"step\":{step},\"loss\":{loss},\"gradient_norm\":1.0,\"tokens\":8,\
             \"seconds\":1.0,\"counted\":4,\"replayed\":0,\"duplicated\":0,\"peers\":2}}\n"
        );
        let event: RunEvent = serde_json::from_str(&text).expect("it is one");
        assert!(matches!(event, RunEvent::Committed(_)));
        text
    }

    #[test]
    fn a_report_and_the_events_of_a_run_have_the_same_steps() {
        let folder = tempfile::tempdir().expect("a folder");
        let (events, report) = (folder.path().join("events"), folder.path().join("report.json"));
        let rewound = "{\"event\":\"rewound\",\"version\":1,\"steps\":1}\n";
        let text = [committed(0, 5.0), committed(1, 4.0), rewound.to_owned(), committed(1, 3.0)];
        std::fs::write(&events, text.concat()).expect("room");
        let found = steps(&events).expect("steps");
        assert_eq!(found.iter().map(|step| step.loss).collect::<Vec<_>>(), [5.0, 3.0]);
        let saved = serde_json::json!({ "steps": found, "peers": 2 });
        std::fs::write(&report, saved.to_string()).expect("room");
        assert_eq!(steps(&report).expect("steps"), found);
        std::fs::write(&events, "no events").expect("room");
        let error = steps(&events).expect_err("it has none").to_string();
        assert!(error.contains("events:1: this is neither"), "{error}");
    }

    #[test]
    fn a_peers_curves_are_drawn() {
        let status = example::status();
        let curve = of_status(&status);
        assert_eq!(curve.training.len(), status.curves.loss.len());
        assert_eq!(curve.held_out.len(), 3);
    }
}
