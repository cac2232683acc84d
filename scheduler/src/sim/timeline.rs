//! Activity of a run over time.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::units::{Bytes, Moment};

use super::watch::{Seen, Sort, Watch};
use crate::action::CoordinatorEvent;

/// Maximum number of intervals: beyond that every two are merged.
const PARTS: usize = 512;

/// Activity of a run over time, collected by an observer.
#[derive(Debug)]
pub struct Timeline {
    /// The length of an interval.
    pub width: Duration,
    /// The intervals, in order.
    pub parts: Vec<Part>,
    alive: usize,
    /// Accepted microbatches and waiting offers of each peer.
    loads: BTreeMap<usize, (usize, usize)>,
    taken: usize,
    waiting: usize,
    now: Moment,
}

/// Activity in one interval.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Part {
    /// Microbatches completed: counted at the first stage.
    pub microbatches: u64,
    /// Steps committed.
    pub commits: u64,
    /// Total time that peers were alive, and that their engines ran passes.
    pub alive: Duration,
    /// See `alive`.
    pub busy: Duration,
    /// Accepted microbatches and waiting offers, each times its duration.
    pub taken: Duration,
    /// See `taken`.
    pub waiting: Duration,
    /// Newcomers, stage changes because of slow stages, deaths and returns to a checkpoint.
    pub admitted: u64,
    /// See `admitted`.
    pub moved: u64,
    /// See `admitted`.
    pub died: u64,
    /// See `admitted`.
    pub rewinds: u64,
    /// Bytes sent, by kind.
    pub bytes: BTreeMap<Sort, Bytes>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self {
            width: Duration::from_secs(1),
            parts: Vec::new(),
            alive: 0,
            loads: BTreeMap::new(),
            taken: 0,
            waiting: 0,
            now: Moment::default(),
        }
    }
}

impl Timeline {
    /// The interval that contains a moment.
    fn part(&mut self, at: Moment) -> &mut Part {
        while at.0.as_nanos() / self.width.as_nanos() >= PARTS as u128 {
            let merged = self.parts.chunks(2).map(|two| {
                let mut part = two[0].clone();
                two[1..].iter().for_each(|other| part.add(other));
                part
            });
            self.parts = merged.collect();
            self.width *= 2;
        }
        let index = (at.0.as_nanos() / self.width.as_nanos()) as usize;
        if self.parts.len() <= index {
            self.parts.resize_with(index + 1, Part::default);
        }
        &mut self.parts[index]
    }

    /// Distributes a duration over the intervals that it covers.
    fn last(&mut self, from: Moment, to: Moment, add: impl Fn(&mut Part, Duration)) {
        self.part(to);
        let mut from = from;
        while from < to {
            let width = self.width.as_nanos();
            let next = (from.0.as_nanos() / width + 1) * width;
            let next = Duration::from_nanos(u64::try_from(next).unwrap_or(u64::MAX));
            let until = Moment(next).min(to);
            add(self.part(from), until.since(from));
            from = until;
        }
    }

    /// Advances the time to `now`, with no change before it.
    fn passes(&mut self, now: Moment) {
        let from = std::mem::replace(&mut self.now, now);
        if from < now {
            let times =
                |count: usize, time: Duration| time * u32::try_from(count).unwrap_or(u32::MAX);
            let (alive, taken, waiting) = (self.alive, self.taken, self.waiting);
            self.last(from, now, |part, time| {
                part.alive += times(alive, time);
                part.taken += times(taken, time);
                part.waiting += times(waiting, time);
            });
        }
    }

    fn holds(&mut self, peer: usize, load: (usize, usize)) {
        let (taken, waiting) = self.loads.insert(peer, load).unwrap_or_default();
        self.taken = self.taken + load.0 - taken;
        self.waiting = self.waiting + load.1 - waiting;
    }
}

