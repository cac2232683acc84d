//! How many stages in a row a member should host.
//!
//! With a span of one stage every activation travels (SWARM, arXiv 2301.11913); with a span of all stages none does,
//! but every replica takes part in the all-reduce of the whole model (ATOM, arXiv 2403.10504). The model of a step
//! when `P` members host spans of `n` of `S` stages each: a microbatch costs a member the longer one of `n` passes in
//! both directions and of the transfer of an activation and a gradient; a pipeline has `S / n` positions to fill; the
//! `D = P n / S` replicas of a stage then exchange the sums of `n` stages.

use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::units::Bytes;

use crate::planner::Link;

/// What a step costs a member, apart from the length of its span.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SpanCosts {
    /// Stages of the run.
    pub(crate) stages: u16,
    /// Members that host stages.
    pub(crate) hosts: usize,
    /// Microbatches of a step.
    pub(crate) microbatches: u32,
    /// Time of a microbatch's passes at one stage.
    pub(crate) service: Duration,
    /// Size of a microbatch's activation at a boundary; a gradient is as large.
    pub(crate) activation: Bytes,
    /// Size of a stage's gradient.
    pub(crate) gradient: Bytes,
    /// The member's link.
    pub(crate) link: Link,
}

impl SpanCosts {
    /// The time of a step in which all members host spans of so many stages.
    pub(crate) fn step(&self, length: u16) -> Duration {
        let (stages, length) = (f64::from(self.stages.max(1)), f64::from(length.max(1)));
        let (positions, hosts) = (stages / length, self.hosts.max(1) as f64);
        let replicas = (hosts / positions).max(1.0);
        let delay = self.link.delay.as_secs_f64();
        let transfer = |bytes: f64| self.link.time(Bytes(bytes as u64)).as_secs_f64() - delay;
        let computes = self.service.as_secs_f64() * length;
        // One activation and one gradient leave, and as many come, at the same time.
        let travels = if positions > 1.0 { transfer(2.0 * self.activation.0 as f64) } else { 0.0 };
        let share = f64::from(self.microbatches) * positions / hosts;
        let fills = (positions - 1.0).max(0.0) * (computes + travels + 2.0 * delay);
        let sums = 2.0 * (replicas - 1.0) / replicas * length * self.gradient.0 as f64;
        let reduces = if replicas > 1.0 { transfer(sums) + 4.0 * delay } else { 0.0 };
        Duration::from_secs_f64(share.max(1.0) * computes.max(travels) + fills + reduces)
    }

    /// The length with the shortest step among those that divide the stages, at most `room`; the shortest of equals.
    pub(crate) fn best(&self, room: u16) -> u16 {
        let lengths = 1..=room.clamp(1, self.stages.max(1));
        let lengths = lengths.filter(|length| self.stages.is_multiple_of(*length));
        lengths.min_by_key(|length| self.step(*length)).unwrap_or(1)
    }
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
            stages: 4,
            hosts: 4,
            microbatches: 16,
            service: Duration::from_millis(300),
            activation: Bytes(1_000_000),
            gradient,
            link,
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
        assert_eq!(costs(20, Bytes(1_000_000)).best(0), 1);
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
