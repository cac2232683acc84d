//! When a peer that swaps its stages leaves the one at hand.
//!
//! Passes come over links one by one, and a change of the stage for each of them would load stages all the
//! time. So the peer measures what a change costs: how much longer the first pass of a visit takes than the
//! others, which is the part of the loads that no computation hides. While other peers may send more work
//! of the stage at hand, the engine first ends what it has, and then waits as long as a change costs, and
//! no longer. That is the rule of ski rental: whatever comes, waiting and changing together cost at most
//! twice what the better of the two had cost. Where loads hide behind passes it never waits.

use std::time::Duration;

use shoal_protocol::units::Moment;

use super::job::Pass;
use super::residency::Visit;
use crate::robust_average::RobustAverage;

/// A new measurement of a change counts one part in this many.
const WEIGHT: u32 = 4;

/// The visits of a peer that swaps its stages.
#[derive(Debug, Default)]
pub(super) struct Visits {
    current: Option<Visit>,
    /// The pass that began the visit, until it ends.
    first: Option<Pass>,
    /// Durations of the other passes.
    forward: RobustAverage,
    backward: RobustAverage,
    /// What a change of the stage costs; `None` before the first one.
    change: Option<Duration>,
    /// The time until which the engine waits for more work of the stage at hand.
    until: Option<Moment>,
    /// Whether loads kept the engine waiting since that was last asked for.
    exposed: bool,
}

impl Visits {
    pub(super) fn current(&self) -> Option<Visit> {
        self.current
    }

    /// Whether to wait before a visit that is possible now. `has_pass` is whether the engine runs a pass,
    /// `comes` whether other peers may send more work of the stage at hand.
    pub(super) fn waits(&mut self, now: Moment, next: Visit, has_pass: bool, comes: bool) -> bool {
        let leaves = self.current.is_some_and(|visit| visit.stage != next.stage);
        if !leaves {
            return false;
        }
        // The gradient of the last pass is added while its stage is there.
        if has_pass {
            return true;
        }
        if !comes {
            return false;
        }
        let until = *self.until.get_or_insert(now + self.change.unwrap_or_default());
        now < until
    }

    /// The time at which a wait ends.
    pub(super) fn until(&self) -> Option<Moment> {
        self.until
    }

    /// Nothing waits for the engine.
    pub(super) fn rest(&mut self) {
        self.until = None;
    }

    /// A pass of a visit goes to the engine. Returns whether the visit is a new one.
    pub(super) fn begin(&mut self, visit: Visit, pass: Pass) -> bool {
        self.until = None;
        let before = self.current.replace(visit);
        if before.map(|before| before.stage) != Some(visit.stage) {
            self.first = Some(pass);
        }
        before != Some(visit)
    }

    /// A pass ended after so long.
    pub(super) fn end(&mut self, pass: Pass, busy: Duration) {
        let others = match pass {
            Pass::Forward(_) => &mut self.forward,
            Pass::Backward(_) => &mut self.backward,
        };
        if self.first != Some(pass) {
            others.add(busy);
            return;
        }
        self.first = None;
        let usual = Duration::from_nanos(others.nanoseconds().unwrap_or(0));
        let beyond = busy.saturating_sub(usual);
        self.exposed |= beyond > usual;
        let known = self.change.unwrap_or(beyond);
        self.change = Some((known * (WEIGHT - 1) + beyond) / WEIGHT);
    }

    /// Whether a load took longer than a pass since the last call: then more microbatches should be
    /// visited at a time.
    pub(super) fn take_exposed(&mut self) -> bool {
        std::mem::take(&mut self.exposed)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};

    use super::*;

    fn pass(stage: u16, microbatch: u32) -> Pass {
        let (stage, microbatch) = (Stage(stage), Microbatch(microbatch));
        Pass::Forward(ClaimKey { step: Step(0), stage, microbatch })
    }

    fn up(stage: u16) -> Visit {
        Visit { stage: Stage(stage), upwards: true }
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    fn at(count: u64) -> Moment {
        Moment(seconds(count))
    }

    /// A visit whose first pass took four seconds longer than its second, which took one.
    fn visited() -> Visits {
        let mut visits = Visits::default();
        assert!(visits.begin(up(1), pass(1, 0)));
        visits.begin(up(1), pass(1, 1));
        visits.end(pass(1, 1), seconds(1));
        visits.end(pass(1, 0), seconds(5));
        visits
    }

    #[test]
    fn it_waits_as_long_as_a_change_costs_and_no_longer() {
        let mut visits = visited();
        assert!(visits.waits(at(9), up(2), true, true), "the engine ends its pass first");
        assert!(visits.waits(at(10), up(2), false, true));
        assert_eq!(visits.until(), Some(at(14)));
        assert!(visits.waits(at(13), up(2), false, true));
        assert!(!visits.waits(at(14), up(2), false, true));
        assert!(visits.begin(up(2), pass(2, 0)));
        assert_eq!(visits.until(), None);
    }

    #[test]
    fn it_goes_on_where_nothing_comes_or_the_stage_stays() {
        let mut visits = visited();
        assert!(
            visits.waits(at(10), up(2), true, false),
            "the gradient of the last pass is added first"
        );
        assert!(!visits.waits(at(10), up(2), false, false));
        assert!(!visits.waits(at(10), up(1), true, true));
        assert!(!Visits::default().waits(at(10), up(1), false, true), "no stage is at hand");
    }

    #[test]
    fn it_never_waits_where_loads_are_hidden() {
        let mut visits = visited();
        assert!(visits.take_exposed() && !visits.take_exposed());
        for stage in 2..40 {
            visits.begin(up(stage), pass(stage, 0));
            visits.end(pass(stage, 0), seconds(1));
        }
        assert!(!visits.take_exposed());
        visits.waits(at(100), up(1), false, true);
        assert!(visits.until().expect("a deadline").since(at(100)) < Duration::from_millis(1));
    }
}
