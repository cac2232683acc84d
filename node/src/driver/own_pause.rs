//! Pauses of this process: a machine that slept, or a process that was frozen, missed the others' packets. Their
//! silence then says nothing about them.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use shoal_protocol::ids::Member;
use shoal_protocol::limits;

/// The event loop runs at least this often.
pub(super) const WAKES: Duration = Duration::from_millis(500);

/// A gap between two runs of the event loop that is a pause. Shorter ones break no connection.
const PAUSE: Duration = limits::CONNECTION_TIMEOUT.checked_div(2).expect("a part of it");

/// Time for the others to reach this process again after a pause: each may still wait for the end of an attempt.
const ALLOWANCE: Duration = limits::CONNECTION_TIMEOUT.saturating_mul(2);

/// Returns the time since the machine's start, with the time in which it slept.
pub(super) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Judges silence after pauses of this process. All moments are of [`since_boot`].
#[derive(Debug, Default)]
pub(super) struct OwnPause {
    /// The moment of the last run of the event loop.
    last_run: Option<Duration>,
    /// The end of the time in which silence says nothing.
    until: Duration,
    /// Members that fell silent in it, and when that counts.
    silent: BTreeMap<Member, Duration>,
}

impl OwnPause {
    /// Notes a run of the event loop. Returns the length of a pause before it.
    pub(super) fn run(&mut self, now: Duration) -> Option<Duration> {
        let last = self.last_run.replace(now)?;
        let pause = now.saturating_sub(last);
        (pause >= PAUSE).then(|| {
            self.until = now + ALLOWANCE;
            self.silent.values_mut().for_each(|counts| *counts = self.until);
            pause
        })
    }

    /// Returns whether the loss of a member does not count yet, because this process was away.
    pub(super) fn excuses(&mut self, member: Member) -> bool {
        let excused = self.last_run.is_some_and(|now| now < self.until);
        if excused {
            self.silent.insert(member, self.until);
        }
        excused
    }

    /// Notes that a member is connected.
    pub(super) fn connected(&mut self, member: Member) {
        self.silent.remove(&member);
    }

    /// Takes the members that have had their time and are still silent.
    pub(super) fn take_lost(&mut self) -> Vec<Member> {
        let Some(now) = self.last_run else { return Vec::new() };
        self.silent.extract_if(.., |_, counts| *counts <= now).map(|(member, _)| member).collect()
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Incarnation, PeerId};

    use super::*;

    fn member(number: u8) -> Member {
        Member { peer: PeerId([number; 32]), incarnation: Incarnation(1) }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn members_have_time_to_come_back_after_a_pause_of_this_process() {
        let mut own = OwnPause::default();
        assert_eq!((own.run(at(100)), own.run(at(101))), (None, None));
        assert!(!own.excuses(member(1)), "nothing was the matter here");
        assert_eq!(own.run(at(109)), Some(at(8)));
        assert!(own.excuses(member(1)) && own.excuses(member(2)));
        own.connected(member(1));
        assert!(own.take_lost().is_empty());
        for second in 110..120 {
            assert_eq!(own.run(at(second)), None);
        }
        assert_eq!(own.take_lost(), [member(2)]);
        assert!(own.take_lost().is_empty() && !own.excuses(member(1)));
    }

    #[test]
    fn a_second_pause_gives_the_time_again() {
        let mut own = OwnPause::default();
        own.run(at(0));
        own.run(at(8));
        assert!(own.excuses(member(1)));
        assert_eq!(own.run(at(30)), Some(at(22)));
        assert!(own.take_lost().is_empty());
        own.run(at(31));
        own.run(at(33));
        assert!((34..=40).all(|second| own.run(at(second)).is_none()));
        assert_eq!(own.take_lost(), [member(1)]);
    }

    #[test]
    fn the_clock_moves() {
        assert!(since_boot() > Duration::ZERO);
    }
}
