//! Compares the spans that devices of a fleet may host, for `shoal plan`: one stage each (SWARM), all
//! stages (ATOM), and spans between.

use std::fmt::Write as _;

use serde::Serialize;
use shoal_formats::words::counted;
use shoal_scheduler::planner::{Cut, PlanError, SpanAdvice, advise_span};

use crate::budget::{Placed, Searches, parts};
use crate::plan_work::Training;

/// The fastest plan of each kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spans {
    /// One stage at each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swarm: Option<SpanChoice>,
    /// All stages at each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub atom: Option<SpanChoice>,
    /// More than one stage at each device, and not all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mixed: Option<SpanChoice>,
    /// Why the fastest of them is the fastest.
    pub reason: String,
}

/// A plan whose devices host spans of equal length. Times are in seconds of a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SpanChoice {
    /// Stages of the model.
    pub stages: usize,
    /// Stages of a device.
    pub span: usize,
    /// Devices of each span.
    pub replicas: usize,
    /// Tokens of a microbatch.
    pub microbatch: u64,
    /// Microbatches of each replica.
    pub microbatches: u64,
    /// Microbatches that visit a stage in a row; absent if the span fits into memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub visit: Option<u64>,
    /// A step.
    pub step: f64,
    /// An engine's computation.
    pub computes: f64,
    /// Waits of engines for activations.
    pub stalls: f64,
    /// Waits for loads.
    pub loads: f64,
    /// Waits for the all-reduce.
    pub all_reduce: f64,
    /// Tokens that are trained in a second.
    pub tokens_per_second: f64,
}

impl SpanChoice {
    fn new(
        training: &Training,
        cut: Cut,
        replicas: usize,
        all_reduce: f64,
        it: SpanAdvice,
    ) -> Self {
        let passes = it.advice.passes.as_secs_f64();
        let (computes, loads) = (it.advice.computes.as_secs_f64(), it.exposed.as_secs_f64());
        let step = training.step(passes, all_reduce);
        Self {
            stages: cut.stages,
            span: cut.span,
            replicas,
            microbatch: it.advice.microbatch,
            microbatches: it.advice.microbatches,
            visit: it.visit,
            step,
            computes,
            stalls: (passes - computes - loads).max(0.0),
            loads,
            all_reduce,
            tokens_per_second: training.tokens as f64 / step,
        }
    }

    /// The wait that costs the most, in words.
    fn longest_wait(&self) -> (f64, &'static str) {
        let waits = [
            (self.stalls, "waiting for activations"),
            (self.loads, "loads that no pass hides"),
            (self.all_reduce, "the all-reduce"),
        ];
        let longest = waits.into_iter().max_by(|one, other| one.0.total_cmp(&other.0));
        longest.expect("there are three")
    }
}

impl Spans {
    /// The plans by name, as far as there are any.
    fn all(&self) -> impl Iterator<Item = (&'static str, &SpanChoice)> {
        let all = [("SWARM", &self.swarm), ("ATOM", &self.atom), ("mixed", &self.mixed)];
        all.into_iter().filter_map(|(name, choice)| Some((name, choice.as_ref()?)))
    }

    /// The fastest plan.
    pub fn best(&self) -> Option<(&'static str, &SpanChoice)> {
        self.all()
            .max_by(|one, other| one.1.tokens_per_second.total_cmp(&other.1.tokens_per_second))
    }

    fn explain(&self) -> String {
        let Some((name, best)) = self.best() else { return "nothing fits".to_owned() };
        let lost = |(name, choice): (&'static str, &SpanChoice)| {
            let (seconds, to) = choice.longest_wait();
            format!("{name} spends {seconds:.2} of {:.2} s on {to}", choice.step)
        };
        let others = self.all().filter(|(other, _)| *other != name).map(lost);
        let others = others.collect::<Vec<_>>().join(", ");
        let (seconds, to) = best.longest_wait();
        let own =
            format!("{name} is the fastest, with {seconds:.2} of {:.2} s for {to}", best.step);
        if others.is_empty() {
            format!("{own}; nothing else fits")
        } else {
            format!("{own}; {others}")
        }
    }
}

