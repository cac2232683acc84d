//! How many stages in a row a member should host.
//!
//! With a span of one stage every activation travels (SWARM, arXiv 2301.11913); with a span of all stages none does,
//! but every replica takes part in the all-reduce of the whole model (ATOM, arXiv 2403.10504). The model of a step
//! when `P` members host spans of `n` of `S` stages each: passes run at the speed of the slowest span, whose stages may
//! cost more than others; or else activations and gradients take longer on the members' links. A pipeline has `S / n`
//! positions to fill. The `D = P n / S` replicas of a stage then exchange the sums of `n` stages. Of a span that memory does
//! not hold, the stages without room are moved through it once in a step, beside the passes, which compute their forward
//! passes again.

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::message::StageRoom;
use shoal_protocol::units::Bytes;

use crate::planner::Link;

/// Beyond so many members for each span, the spans are taken to be equally fast.
const MANY: usize = 4;

/// The passes of a microbatch that compute their forward pass again, relative to those that do not: a backward pass
/// takes twice as long as a forward pass.
const AGAIN: f64 = 4.0 / 3.0;

/// What a step costs a member, apart from the length of its span.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SpanCosts {
    /// Time of a microbatch's passes at each stage.
    pub(crate) service: Vec<Duration>,
    /// Members that host stages.
    pub(crate) hosts: usize,
    /// Microbatches of a step.
    pub(crate) microbatches: u32,
    /// Size of a microbatch's activation at a boundary; a gradient is as large.
    pub(crate) activation: Bytes,
    /// Size of a stage's gradient.
    pub(crate) gradient: Bytes,
    /// The member's link.
    pub(crate) link: Link,
    /// The stages that the member has room for.
    pub(crate) room: StageRoom,
    /// What a step moves of a swapped stage into memory and out of it, the larger of the two.
    pub(crate) moved: Bytes,
}

impl SpanCosts {
    /// The time of a step in which all members host spans of so many stages.
    pub(crate) fn step(&self, length: u16) -> Duration {
        let spans: Vec<f64> = self.spans(length);
        let all: f64 = spans.iter().sum();
        let longest = spans.iter().copied().fold(0.0, f64::max);
        let (positions, hosts) = (spans.len().max(1) as f64, self.hosts.max(1) as f64);
        let replicas = (hosts / positions).max(1.0);
        let delay = self.link.delay.as_secs_f64();
        let transfer = |bytes: f64| self.link.time(Bytes(bytes as u64)).as_secs_f64() - delay;
        let microbatches = f64::from(self.microbatches);
        let again = if length > self.room.in_memory { AGAIN } else { 1.0 };
        let passes = microbatches * again * slowest(&spans, self.hosts);
        let computes = passes.max(longest).max(self.swaps(length).as_secs_f64());
        // One activation and one gradient leave, and as many come, at the same time.
        let travels = if positions > 1.0 { transfer(2.0 * self.activation.0 as f64) } else { 0.0 };
        let share = (microbatches * positions / hosts).max(1.0);
        let fills = all - longest + (positions - 1.0) * (travels + 2.0 * delay);
        let of_span = f64::from(length) * self.gradient.0 as f64;
        let sums = 2.0 * (replicas - 1.0) / replicas * of_span;
        let reduces = if replicas > 1.0 { transfer(sums) + 4.0 * delay } else { 0.0 };
        Duration::from_secs_f64(computes.max(share * travels) + fills + reduces)
    }

    /// How long the stages of such a span are moved in a step.
    fn swaps(&self, length: u16) -> Duration {
        let moved = u64::from(length.saturating_sub(self.room.in_memory)) * self.moved.0;
        if moved == 0 { Duration::ZERO } else { self.room.swap_rate.time(Bytes(moved)) }
    }

    fn stages(&self) -> u16 {
        u16::try_from(self.service.len()).unwrap_or(u16::MAX)
    }

    /// Seconds of a microbatch's passes at each span of a length.
    fn spans(&self, length: u16) -> Vec<f64> {
        let spans = self.service.chunks(usize::from(length.max(1)));
        spans.map(|span| span.iter().sum::<Duration>().as_secs_f64()).collect()
    }

    /// The length with the shortest step among those that divide the stages and have room, at most `longest`; the
    /// shortest of equals.
    pub(crate) fn best(&self, longest: u16) -> u16 {
        let stages = self.stages().max(1);
        let most = self.room.most.min(longest).clamp(1, stages);
        let lengths = (1..=most).filter(|length| stages.is_multiple_of(*length));
        lengths.min_by_key(|length| self.step(*length)).unwrap_or(1)
    }
}

/// Seconds for a microbatch at the slowest of these spans, which so many members share out as evenly as they can.
fn slowest(spans: &[f64], hosts: usize) -> f64 {
    let all = spans.iter().sum::<f64>() / hosts.max(1) as f64;
    if hosts <= spans.len() || hosts > MANY * spans.len() {
        let longest = spans.iter().copied().fold(0.0, f64::max);
        return if hosts == spans.len() { longest } else { all };
    }
    let mut replicas = vec![1.0; spans.len()];
    let time = |replicas: &[f64], span: usize| spans[span] / replicas[span];
    let last = |replicas: &[f64]| {
        let by_time =
            |one: &usize, other: &usize| time(replicas, *one).total_cmp(&time(replicas, *other));
        (0..spans.len()).max_by(by_time).expect("there are fewer spans than members")
    };
    for _ in spans.len()..hosts {
        let span = last(&replicas);
        replicas[span] += 1.0;
    }
    time(&replicas, last(&replicas))
}

