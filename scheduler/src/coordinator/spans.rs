//! The lengths of spans in a running swarm: members that the coordinator may move change theirs where that makes steps
//! shorter, by the model of [`crate::coordinator::placing::span_length`] and measured times.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::ids::{Member, StageSpan};
use shoal_protocol::message::MemberRecord;
use shoal_protocol::units::Bytes;

use super::balance::{may_change_span, staying};
use super::context::Context;
use crate::coordinator::placing::span_length::{SpanCosts, windows};
use crate::coordinator::placing::throughput::{Estimates, StageThroughputs};
use crate::coordinator::work::deadline::Estimate;

/// Steps after a change by whose median it is judged. The first ones are longer, since peers get to know their new pace.
const JUDGED: usize = 5;

/// Changes of spans so far.
#[derive(Debug, Default)]
pub(super) struct SpanLengths {
    /// The last change, until it is judged.
    last: Option<Trial>,
    /// Whether the last change made steps longer: no other follows until members come or go.
    settled: bool,
}

/// What follows from the last change of spans.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is not judged yet, or no other may be made.
    Keep,
    /// It was of use: another may be made. A step takes so long.
    Compare(Duration),
    /// It made steps longer: these members go back to their earlier spans.
    Undo(Vec<(Member, StageSpan)>),
}

/// A change that is made.
#[derive(Debug, Clone)]
struct Trial {
    /// The duration of a step before.
    before: Duration,
    /// The earlier spans of the members that changed.
    spans: Vec<(Member, StageSpan)>,
    /// The durations of the steps since the last member has changed over.
    since: Option<Vec<Duration>>,
}

/// Changes of spans, and what they save.
#[derive(Debug, Default)]
pub(super) struct SpanChanges {
    pub(super) moves: Vec<(Member, StageSpan)>,
    /// Time by which a step gets shorter.
    pub(super) saved: Duration,
}

impl SpanLengths {
    /// Members came or went.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// A step took so long.
    pub(super) fn stepped(&mut self, took: Duration) {
        let since = self.last.as_mut().and_then(|trial| trial.since.as_mut());
        if let Some(since) = since.filter(|since| since.len() < JUDGED) {
            since.push(took);
        }
    }

    /// Judges the last change by the steps since, while no member is changing.
    pub(super) fn judge(&mut self, steps: &mut Option<Estimate>) -> Verdict {
        if let Some(trial) = &mut self.last {
            let Some(since) = &mut trial.since else {
                trial.since = Some(Vec::new());
                *steps = None;
                return Verdict::Keep;
            };
            if since.len() < JUDGED {
                return Verdict::Keep;
            }
            since.sort_unstable();
            self.settled |= since[JUDGED / 2] > trial.before;
            let spans = std::mem::take(&mut trial.spans);
            self.last = None;
            if self.settled {
                return Verdict::Undo(spans);
            }
        }
        let step = steps.map(|times| times.mean()).filter(|_| !self.settled);
        step.map_or(Verdict::Keep, Verdict::Compare)
    }

    /// A change begins, when steps take so long and the members that change have these spans.
    pub(super) fn begin(&mut self, before: Duration, spans: Vec<(Member, StageSpan)>) {
        self.last = Some(Trial { before, spans, since: None });
    }
}

/// The changes of spans that make steps shortest.
pub(super) fn changes(context: &Context, estimates: &Estimates<'_>) -> SpanChanges {
    let stages = context.config.manifest.training.stages;
    let hosts = staying(&context.members).map(|record| (record.member, record.destination()));
    let mut throughput = StageThroughputs::of(stages, hosts, estimates);
    let mut changes = SpanChanges::default();
    for record in staying(&context.members).filter(|record| record.serving && record.room.most > 1)
    {
        let Some(costs) = costs(context, estimates, record) else { continue };
        let length = record.span.stages().count() as u16;
        let best = costs.best(record.longest);
        let saved = costs.step(length).saturating_sub(costs.step(best));
        if best == length || saved.is_zero() {
            continue;
        }
        let own = estimates.throughput(record.member, record.span);
        throughput.remove(record.span, own);
        let to = window(stages, best, record.span, &throughput);
        if !may_change_span(&context.config.manifest, record, to) {
            throughput.add(record.span, own);
            continue;
        }
        throughput.add(to, estimates.throughput(record.member, to));
        changes.moves.push((record.member, to));
        changes.saved = changes.saved.max(saved);
    }
    changes
}

