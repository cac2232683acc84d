//! Real traces of the number of live instances in spot fleets, replayed by simulated peers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::scenario::Fault;
use crate::rng::Rng;

/// Maximum number of rows of a trace, and of simultaneous instances: far more than real ones have.
const ROWS: usize = 1 << 16;
const INSTANCES: u32 = 1 << 12;

/// Maximum duration of a trace, in seconds.
const LONGEST: f64 = 366.0 * 24.0 * 3600.0;

/// An invalid trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpotError {
    /// Too many rows.
    #[error("a trace has at most {ROWS} rows: cut it")]
    TooLong,
    /// A row has neither two nor three columns.
    #[error("row {0} is neither `time,count` nor `milliseconds,add|remove,node`")]
    Row(usize),
    /// A time is invalid or before the row above.
    #[error(
        "the time of row {0} is no number of at most a year, or is before that of the row above"
    )]
    Time(usize),
    /// Too many instances at once.
    #[error("row {0} has more than {INSTANCES} instances at once")]
    Instances(usize),
    /// A live node is added, or an absent one removed.
    #[error("row {0} adds a node that is present, or removes one that is absent")]
    Node(usize),
}

/// The unit of the times of a trace that counts instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpotUnit {
    /// The usual unit.
    #[default]
    Seconds,
    /// Hours, with a decimal point.
    Hours,
}

/// Live instances over time: changes in order, beginning with the first instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpotTrace {
    changes: Vec<(Duration, Change)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// The number of live instances from here on.
    Count(u32),
    Add(u32),
    Remove(u32),
}

impl SpotTrace {
    /// Parses a trace. It has rows of `time,count`, a step function with two rows at each change,
    /// before and after; or rows of `milliseconds,add|remove,node`.
    ///
    /// # Errors
    /// If it is neither, or a limit is exceeded.
    pub fn parse(text: &str, unit: SpotUnit) -> Result<Self, SpotError> {
        let mut changes: Vec<(Duration, Change)> = Vec::new();
        let mut names: BTreeMap<&str, u32> = BTreeMap::new();
        let mut alive = BTreeSet::new();
        for (row, line) in (1..).zip(text.lines().filter(|line| !line.trim().is_empty())) {
            if row > ROWS {
                return Err(SpotError::TooLong);
            }
            let columns: Vec<&str> = line.splitn(4, ',').map(str::trim).collect();
            let (unit, change) = match columns[..] {
                [_, count] => {
                    let count: u32 = count.parse().map_err(|_| SpotError::Row(row))?;
                    if count > INSTANCES {
                        return Err(SpotError::Instances(row));
                    }
                    let seconds = if unit == SpotUnit::Hours { 3600.0 } else { 1.0 };
                    (seconds, Change::Count(count))
                }
                [_, "add", node] => {
                    let next = names.len() as u32;
                    let node = *names.entry(node).or_insert(next);
                    if !alive.insert(node) {
                        return Err(SpotError::Node(row));
                    }
                    (1e-3, Change::Add(node))
                }
                [_, "remove", node] => {
                    let known = names.get(node).copied().filter(|node| alive.remove(node));
                    (1e-3, Change::Remove(known.ok_or(SpotError::Node(row))?))
                }
                _ => return Err(SpotError::Row(row)),
            };
            if alive.len() > INSTANCES as usize {
                return Err(SpotError::Instances(row));
            }
            let time: f64 = columns[0].parse().map_err(|_| SpotError::Time(row))?;
            let seconds = time * unit;
            if !(0.0..=LONGEST).contains(&seconds) {
                return Err(SpotError::Time(row));
            }
            let at = Duration::from_secs_f64(seconds);
            match changes.last_mut() {
                Some((last, _)) if *last > at => return Err(SpotError::Time(row)),
                // The later of two counts at one time is valid from there on.
                Some((last, before @ Change::Count(_)))
                    if *last == at && matches!(change, Change::Count(_)) =>
                {
                    *before = change;
                }
                _ => changes.push((at, change)),
            }
        }
        Ok(Self { changes })
    }

    /// The end of the trace.
    #[must_use]
    pub fn end(&self) -> Duration {
        self.changes.last().map_or(Duration::ZERO, |(at, _)| *at)
    }

