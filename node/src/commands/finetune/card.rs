//! What came of a fine-tuning.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};

use shoal_formats::words::with_prefix;
use shoal_protocol::ids::ContentHash;

use super::plan::{Plan, line};
use crate::events::RunEvent;
use crate::report::Report;

/// The result of a fine-tuning, and what to do with it.
pub(super) struct Card<'a> {
    pub(super) plan: &'a Plan,
    pub(super) report: &'a Report,
    /// Hash of the weights of the last checkpoint.
    pub(super) hash: ContentHash,
}

/// The figures of a run over all processes that started it: from their events, or from its report if a user went on
/// by hand.
///
/// # Errors
/// If the folder of the events cannot be read.
pub(super) fn report(plan: &Plan) -> io::Result<Report> {
    let mut files = fs::read_dir(plan.events())?.collect::<io::Result<Vec<_>>>()?;
    files.sort_by_key(fs::DirEntry::path);
    let mut report = Report::new();
    for file in files {
        for line in BufReader::new(File::open(file.path())?).split(b'\n') {
            // A process that was killed may have left half a line.
            if let Ok(event) = serde_json::from_slice::<RunEvent>(&line?) {
                report.note(&event);
            }
        }
    }
    if report.steps.is_empty() {
        return Report::read(&plan.results().join("report.json")).or(Ok(report));
    }
    Ok(report)
}

impl Card<'_> {
    /// The loss before and after, and on what it was measured.
    fn loss(&self) -> Option<(f64, f64, &'static str)> {
        let steps = &self.report.steps;
        let mut held_out = steps.iter().filter_map(|step| step.held_out_loss);
        if let Some(before) = held_out.next()
            && let Some(after) = held_out.next_back()
        {
            return Some((before, after, "on held-out rows, before the first and the last step"));
        }
        let (first, last) = (steps.first()?, steps.last()?);
        Some((first.loss, last.loss, "in training, at the first and the last step"))
    }
}

impl fmt::Display for Card<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, report, hash } = self;
        let (name, steps) = (plan.name(), report.steps.len());
        let epochs = counted(plan.epochs() as usize, "epoch");
        writeln!(f, "model       {name}, fine-tuned in {steps} steps, {epochs}")?;
        match self.loss() {
            Some((before, after, place)) => {
                let is_of_pairs = report.steps.iter().any(|step| step.preferences.is_some());
                let unit = if is_of_pairs { "for each pair" } else { "nats per token" };
                writeln!(f, "loss        {before:.3} to {after:.3} {unit} {place}")?;
            }
            None => writeln!(f, "loss        unknown: the events of the run are missing")?,
        }
        let speed = with_prefix(report.tokens_per_second);
        let peers = counted(report.peers, "peer");
        writeln!(f, "speed       {speed} tokens/s, at most {peers}")?;
        writeln!(f, "checkpoint  {hash}")?;
        writeln!(f, "            {}", plan.checkpoint().display())?;
        let of = report.microbatches;
        writeln!(
            f,
            "proof       {} microbatches counted once, {} missing, {} computed again after losses",
            of.counted, of.missing, of.replayed
        )?;
        writeln!(f, "            on a machine like these, one process gets the same hash:")?;
        for (about, words) in [
            ("", plan.local()),
            ("verify", plan.verify()),
            ("chat", plan.chat()),
            ("export", plan.export_otherwise()),
            ("push", plan.push()),
        ] {
            writeln!(f, "{about:<12}{}", line(&words))?;
        }
        let is_adapter = plan.model().join("adapter_config.json").exists();
        let what = if is_adapter { "adapters" } else { "model" };
        write!(f, "exported    {}: the {what}, in Hugging Face's format", plan.model().display())
    }
}

/// A number of things.
fn counted(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use shoal_protocol::ids::ContentHash;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::report::StepNumbers;

    fn plan(folder: &std::path::Path) -> Plan {
        let words = ["shoal", "finetune", "hf:a/b", "chats.jsonl", "--lora", "8", "--out"];
        let words = words.map(std::ffi::OsString::from).into_iter().chain([folder.into()]);
        match Cli::try_parse_from(words).expect("a command line").command {
            Command::Finetune(args) => Plan::new(args),
            _ => panic!("another command"),
        }
    }

    fn step(step: u64, loss: f64, held_out_loss: Option<f64>) -> StepNumbers {
        StepNumbers {
            step,
            loss,
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            tokens: 10,
            targets: 10,
            padded: 0,
            preferences: None,
            seconds: 1.0,
            cost: None,
            held_out_loss,
        }
    }

    #[test]
    fn the_loss_is_that_of_held_out_rows_where_there_are_some() {
        let plan = plan("run".as_ref());
        let mut report = Report::new();
        let text =
            |report: &Report| Card { plan: &plan, report, hash: ContentHash([7; 32]) }.to_string();
        assert!(text(&report).contains("loss        unknown"));
        report.steps = vec![step(0, 4.0, Some(5.0)), step(1, 3.0, None)];
        assert!(text(&report).contains("4.000 to 3.000 nats per token in training"));
        assert!(text(&report).contains("hf:a/b, fine-tuned in 2 steps, 3 epochs"));
        report.steps.push(step(2, 2.0, Some(2.5)));
        let card = text(&report);
        assert!(card.contains("5.000 to 2.500 nats per token on held-out rows"), "{card}");
        assert!(card.contains(&ContentHash([7; 32]).to_string()), "{card}");
        assert!(card.contains("shoal chat run/out/checkpoint --base run/base"), "{card}");
    }

    #[test]
    fn events_of_all_processes_are_read_and_half_a_line_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let plan = plan(folder.path());
        fs::create_dir_all(plan.events()).expect("room for a folder");
        let committed = |step: u64| {
            format!(
                r#"{{"event":"committed","step":{step},"loss":{step}.5,"learning_rate":0.1,"gradient_norm":1.0,"tokens":10,"targets":10,"padded":0,"seconds":1.0,"counted":4,"replayed":0,"duplicated":0,"peers":2}}"#
            )
        };
        let first = format!("{}\n{}", committed(0), &committed(1)[..20]);
        fs::write(plan.events_of(0), first).expect("room for a file");
        let second = format!("{}\n{}\n", committed(1), committed(2));
        fs::write(plan.events_of(1), second).expect("room for a file");
        let report = report(&plan).expect("it can be read");
        let losses: Vec<f64> = report.steps.iter().map(|step| step.loss).collect();
        assert_eq!(losses, [0.5, 1.5, 2.5]);
    }
}