/// The window of a length that has a span's first stage; of several inside the span, the one whose slowest stage has
/// the least throughput.
fn window(stages: u16, length: u16, own: StageSpan, throughput: &StageThroughputs) -> StageSpan {
    let inside = |window: &StageSpan| own.contains(window.first) && own.contains(window.last);
    let least = |window: &StageSpan| window.stages().map(|stage| throughput.of_stage(stage)).min();
    let shorter = windows(stages, length).filter(inside).min_by_key(least);
    let around = || windows(stages, length).find(|window| window.contains(own.first));
    shorter.or_else(around).unwrap_or(own)
}

/// What a step costs a member; `None` where its links are not measured.
fn costs(context: &Context, estimates: &Estimates<'_>, record: &MemberRecord) -> Option<SpanCosts> {
    let (manifest, load) = (&context.config.manifest, &context.config.load);
    let stages = manifest.training.stages;
    let link = context.members.links.typical_link(record.member.peer)?;
    let service = |stage| Duration::from_nanos(estimates.service_time(record.member, stage));
    let gradients = load.gradients.iter().map(|gradient| gradient.0).sum::<u64>();
    let of_stage = |all: u64| Bytes(all / u64::from(stages.max(1)));
    let states = manifest.stages().map(|stage| load.state(stage).0).sum::<u64>();
    let hosts: BTreeSet<Member> = staying(&context.members).map(|record| record.member).collect();
    Some(SpanCosts {
        service: manifest.stages().map(service).collect(),
        hosts: hosts.len(),
        microbatches: manifest.training.microbatches,
        activation: Bytes(load.activations.0 / u64::from(manifest.training.microbatches.max(1))),
        gradient: of_stage(gradients),
        link,
        room: record.room,
        // Weights twice, for both directions of the passes; accumulators twice, of 8 bytes where a gradient has
        // 4; and for the update all state and the sums of the all-reduce.
        moved: of_stage(states + 7 * gradients),
    })
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    fn steps(seconds: u64) -> Option<Estimate> {
        let mut steps = None;
        for _ in 0..8 {
            Estimate::note(&mut steps, Duration::from_secs(seconds));
        }
        steps
    }

    #[test]
    fn a_change_that_makes_steps_longer_is_undone_and_no_other_follows() {
        let member = Member { peer: PeerId([1; 32]), incarnation: Incarnation(1) };
        let before = vec![(member, StageSpan::all(4))];
        let judged = |seconds: [u64; JUDGED]| {
            let mut lengths = SpanLengths::default();
            assert_eq!(lengths.judge(&mut None), Verdict::Keep, "no step is measured");
            let ten = Duration::from_secs(10);
            assert_eq!(lengths.judge(&mut steps(10)), Verdict::Compare(ten));
            lengths.begin(ten, before.clone());
            lengths.stepped(Duration::from_secs(1));
            let mut earlier = steps(10);
            assert_eq!(lengths.judge(&mut earlier), Verdict::Keep);
            assert!(earlier.is_none(), "earlier steps do not count");
            for seconds in seconds {
                assert_eq!(lengths.judge(&mut steps(7)), Verdict::Keep, "few steps");
                lengths.stepped(Duration::from_secs(seconds));
            }
            (lengths.judge(&mut steps(7)), lengths.judge(&mut steps(7)))
        };
        let seven = Verdict::Compare(Duration::from_secs(7));
        assert_eq!(judged([90, 60, 9, 8, 9]), (seven, Verdict::Compare(Duration::from_secs(7))));
        assert_eq!(judged([1, 11, 12, 11, 9]), (Verdict::Undo(before.clone()), Verdict::Keep));
    }
}
