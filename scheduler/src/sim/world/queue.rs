//! The clock of a run, the ordered queue of its events, and the source of its random decisions.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::units::Moment;

use super::event::Event;
use crate::rng::Rng;

/// The scheduled events and the time of the last one that was removed.
#[derive(Debug)]
pub(super) struct EventQueue {
    now: Moment,
    /// Ordered by time, then by the order of their creation.
    events: BTreeMap<(Moment, u64), Box<Event>>,
    sequence: u64,
    pub(super) rng: Rng,
}

impl EventQueue {
    pub(super) fn new(seed: u64) -> Self {
        let rng = Rng::new(seed ^ 0x776f_726c_6400_0000);
        Self { now: Moment::default(), events: BTreeMap::new(), sequence: 0, rng }
    }

    pub(super) fn now(&self) -> Moment {
        self.now
    }

    /// Schedules an event at a moment.
    pub(super) fn at(&mut self, moment: Moment, event: Event) {
        self.events.insert((moment, self.sequence), Box::new(event));
        self.sequence += 1;
    }

    /// Schedules an event after a delay.
    pub(super) fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    /// Schedules an event after a random delay of at most `most`.
    pub(super) fn within(&mut self, most: Duration, event: Event) {
        let at = self.random_moment(most);
        self.at(at, event);
    }

    /// A random moment at most `most` from now.
    pub(super) fn random_moment(&mut self, most: Duration) -> Moment {
        self.now + self.rng.up_to(most)
    }

    /// Removes the next event and sets the clock to its time.
    pub(super) fn pop(&mut self) -> Option<Event> {
        let ((at, _), event) = self.events.pop_first()?;
        assert!(at >= self.now, "time does not go back");
        self.now = at;
        Some(*event)
    }
}
