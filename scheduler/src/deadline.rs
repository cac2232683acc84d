//! When something is late: after its mean time and four mean deviations, but twice its mean time at
//! least. Passes are measured per member, stage and kind.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Incarnation, Member, PeerId, Stage};
use shoal_protocol::message::PassTimes;

/// What anybody may say that a pass took, at most.
const LONGEST: Duration = Duration::from_secs(3600);

/// What a member says that it spent, as far as it can be believed.
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

    /// The same of what nothing may be known of yet.
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

/// The times of every member's passes at every stage.
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

    /// After how long a member's passes at a stage are late; who is not measured yet may take twice
    /// as long as the slowest that is. None while nobody is measured.
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
    fn steady_times_leave_little_patience_and_unsteady_ones_much() {
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
    fn who_is_not_measured_is_compared_with_the_slowest_of_its_stage() {
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
    fn no_word_of_a_member_makes_the_numbers_overflow() {
        let mut times = Times::default();
        let endless = PassTimes { forward: Duration::MAX, backward: Duration::MAX };
        times.add(Stage(0), member(1), endless);
        times.add(Stage(0), member(1), endless);
        assert!(times.late(Stage(0), member(2)).is_some());
    }
}