/// The spans of a length that divides the stages, one after the other.
pub(crate) fn windows(stages: u16, length: u16) -> impl Iterator<Item = StageSpan> {
    let length = length.max(1);
    (0..stages).step_by(usize::from(length)).map(move |first| StageSpan {
        first: Stage(first),
        last: Stage((first + length).min(stages) - 1),
    })
}

#[cfg(test)]
mod tests {
    use shoal_protocol::units::Rate;

    use super::*;

    /// Four members, four stages, sixteen microbatches of 0.3 s at each stage; a megabyte at each boundary.
    fn costs(megabits: u64, gradient: Bytes) -> SpanCosts {
        let link = Link { delay: Duration::from_millis(50), rate: Rate(megabits * 125_000) };
        SpanCosts {
            service: vec![Duration::from_millis(300); 4],
            hosts: 4,
            microbatches: 16,
            activation: Bytes(1_000_000),
            gradient,
            link,
            room: StageRoom::in_memory(4),
            moved: Bytes(0),
        }
    }

    fn milliseconds(costs: &SpanCosts, length: u16) -> u128 {
        (costs.step(length) + Duration::from_micros(1)).as_millis()
    }

    #[test]
    fn a_step_is_its_passes_or_transfers_the_filling_and_the_sums() {
        let slow = costs(20, Bytes(2_000_000));
        // 16 transfers of 0.8 s, three positions of 0.3 + 0.8 + 0.1; one replica of a stage.
        assert_eq!(milliseconds(&slow, 1), 16 * 800 + 3 * 1_200);
        // 8 transfers of 0.8 s, a position of 0.6 + 0.8 + 0.1, half of two gradients twice, and the delays.
        assert_eq!(milliseconds(&slow, 2), 8 * 800 + 1_500 + 1_600 + 200);
        // 4 microbatches of 1.2 s; three quarters of four gradients twice.
        assert_eq!(milliseconds(&slow, 4), 4 * 1_200 + 4_800 + 200);
    }

    #[test]
    fn small_sums_favour_long_spans_and_large_ones_short_spans() {
        let gradient = Bytes(40_000_000);
        let best = |megabits, gradient| costs(megabits, gradient).best(4);
        assert_eq!([1, 20, 1000].map(|rate| best(rate, Bytes(1_000_000))), [4, 4, 4]);
        // Large sums cost more than the activations.
        assert_eq!([20, 100].map(|rate| best(rate, gradient)), [1, 1]);
        assert_eq!(costs(20, Bytes(1_000_000)).best(3), 2, "three does not divide four");
        let small = SpanCosts { room: StageRoom::in_memory(2), ..costs(20, Bytes(1_000_000)) };
        assert_eq!(small.best(4), 2, "no more have room");
        assert_eq!(costs(20, Bytes(1_000_000)).best(0), 1);
    }

    #[test]
    fn a_swapped_span_computes_again_and_moves_the_stages_without_room() {
        let room = |rate| StageRoom { in_memory: 2, most: 4, swap_rate: Rate(rate) };
        let of = |rate, microbatches| SpanCosts {
            room: room(rate),
            moved: Bytes(100_000_000),
            microbatches,
            ..costs(10, Bytes(1_000_000))
        };
        // 16 forward passes more at each of four stages. What two stages move takes 20 s, or hides.
        let reduces = 4_800 + 200;
        assert_eq!(milliseconds(&of(10_000_000, 16), 4), 20_000 + reduces);
        assert_eq!(milliseconds(&of(1_000_000_000, 16), 4), 16 * 1_600 / 4 + reduces);
        let best = |rate, microbatches| of(rate, microbatches).best(4);
        assert_eq!([best(1_000_000_000, 16), best(10_000_000, 16)], [4, 2], "a slow disk");
        assert_eq!(best(10_000_000, 160), 4, "many microbatches hide it");
    }

    #[test]
    fn a_stage_that_costs_more_slows_short_spans() {
        let mut near = costs(1_000_000, Bytes(0));
        near.link.delay = Duration::ZERO;
        near.service[3] = Duration::from_millis(600);
        // Sixteen times the last stage, and the others once; a quarter of all.
        assert_eq!(milliseconds(&near, 1), 16 * 600 + 900);
        assert_eq!(milliseconds(&near, 4), 4 * 1_500);
        // Of six members the last stage has two, and of five.
        assert_eq!([5, 6].map(|hosts| slowest(&[0.3, 0.3, 0.3, 0.6], hosts)), [0.3, 0.3]);
        assert_eq!([2, 100].map(|hosts| slowest(&[0.5, 0.5, 0.5, 0.5], hosts)), [1.0, 0.02]);
        assert_eq!(slowest(&[], 3), 0.0);
    }

    #[test]
    fn windows_cover_all_stages_once() {
        let of = |stages, length| {
            windows(stages, length).map(|span| span.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(of(4, 2), ["0-1", "2-3"]);
        assert_eq!(of(4, 4), ["0-3"]);
        assert_eq!(of(3, 1), ["0", "1", "2"]);
        assert_eq!(of(0, 1), Vec::<String>::new());
    }
}