    /// The joins and departures of peers that follow the trace, `faster` times as fast. Returns the
    /// number of peers needed, and the faults, with the first peer at index `first`. If the trace
    /// only counts, the departing peers are random. A joining peer is one that is down, with an
    /// empty disk.
    #[must_use]
    pub fn fates(&self, first: usize, faster: f64, seed: u64) -> (usize, Vec<(Duration, Fault)>) {
        let mut rng = Rng::new(seed ^ 0x7370_6f74_0000_0000);
        let mut alive: BTreeSet<usize> = BTreeSet::new();
        let mut places: BTreeMap<u32, usize> = BTreeMap::new();
        let (mut most, mut fates) = (0, Vec::new());
        for (at, change) in &self.changes {
            let at = at.div_f64(faster);
            let mut joins = |alive: &mut BTreeSet<usize>| {
                let place =
                    (0..).find(|place| !alive.contains(place)).expect("indices are unlimited");
                alive.insert(place);
                most = most.max(place + 1);
                fates.push((at, Fault::Join { peer: first + place }));
                place
            };
            match change {
                Change::Count(count) => {
                    while alive.len() < *count as usize {
                        joins(&mut alive);
                    }
                }
                Change::Add(node) => {
                    let place = joins(&mut alive);
                    places.insert(*node, place);
                }
                Change::Remove(_) => {}
            }
            let left = match change {
                Change::Count(count) => *count as usize,
                Change::Add(_) | Change::Remove(_) => alive.len(),
            };
            while alive.len() > left {
                let among: Vec<usize> = alive.iter().copied().collect();
                let place = rng.pick(&among);
                alive.remove(&place);
                fates.push((at, Fault::Leave { peer: first + place }));
            }
            if let Change::Remove(node) = change {
                let place = places.remove(node).expect("a removed node was added");
                alive.remove(&place);
                fates.push((at, Fault::Leave { peer: first + place }));
            }
        }
        (most, fates)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    #[test]
    fn a_count_is_valid_from_its_time_on() {
        let trace = SpotTrace::parse("0,0\n30,0\n30,2\n50,2\n50,1\n", SpotUnit::Seconds);
        let trace = trace.expect("a trace");
        let (most, fates) = trace.fates(1, 2.0, 7);
        assert_eq!(most, 2);
        assert_eq!(fates[..2], [1, 2].map(|peer| (seconds(15), Fault::Join { peer })));
        assert!(matches!(fates[2], (at, Fault::Leave { .. }) if at == seconds(25)), "{fates:?}");
        assert_eq!(trace.end(), seconds(50));
        let hours = SpotTrace::parse("0.5,3\n", SpotUnit::Hours).expect("a trace");
        assert_eq!(hours.end(), seconds(1800));
    }

    #[test]
    fn events_name_joining_and_leaving_nodes() {
        let text = "1000,add,a\n1000,add,b\n2000,remove,a\n3000,add,c\n";
        let trace = SpotTrace::parse(text, SpotUnit::Seconds).expect("a trace");
        let (most, fates) = trace.fates(0, 1.0, 0);
        assert_eq!(most, 2);
        let at = [1, 1, 2, 3].map(seconds);
        let what = [Fault::Join { peer: 0 }, Fault::Join { peer: 1 }];
        let then = [Fault::Leave { peer: 0 }, Fault::Join { peer: 0 }];
        let all: Vec<_> = at.into_iter().zip(what.into_iter().chain(then)).collect();
        assert_eq!(fates, all);
    }

    #[test]
    fn an_invalid_trace_is_refused_with_its_row() {
        for (text, error) in [
            ("5,1\n4,1", SpotError::Time(2)),
            ("nan,1", SpotError::Time(1)),
            ("1e300,1", SpotError::Time(1)),
            ("1,-1", SpotError::Row(1)),
            ("1,5000", SpotError::Instances(1)),
            ("1,add", SpotError::Row(1)),
            ("1,add,a\n2,add,a", SpotError::Node(2)),
            ("1,remove,a", SpotError::Node(1)),
            ("1,2,3,4,5", SpotError::Row(1)),
        ] {
            assert_eq!(SpotTrace::parse(text, SpotUnit::Seconds), Err(error), "{text}");
        }
    }

    #[test]
    fn real_traces_are_read() {
        for (text, unit, most) in [
            (
                include_str!("../../../tests/data/spot-traces/aws-g4dn-us-east-1c.csv"),
                SpotUnit::Seconds,
                64,
            ),
            (include_str!("../../../tests/data/spot-traces/aws-p2.csv"), SpotUnit::Hours, 64),
            (
                include_str!("../../../tests/data/spot-traces/g4dn-events.csv"),
                SpotUnit::Seconds,
                64,
            ),
        ] {
            let trace = SpotTrace::parse(text, unit).expect("a trace");
            let (peers, fates) = trace.fates(0, 1.0, 1);
            assert!((8..=most).contains(&peers) && fates.len() > 100, "{peers} {}", fates.len());
            assert!(trace.end() > Duration::from_secs(3600));
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9a-d,.\\-\n]{0,200}", hours: bool) {
            let unit = if hours { SpotUnit::Hours } else { SpotUnit::Seconds };
            if let Ok(trace) = SpotTrace::parse(&text, unit) {
                let (most, fates) = trace.fates(0, 3.0, 1);
                prop_assert!(most <= fates.len());
            }
        }

        /// At every moment the number of live peers is the trace's.
        #[test]
        fn counts_are_kept(counts in prop::collection::vec(0u32..40, 1..30), seed: u64) {
            let rows: Vec<String> =
                counts.iter().enumerate().map(|(at, count)| format!("{at},{count}")).collect();
            let trace = SpotTrace::parse(&rows.join("\n"), SpotUnit::Seconds).expect("a trace");
            let (most, fates) = trace.fates(0, 1.0, seed);
            prop_assert_eq!(most as u32, counts.iter().copied().max().unwrap_or(0));
            let mut alive = BTreeSet::new();
            let mut fates = fates.into_iter().peekable();
            for (at, count) in counts.iter().enumerate() {
                while let Some((_, fate)) = fates.next_if(|(when, _)| *when <= seconds(at as u64)) {
                    let changed = match fate {
                        Fault::Join { peer } => alive.insert(peer),
                        Fault::Leave { peer } => alive.remove(&peer),
                        _ => false,
                    };
                    prop_assert!(changed);
                }
                prop_assert_eq!(alive.len(), *count as usize);
            }
        }
    }
}
