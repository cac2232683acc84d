//! `shoal simulate`: simulates a swarm with the real state machines and a modelled network.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use shoal_formats::config::read_text;
use shoal_formats::words::counted;
use shoal_lab::groups;
use shoal_lab::scenario::Described;
use shoal_protocol::limits;
use shoal_protocol::units::Bytes;
use shoal_scheduler::sim::{self, Mark, Report, Scenario, Timeline};

use super::timeline::Series;
use crate::cli::{Seeds, SimulateArgs};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Simulates a swarm for each seed and prints the result.
///
/// # Errors
/// If the file describes no valid swarm, or an oracle finds a violated invariant.
pub(super) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let described = match &args.scenario {
        None => Described::default(),
        Some(path) => read(path).exit_with(Exit::Usage)?,
    };
    let seeds = match &args.seeds {
        Some(Seeds(seeds)) => seeds.clone(),
        None => args.seed..args.seed + 1,
    };
    for seed in seeds {
        let scenario = described.scenario(seed);
        let mut timeline = Timeline::default();
        let outcome = match (args.trace, &args.out) {
            (true, _) => sim::run_traced(&scenario),
            (false, Some(_)) => sim::run_watched(&scenario, &mut timeline),
            (false, None) => sim::run(&scenario),
        };
        let report = outcome.with_context(|| {
            let file =
                args.scenario.as_ref().map_or_else(String::new, |p| format!("{} ", p.display()));
            format!(
                "seed {seed} fails; reproduce it with `shoal simulate {file}--seed {seed} --trace`"
            )
        })?;
        print_report(seed, &scenario, &report);
        if let Some(path) = &args.out {
            Series::of(&timeline).write(path)?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Described> {
    let text = read_text(path, limits::MANIFEST)
        .with_context(|| format!("cannot read the scenario {}", path.display()))?;
    let described = Described::parse(&text);
    let mut described =
        described.with_context(|| format!("{} is not a valid scenario", path.display()))?;
    groups::read_traces(&mut described, path.parent().unwrap_or(Path::new("")))?;
    Ok(described)
}

fn print_report(seed: u64, scenario: &Scenario, report: &Report) {
    let ends: Vec<Duration> = report.steps.values().map(|step| step.last.0).collect();
    let starts =
        std::iter::once(report.steps.values().next().map_or(Duration::ZERO, |s| s.first.0));
    let mut steps: Vec<Duration> = starts
        .chain(ends.iter().copied())
        .zip(&ends)
        .map(|(before, end)| end.saturating_sub(before))
        .collect();
    steps.sort();
    let all: Duration = steps.iter().sum();
    let busy = report.busy.as_secs_f64() / (all.as_secs_f64() * scenario.peers.len() as f64);
    let median = steps.get(steps.len() / 2).copied().unwrap_or_default();
    let longest = steps.last().copied().unwrap_or_default();
    let marks = &report.marks;
    outln!(
        "seed {seed}: {} steps in {:.1} s of simulated time, engines busy {:.0}%; a step took \
         {:.2} s (median), {:.2} s (longest)",
        steps.len(),
        all.as_secs_f64(),
        busy * 100.0,
        median.as_secs_f64(),
        longest.as_secs_f64()
    );
    outln!(
        "  {} deaths, {} expelled, {} caught up later; {} claims revoked, {} released late, {} activations \
         requested again, {} rounds repaired, {} retried, {} rewinds",
        marks[Mark::Died],
        marks[Mark::Expelled],
        marks[Mark::CaughtUp],
        marks[Mark::ClaimRevoked],
        marks[Mark::ClaimReclaimed],
        marks[Mark::Replayed],
        marks[Mark::RoundMended],
        marks[Mark::RoundAborted],
        marks[Mark::Rewound]
    );
    if report.swapped.loaded > Bytes(0) {
        outln!(
            "  {} of stages loaded onto devices, which waited {:.1} s for them",
            report.swapped.loaded,
            report.swapped.waited.as_secs_f64()
        );
    }
    for (reason, migrations) in &report.migrations {
        outln!(
            "  {} to another stage begun ({}): {} done, {} cancelled",
            counted(migrations.begun, "move"),
            reason.words(),
            migrations.done,
            migrations.given_up
        );
    }
}
