//! Compares how the devices of one machine may train together, for `shoal plan`: a line for each strategy, with the
//! reason.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use shoal_protocol::units::Bytes;
use shoal_scheduler::planner::{
    MachineAdvice, MachineOutcome, Parallelism, Work, advise_machine, fastest,
};

use crate::fleet::Fleet;
use crate::plan_work::Training;

/// The strategies for the machines of one region.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RegionMachines {
    region: String,
    machines: usize,
    devices_per_machine: usize,
    /// The fastest that fits; none if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fastest: Option<&'static str>,
    strategies: Vec<Strategy>,
}

/// A strategy for the devices of a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Strategy {
    strategy: &'static str,
    /// What it is, in words.
    means: &'static str,
    fits: bool,
    /// What limits it, or why it does not work.
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Figures>,
}

/// Figures of a strategy that fits. Times are in seconds of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Figures {
    tokens_per_second: f64,
    /// Slices of each layer.
    slices: usize,
    /// Devices in a row that a microbatch passes, and stages of each.
    positions: usize,
    span: usize,
    /// Tokens of a microbatch.
    microbatch: u64,
    /// Bytes of the fullest device.
    memory: f64,
    step: f64,
    computes: f64,
    stalls: f64,
    exchanges: f64,
    loads: f64,
    updates: f64,
}

impl Figures {
    fn new(tokens: u64, advice: &MachineAdvice) -> Self {
        let (step, waits) = (advice.step.as_secs_f64(), advice.waits);
        Self {
            tokens_per_second: tokens as f64 / step,
            slices: advice.slices,
            positions: advice.positions,
            span: advice.span,
            microbatch: advice.microbatch,
            memory: advice.memory,
            step,
            computes: advice.computes.as_secs_f64(),
            stalls: waits.stalls.as_secs_f64(),
            exchanges: waits.exchanges.as_secs_f64(),
            loads: waits.loads.as_secs_f64(),
            updates: waits.updates.as_secs_f64(),
        }
    }
}

fn name(kind: Parallelism) -> &'static str {
    match kind {
        Parallelism::Replicated => "replicated",
        Parallelism::Offloaded => "offloaded",
        Parallelism::Sliced => "sliced",
        Parallelism::PeerEach => "peer each",
        Parallelism::Swapped => "swapped",
    }
}

fn means(kind: Parallelism) -> &'static str {
    match kind {
        Parallelism::Replicated => "one peer, microbatches to whichever device is free",
        Parallelism::Offloaded => "the same, with one state in the machine's memory",
        Parallelism::Sliced => "one peer, each layer in slices of its devices",
        Parallelism::PeerEach => "one peer per device, in pipelines",
        Parallelism::Swapped => "one peer per device, stages swapped over host_link",
    }
}

/// The wait that costs the most.
fn longest_wait(advice: &MachineAdvice) -> String {
    let waits = advice.waits;
    let all: [(Duration, &str); 4] = [
        (waits.stalls, "waiting for activations"),
        (waits.exchanges, "exchanges of partial products"),
        (waits.loads, "loads and copies that no pass hides"),
        (waits.updates, "updates and sums of other devices"),
    ];
    let longest = all.into_iter().max_by_key(|(time, _)| *time);
    let (time, on) = longest.expect("there are four");
    match time.is_zero() {
        true => "devices wait for nothing".to_owned(),
        false => {
            format!("{:.2} of {:.2} s {on}", time.as_secs_f64(), advice.step.as_secs_f64())
        }
    }
}

impl Strategy {
    fn new(tokens: u64, kind: Parallelism, outcome: &MachineOutcome) -> Self {
        let reason = match outcome {
            Ok(advice) => {
                format!("{} of a device, {}", Bytes(advice.memory as u64), longest_wait(advice))
            }
            Err(obstacle) => obstacle.to_string(),
        };
        Self {
            strategy: name(kind),
            means: means(kind),
            fits: outcome.is_ok(),
            reason,
            plan: outcome.as_ref().ok().map(|advice| Figures::new(tokens, advice)),
        }
    }
}

