//! The best choice of devices for `shoal plan`, in words.

use std::fmt::Write as _;

use shoal_formats::words::{counted, with_prefix};
use shoal_protocol::units::Bytes;

use crate::budget::Choice;
use crate::deaths::Losses;
use crate::workers_plan::WorkersChoice;

/// The tokens that a choice computes for a unit of currency, after its price.
fn value(choice: &Choice) -> String {
    let tokens = choice.tokens_per_currency_unit;
    tokens.map_or_else(String::new, |tokens| format!(", {} tokens per unit", with_prefix(tokens)))
}

/// The part of an hour's price that is for what leaves its region.
fn egress(choice: &Choice) -> String {
    match choice.egress {
        0.0 => String::new(),
        egress => format!(", of it {egress:.2} for bytes that leave their region"),
    }
}

/// What deaths of devices cost.
fn deaths(losses: &Losses) -> String {
    let Losses { deaths, rewinds, available } = losses;
    let last = match *rewinds * 24.0 {
        0.0 => "never: it has machines that stay".to_owned(),
        a_day if a_day >= 1.0 => format!("{a_day:.0} times a day"),
        a_day => format!("once in {:.0} days", (1.0 / a_day).min(1e6)),
    };
    format!(
        "  {deaths:.2} deaths an hour take {:.1}% of the time: a stage loses its last replica {last}.\n",
        100.0 * (1.0 - available)
    )
}

/// The fastest choice of virtual workers.
fn workers(choices: &[Choice], places: impl Fn(&Choice) -> String) -> Option<String> {
    let all = choices.iter().filter_map(|choice| Some((choice, choice.workers?)));
    let (choice, best) =
        all.max_by(|one, other| one.1.tokens_per_second.total_cmp(&other.1.tokens_per_second))?;
    let WorkersChoice { workers, every, microbatches, tokens_per_second, per_hour, .. } = best;
    let tokens = best
        .tokens_per_currency_unit
        .map_or_else(String::new, |tokens| format!(", {} tokens per unit", with_prefix(tokens)));
    Some(format!(
        "  The all-reduce takes long: virtual workers, which train other weights to about the same loss \
         (docs/internals/workers.md), would reach {tokens_per_second:.0} tokens/s for {per_hour:.2} an hour{tokens}, with {} of {} ({}), \
         [training] microbatches = {microbatches} and [outer] workers = {workers}, every = {every}.\n",
        stages_of(choice.stages),
        devices(choice.replicas),
        places(choice)
    ))
}

/// `1 stage`, `2 stages`.
pub fn stages_of(number: usize) -> String {
    counted(number as u64, "stage")
}

/// `1 device`, `2 devices`.
pub fn devices(number: usize) -> String {
    counted(number as u64, "device")
}

/// `the device`, `each of 2 devices`.
pub fn each(number: usize) -> String {
    if number == 1 { "the device".to_owned() } else { format!("each of {}", devices(number)) }
}

/// Choices listed besides the best one.
const LISTED: usize = 8;