impl Part {
    fn add(&mut self, other: &Self) {
        self.microbatches += other.microbatches;
        self.commits += other.commits;
        self.alive += other.alive;
        self.busy += other.busy;
        self.taken += other.taken;
        self.waiting += other.waiting;
        self.admitted += other.admitted;
        self.moved += other.moved;
        self.died += other.died;
        self.rewinds += other.rewinds;
        for (sort, bytes) in &other.bytes {
            *self.bytes.entry(*sort).or_default() += *bytes;
        }
    }
}

impl Watch for Timeline {
    fn sees(&mut self, now: Moment, seen: Seen<'_>) {
        self.passes(now);
        match seen {
            Seen::Born { .. } => self.alive += 1,
            Seen::Died { peer } => {
                self.alive = self.alive.saturating_sub(1);
                self.holds(peer, (0, 0));
                self.part(now).died += 1;
            }
            Seen::Ran { until, .. } => self.last(now, until, |part, time| part.busy += time),
            Seen::Counted { key, .. } if key.stage == Stage(0) => self.part(now).microbatches += 1,
            Seen::Counted { .. } => {}
            Seen::Holds { peer, load } => {
                let load = (load.accepted.values().sum(), load.waiting.values().sum());
                self.holds(peer, load);
            }
            Seen::Sent { from, to, sort, size } if from != to => {
                *self.part(now).bytes.entry(sort).or_default() += size;
            }
            Seen::Sent { .. } | Seen::Logged(_) | Seen::Decides { .. } | Seen::Goes { .. } => {}
            Seen::Decided(event) => match event {
                CoordinatorEvent::Admitted { .. } => self.part(now).admitted += 1,
                CoordinatorEvent::Moves { .. } => self.part(now).moved += 1,
                CoordinatorEvent::Committed { .. } => self.part(now).commits += 1,
                CoordinatorEvent::Rewound { .. } => self.part(now).rewinds += 1,
                _ => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_protocol::ids::{ClaimKey, Microbatch, Step};

    use super::*;

    fn at(seconds: f64) -> Moment {
        Moment(Duration::from_secs_f64(seconds))
    }

    const KEY: ClaimKey = ClaimKey { step: Step(0), stage: Stage(0), microbatch: Microbatch(0) };

    #[test]
    fn a_duration_counts_in_every_interval_that_it_covers() {
        let mut timeline = Timeline::default();
        timeline.sees(at(0.0), Seen::Born { peer: 0 });
        timeline.sees(at(0.5), Seen::Ran { peer: 0, key: KEY, until: at(2.25) });
        timeline.sees(at(2.25), Seen::Counted { peer: 0, key: KEY });
        let busy: Vec<u128> = timeline.parts.iter().map(|part| part.busy.as_millis()).collect();
        assert_eq!(busy, [500, 1000, 250]);
        let alive: Vec<u128> = timeline.parts.iter().map(|part| part.alive.as_millis()).collect();
        assert_eq!(alive, [1000, 1000, 250]);
        assert_eq!(timeline.parts[2].microbatches, 1);
    }

    proptest! {
        /// However long a run is, there are few intervals and none of its activity is lost.
        #[test]
        fn intervals_are_few_and_hold_everything(steps in prop::collection::vec(0u32..100_000, 1..60)) {
            let mut timeline = Timeline::default();
            let mut now = Moment::default();
            let mut busy = Duration::ZERO;
            for step in &steps {
                let time = Duration::from_millis(u64::from(*step));
                timeline.sees(now, Seen::Ran { peer: 0, key: KEY, until: now + time });
                timeline.sees(now, Seen::Counted { peer: 0, key: KEY });
                busy += time;
                now = now + time;
            }
            prop_assert!(timeline.parts.len() <= PARTS);
            prop_assert_eq!(timeline.parts.iter().map(|part| part.busy).sum::<Duration>(), busy);
            let count: u64 = timeline.parts.iter().map(|part| part.microbatches).sum();
            prop_assert_eq!(count, steps.len() as u64);
        }
    }
}