/// The strategies for each region whose machines have several devices. A machine trains the whole model on its part of a step.
pub fn machines(fleet: &Fleet, training: &Training) -> Vec<RegionMachines> {
    let of_region = |region: usize| {
        let machine = fleet.machine(region, training)?;
        let devices_per_machine = machine.devices;
        let work = training.work(fleet);
        let own = work.tokens as f64 * devices_per_machine as f64 / fleet.devices() as f64;
        let samples = (own / work.least as f64).round().max(1.0);
        let work = Work { tokens: samples as u64 * work.least, ..work };
        let all = advise_machine(&work, &machine);
        let strategies = all.iter().map(|(kind, it)| Strategy::new(work.tokens, *kind, it));
        Some(RegionMachines {
            region: fleet.region(region).to_owned(),
            machines: fleet.devices_of(region) / devices_per_machine,
            devices_per_machine,
            fastest: fastest(&all).map(name),
            strategies: strategies.collect(),
        })
    };
    (0..fleet.regions()).filter_map(of_region).collect()
}

/// A line for each strategy of each region, and the fastest.
pub fn text(regions: &[RegionMachines]) -> String {
    let mut text = String::new();
    for region in regions {
        let RegionMachines { machines, devices_per_machine, .. } = region;
        let _ = writeln!(
            text,
            "A machine of {} ({machines} with {devices_per_machine} devices each), with the whole model and its part of a step:",
            region.region
        );
        for Strategy { strategy, means, reason, plan, .. } in &region.strategies {
            let speed = plan.map_or_else(
                || format!("{:>9}         ", "-"),
                |plan| format!("{:9.0} tokens/s", plan.tokens_per_second),
            );
            let shape = match plan {
                Some(plan) if plan.positions > 1 || plan.span > 1 => {
                    format!(" ({} in a row, spans of {})", plan.positions, plan.span)
                }
                Some(plan) if plan.slices > 1 => match devices_per_machine / plan.slices {
                    1 => format!(" ({} slices)", plan.slices),
                    groups => format!(" ({} slices, {groups} groups)", plan.slices),
                },
                _ => String::new(),
            };
            let _ = writeln!(text, "  {strategy:10}  {speed}  {means}{shape}; {reason}");
        }
        let _ = match region.fastest {
            Some(strategy) => writeln!(text, "  {strategy} is the fastest that fits."),
            None => writeln!(text, "  Nothing fits on one machine: cut the model over several."),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../docs/fleets/machines.toml");

    fn of(change: (&str, &str)) -> Vec<RegionMachines> {
        assert!(EXAMPLE.contains(change.0), "{}", change.0);
        let fleet = Fleet::parse(&EXAMPLE.replace(change.0, change.1)).expect("a fleet");
        machines(&fleet, fleet.training().expect("it has one"))
    }

    #[test]
    fn the_example_has_a_line_with_a_reason_for_each_strategy() {
        let regions = of(("", ""));
        let fastest: Vec<_> = regions.iter().map(|region| region.fastest).collect();
        assert_eq!(fastest, [Some("sliced"), Some("peer each")]);
        let text = text(&regions);
        for words in [
            "A machine of nvlink (2 with 8 devices each)",
            "replicated          -",
            "does not fit: a device needs",
            "exchanges of partial products",
            "sliced is the fastest that fits.",
            "peer each is the fastest that fits.",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let json = serde_json::to_value(&regions).expect("JSON");
        assert_eq!(json[0]["strategies"][2]["strategy"], "sliced");
        assert!(json[0]["strategies"][2]["plan"]["tokens_per_second"].as_f64() > Some(0.0));
        assert!(json[0]["strategies"][2]["plan"]["slices"].as_u64() > Some(1), "{json}");
        assert_eq!(json[0]["strategies"][0]["fits"], false);
        assert!(json[0]["strategies"][0].get("plan").is_none());
    }

    #[test]
    fn what_a_file_lacks_is_named() {
        let without = |line: &str| text(&of((line, "")));
        assert!(without("layers = 40").contains("`layers` is missing"));
        assert!(without("host_link = 25e9").contains("`host_link` is missing"));
        let roomy = of(("memory = 80e9", "memory = 800e9"));
        assert_eq!(roomy[0].fastest, Some("replicated"), "{roomy:?}");
        assert!(text(&roomy).contains("nothing has to be swapped"));
    }

    #[test]
    fn a_fleet_without_machines_has_no_lines() {
        let fleet = Fleet::parse(include_str!("../../docs/fleets/budget.toml")).expect("a fleet");
        assert!(machines(&fleet, fleet.training().expect("it has one")).is_empty());
    }
}