/// The best choice with an explanation, and a line for each other choice.
pub fn advice(choices: &[Choice], budget: Option<f64>) -> String {
    let mut text = String::new();
    let Some(best) = choices.first() else { return text };
    let places = |choice: &Choice| {
        let taken = choice.devices.iter().filter(|(_, count)| *count > 0);
        taken.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    };
    let Choice { stages, replicas, microbatch, microbatches, .. } = best;
    let _ = writeln!(
        text,
        "{} of {} ({}), {} of {} a step for each replica, windows of {}",
        stages_of(*stages),
        devices(*replicas),
        places(best),
        counted(*microbatches, "microbatch"),
        counted(*microbatch, "token"),
        best.windows.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    );
    let _ = writeln!(
        text,
        "  {:.0} tokens/s: a step of {:.2} s = {:.2} of passes ({:.0}% computing) and {:.2} all-reduce; {} of memory",
        best.tokens_per_second,
        best.step,
        best.passes,
        100.0 * best.computes / best.passes,
        best.all_reduce,
        Bytes(best.memory as u64)
    );
    let within = budget.map_or_else(String::new, |budget| format!(" of {budget:.2}"));
    let _ =
        writeln!(text, "  {:.2}{within} an hour{}{}", best.per_hour(), egress(best), value(best));
    text.extend(best.losses.as_ref().map(deaths));
    let waits = [
        (best.computes, "computation: faster or more devices help"),
        (
            best.passes - best.computes,
            "pipeline stalls: closer or fewer stages, or more microbatches help",
        ),
        (best.all_reduce, "the all-reduce: closer replicas, more stages or larger steps help"),
    ];
    if let Some((_, most)) = waits.iter().max_by(|one, other| one.0.total_cmp(&other.0)) {
        let _ = writeln!(text, "  The largest part is {most}.");
    }
    for other in choices.iter().skip(1).take(LISTED) {
        let _ = writeln!(
            text,
            "  or {} of {} ({}): {:.0} tokens/s for {:.2} an hour{}, microbatches of {}",
            stages_of(other.stages),
            other.replicas,
            places(other),
            other.tokens_per_second,
            other.per_hour(),
            value(other),
            counted(other.microbatch, "token")
        );
    }
    text.extend(workers(choices, places));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{Searches, choices};
    use crate::fleet::Fleet;

    /// Two places of spot machines with a slow link between them, of which each charges for what leaves it.
    const SPOT: &str = r#"stages = [1, 2]
activations = 1e8
gradient = 5e8
within = { delay = 0.001, bandwidth = 6e8 }
between = { delay = 0.05, bandwidth = 1.2e7 }
region = [
  { name = "one", devices = 2, price = 0.5, egress = 0.09, deaths = 0.2 },
  { name = "other", devices = 2, price = 0.5, egress = 0.09, deaths = 0.2 },
]
[training]
tokens = 8192
sequence = 1024
forward = 5e-5
"#;

    fn advice_on(fleet: &str) -> (String, Vec<Choice>) {
        let fleet = Fleet::parse(fleet).expect("a fleet");
        let training = fleet.training().expect("it has one");
        let choices = choices(&mut Searches::new(&fleet, 1), training).expect("choices");
        (advice(&choices, training.budget), choices)
    }

    #[test]
    fn deaths_egress_and_slow_links_count() {
        let (text, spot) = advice_on(SPOT);
        for words in [
            "2 stages of 1 device (2 other), 8 microbatches of 1024 tokens a step",
            "0.40 deaths an hour take",
            "a stage loses its last replica 10 times a day.",
            "or 1 stage of 4 (2 one, 2 other)",
            "The all-reduce takes long: virtual workers",
            "[outer] workers = 4, every = 500.",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let all = |choice: &&Choice| choice.replicas == 4;
        let (_, stay) = advice_on(&SPOT.replace("deaths = 0.2", "deaths = 0"));
        let [spot, stay] = [&spot, &stay].map(|all_of| all_of.iter().find(all).expect("one"));
        assert!(spot.tokens_per_second < stay.tokens_per_second && stay.losses.is_none());
        // Each of 4 devices sends a quarter of its gradient, and of the result, to each of the two elsewhere.
        let of_step = 8.0 * 2.0 / 4.0 * 5e8 * 0.09 / 1e9;
        let of_hour = of_step * 3600.0 / stay.step;
        assert!((stay.egress - of_hour).abs() < 1e-6, "{stay:?}");
        assert!((stay.per_hour() - 2.0 - of_hour).abs() < 1e-6);
        let workers = stay.workers.expect("links are slow");
        assert!(workers.tokens_per_second > 10.0 * stay.tokens_per_second, "{workers:?}");
        // What leaves a region counts for the budget.
        let (_, cheap) = advice_on(&SPOT.replace("forward =", "budget = 2.0\nforward ="));
        assert!(!cheap.iter().any(|choice| choice.replicas == 4), "{cheap:?}");
    }
}