/// The fastest plan of each kind, over the numbers of stages and the affordable parts of the fleet.
///
/// # Errors
/// If the planner rejects the fleet.
pub fn spans(searches: &mut Searches<'_>, training: &Training) -> Result<Spans, PlanError> {
    let fleet = searches.fleet;
    let mut found = Spans { swarm: None, atom: None, mixed: None, reason: String::new() };
    for cut in fleet.stages().into_iter().flat_map(Cut::all) {
        for counts in parts(fleet, training.budget, cut.positions()) {
            let placed = searches.placed(counts, cut.positions())?;
            let Some(choice) = choice(placed, training, cut) else { continue };
            let kind = match cut.span {
                1 => &mut found.swarm,
                span if span == cut.stages => &mut found.atom,
                _ => &mut found.mixed,
            };
            if kind.as_ref().is_none_or(|it| it.tokens_per_second < choice.tokens_per_second) {
                *kind = Some(choice);
            }
        }
    }
    found.reason = found.explain();
    Ok(found)
}

fn choice(placed: &Placed, training: &Training, cut: Cut) -> Option<SpanChoice> {
    let Placed { fleet, placement, .. } = placed;
    let replicas = fleet.devices() / cut.positions();
    let (work, tier) = (training.work(fleet), training.tier(fleet));
    let advice = advise_span(&work, tier.as_ref(), cut, replicas, placed.slowest())?;
    let all_reduce = placement.cost.data_parallel.as_secs_f64();
    Some(SpanChoice::new(training, cut, replicas, all_reduce, advice))
}

/// A line for each kind of plan, and the reason.
pub fn text(spans: &Spans) -> String {
    let mut text = String::new();
    for (name, choice) in spans.all() {
        let SpanChoice { stages, span, replicas, microbatch, .. } = choice;
        let visits = choice.visit.map_or_else(
            || "all in memory".to_owned(),
            |visit| {
                let [visit, microbatch] =
                    [counted(visit, "microbatch"), counted(*microbatch, "token")];
                format!("visits of {visit} of {microbatch}")
            },
        );
        let _ = writeln!(
            text,
            "  {name:5}  {:9.0} tokens/s: {span} of {} at each device, {} a span, {visits}",
            choice.tokens_per_second,
            counted(*stages as u64, "stage"),
            counted(*replicas as u64, "device")
        );
    }
    let _ = writeln!(text, "  {}.", spans.reason);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Fleet;

    /// Four devices whose memory holds a quarter of the state, and a link below that carries all weights in
    /// a tenth of a second.
    fn fleet(bandwidth: &str, more: &str) -> Fleet {
        let text = format!(
            "stages = [4]\nactivations = 8e6\ngradient = 4e5\nwithin = {{ delay = 0.001, bandwidth = {bandwidth} }}\n\
             region = [{{ name = \"a\", devices = 4 }}]\n[training]\ntokens = 64\nsequence = 1\nforward = 0.01\n\
             state = 1.6e6\nmemory = 6e5\n{more}"
        );
        Fleet::parse(&text).expect("a fleet")
    }

    fn of(fleet: &Fleet) -> Spans {
        let training = fleet.training().expect("it has one");
        spans(&mut Searches::new(fleet, 1), training).expect("a plan")
    }

    #[test]
    fn fast_links_favour_one_stage_and_slow_links_all() {
        let fast = of(&fleet("1e12", "host_link = 2e6\n"));
        let (name, best) = fast.best().expect("a plan");
        assert_eq!((name, best.span, best.visit), ("SWARM", 1, None), "{fast:?}");
        let slow = of(&fleet("1e4", "host_link = 2e6\n"));
        let (name, best) = slow.best().expect("a plan");
        assert_eq!((name, best.span, best.replicas), ("ATOM", 4, 4), "{slow:?}");
        assert!(best.visit.is_some_and(|visit| visit > 1));
        let mixed = slow.mixed.as_ref().expect("two stages each");
        assert_eq!((mixed.span, mixed.replicas), (2, 2));
        let text = text(&slow);
        for words in ["SWARM ", "ATOM ", "mixed", "ATOM is the fastest", "waiting for activations"]
        {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn without_a_link_below_only_what_fits_is_planned() {
        let spans = of(&fleet("1e4", ""));
        assert!(spans.swarm.is_some() && spans.atom.is_none() && spans.mixed.is_none());
        assert!(spans.reason.contains("nothing else fits"), "{}", spans.reason);
    }
}
