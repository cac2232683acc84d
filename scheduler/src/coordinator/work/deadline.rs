//! Deadlines: an event is overdue after its mean time plus four mean deviations, and not before
//! twice its mean time. Passes are measured by member, stage and direction.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Incarnation, Member, PeerId, Stage};
use shoal_protocol::message::PassTimes;

/// Maximum duration of a pass that a report is credited with.
const LONGEST: Duration = Duration::from_secs(3600);

/// The reported pass times, limited to plausible values.
pub(crate) fn believable(pass_times: PassTimes) -> PassTimes {
    PassTimes {
        forward: pass_times.forward.min(LONGEST),
        backward: pass_times.backward.min(LONGEST),
    }
}

/// A running mean and mean deviation, with gains of 1/8 and 1/4 (RFC 6298, section 2).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Estimate {
    mean: Duration,
    deviation: Duration,
}

impl Estimate {
    pub(crate) fn first(time: Duration) -> Self {
        Self { mean: time, deviation: time / 2 }
    }

    pub(crate) fn add(&mut self, time: Duration) {
        self.deviation = self.deviation * 3 / 4 + self.mean.abs_diff(time) / 4;
        self.mean = self.mean * 7 / 8 + time / 8;
    }

    /// Adds a time, or starts the estimate with it.
    pub(crate) fn note(estimate: &mut Option<Self>, time: Duration) {
        match estimate {
            Some(known) => known.add(time),
            None => *estimate = Some(Self::first(time)),
        }
    }

    pub(crate) fn mean(self) -> Duration {
        self.mean
    }

    pub(crate) fn late(self) -> Duration {
        self.mean + (self.deviation * 4).max(self.mean)
    }
}

/// Durations of every member's passes at every stage.
#[derive(Debug, Default)]
pub(crate) struct Times {
    of: BTreeMap<(Stage, Member), (Estimate, Estimate)>,
}

impl Times {
    pub(crate) fn add(&mut self, stage: Stage, member: Member, pass_times: PassTimes) {
        let PassTimes { forward, backward } = believable(pass_times);
        match self.of.get_mut(&(stage, member)) {
            Some((of_forward, of_backward)) => {
                of_forward.add(forward);
                of_backward.add(backward);
            }
            None => {
                let first = (Estimate::first(forward), Estimate::first(backward));
                self.of.insert((stage, member), first);
            }
        }
    }

    pub(crate) fn forget(&mut self, member: Member) {
        self.of.retain(|(_, of), _| *of != member);
    }

    /// The time after which a member's passes at a stage are overdue. A member without measurements
    /// may take twice as long as the slowest measured one. `None` without any measurement.
    pub(crate) fn late(&self, stage: Stage, member: Member) -> Option<PassTimes> {
        let late = |(forward, backward): &(Estimate, Estimate)| PassTimes {
            forward: forward.late(),
            backward: backward.late(),
        };
        if let Some(own) = self.of.get(&(stage, member)) {
            return Some(late(own));
        }
        let lowest = |stage| (stage, Member { peer: PeerId([0; 32]), incarnation: Incarnation(0) });
        let others = self.of.range(lowest(stage)..lowest(stage.next()));
        others
            .map(|(_, times)| late(times))
            .reduce(|one, other| PassTimes {
                forward: one.forward.max(other.forward),
                backward: one.backward.max(other.backward),
            })
            .map(|slowest| PassTimes {
                forward: slowest.forward * 2,
                backward: slowest.backward * 2,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn pass_times(forward: u64, backward: u64) -> PassTimes {
        let time = Duration::from_millis;
        PassTimes { forward: time(forward), backward: time(backward) }
    }

    #[test]
    fn steady_times_give_short_deadlines_and_unsteady_ones_long_deadlines() {
        let mut times = Times::default();
        assert_eq!(times.late(Stage(0), member(1)), None);
        times.add(Stage(0), member(1), pass_times(100, 200));
        assert_eq!(times.late(Stage(0), member(1)), Some(pass_times(300, 600)));
        for _ in 0..100 {
            times.add(Stage(0), member(1), pass_times(100, 200));
            times.add(Stage(0), member(2), pass_times(50, 100));
            times.add(Stage(0), member(2), pass_times(150, 300));
        }
        let steady = times.late(Stage(0), member(1)).expect("it is measured");
        assert!(steady.forward < Duration::from_millis(201), "{steady:?}");
        let unsteady = times.late(Stage(0), member(2)).expect("it is measured");
        assert!(unsteady.forward > Duration::from_millis(250), "{unsteady:?}");
    }

    #[test]
    fn an_unmeasured_member_is_compared_with_the_slowest_of_its_stage() {
        let mut times = Times::default();
        times.add(Stage(0), member(1), pass_times(100, 400));
        times.add(Stage(0), member(2), pass_times(200, 200));
        times.add(Stage(1), member(2), pass_times(900, 900));
        assert_eq!(times.late(Stage(0), member(3)), Some(pass_times(1200, 2400)));
        times.forget(member(2));
        assert_eq!(times.late(Stage(0), member(3)), Some(pass_times(600, 2400)));
        assert_eq!(times.late(Stage(1), member(3)), None);
    }

    #[test]
    fn extreme_reports_cause_no_overflow() {
        let mut times = Times::default();
        let endless = PassTimes { forward: Duration::MAX, backward: Duration::MAX };
        times.add(Stage(0), member(1), endless);
        times.add(Stage(0), member(1), endless);
        assert!(times.late(Stage(0), member(2)).is_some());
    }
}
