//! Assigns the pieces of a file to its holders, as pure decisions.
//!
//! A free holder takes the next piece, so a fast holder gets more of them. When none is left, a
//! piece that was requested long ago from another holder is requested a second time, from a holder
//! that would deliver it earlier.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::units::Moment;

/// A holder is dropped after this many failures without a delivered piece in between.
pub(super) const FAILURES: u32 = 16;

/// A piece is requested from a second holder once it has taken this many times as long as that
/// holder's last piece.
const LATE: u32 = 2;

/// The next action of a free holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Request a piece.
    Piece(u64),
    /// Wait for a change, or until a moment if there is one.
    Wait(Option<Moment>),
    /// Nothing: the file is complete, or the holder is dropped.
    Over,
}

/// The pieces of one file, and its holders.
#[derive(Debug)]
pub(super) struct Plan {
    todo: BTreeSet<u64>,
    /// Requested pieces, each with its holders and times of request.
    asked: BTreeMap<u64, BTreeMap<usize, Moment>>,
    /// Number of missing pieces.
    missing: u64,
    holders: Vec<Holder>,
}

#[derive(Debug, Clone, Default)]
struct Holder {
    failures: u32,
    dropped: bool,
    /// Duration of its last piece.
    took: Option<Duration>,
}

impl Plan {
    /// A plan to fetch these pieces.
    pub(super) fn new(missing: BTreeSet<u64>, holders: usize) -> Self {
        Self {
            asked: BTreeMap::new(),
            missing: missing.len() as u64,
            todo: missing,
            holders: vec![Holder::default(); holders],
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Whether the fetch has ended: the file is complete, or all holders are dropped.
    pub(super) fn is_over(&self) -> bool {
        self.is_complete() || self.holders.iter().all(|holder| holder.dropped)
    }

    pub(super) fn next(&mut self, now: Moment, holder: usize) -> Next {
        if self.is_complete() || self.holders[holder].dropped {
            return Next::Over;
        }
        if let Some(piece) = self.todo.pop_first() {
            self.asked.entry(piece).or_default().insert(holder, now);
            return Next::Piece(piece);
        }
        let Some(took) = self.holders[holder].took else { return Next::Wait(None) };
        let once = self.asked.iter().filter_map(|(piece, by)| match by.first_key_value() {
            Some((other, since)) if by.len() == 1 && *other != holder => {
                Some((*since + took * LATE, *piece))
            }
            _ => None,
        });
        match once.min() {
            Some((late, piece)) if late <= now => {
                self.asked.entry(piece).or_default().insert(holder, now);
                Next::Piece(piece)
            }
            other => Next::Wait(other.map(|(late, _)| late)),
        }
    }

    /// A holder delivered a piece. Returns whether it was still missing.
    pub(super) fn received(&mut self, now: Moment, holder: usize, piece: u64) -> bool {
        let asked = self.asked.remove(&piece);
        let known = &mut self.holders[holder];
        known.failures = 0;
        if let Some(since) = asked.as_ref().and_then(|by| by.get(&holder)) {
            known.took = Some(now.since(*since));
        }
        let new = asked.is_some() || self.todo.remove(&piece);
        self.missing -= u64::from(new);
        new
    }

    /// Drops all holders.
    pub(super) fn abort(&mut self) {
        self.holders.iter_mut().for_each(|holder| holder.dropped = true);
    }

    /// A holder failed to deliver a piece. `permanent` if it has no such piece or a wrong one, or
    /// is unreachable.
    pub(super) fn failed(&mut self, holder: usize, piece: u64, permanent: bool) {
        let known = &mut self.holders[holder];
        known.failures += 1;
        known.dropped |= permanent || known.failures >= FAILURES;
        let Some(by) = self.asked.get_mut(&piece) else { return };
        by.remove(&holder);
        if by.is_empty() {
            self.asked.remove(&piece);
            self.todo.insert(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(milliseconds: u64) -> Moment {
        Moment(Duration::from_millis(milliseconds))
    }

    #[test]
    fn a_free_holder_takes_the_next_piece() {
        let mut plan = Plan::new((0..3).collect(), 2);
        assert_eq!(plan.next(at(0), 0), Next::Piece(0));
        assert_eq!(plan.next(at(0), 1), Next::Piece(1));
        assert!(plan.received(at(10), 1, 1));
        assert_eq!(plan.next(at(10), 1), Next::Piece(2));
        assert_eq!(plan.next(at(10), 0), Next::Wait(None), "its speed is unknown");
        assert!(plan.received(at(20), 0, 0) && plan.received(at(20), 1, 2));
        assert!(plan.is_complete());
        assert_eq!(plan.next(at(20), 0), Next::Over);
    }

    #[test]
    fn a_late_piece_is_requested_from_a_faster_holder_too() {
        let mut plan = Plan::new((0..2).collect(), 2);
        assert_eq!(plan.next(at(0), 0), Next::Piece(0));
        assert_eq!(plan.next(at(0), 1), Next::Piece(1));
        assert!(plan.received(at(10), 1, 1));
        assert_eq!(plan.next(at(15), 1), Next::Wait(Some(at(20))));
        assert_eq!(plan.next(at(20), 1), Next::Piece(0));
        assert_eq!(plan.next(at(99), 1), Next::Wait(None), "not a third time");
        assert!(plan.received(at(30), 1, 0));
        assert!(!plan.received(at(90), 0, 0), "it was delivered before");
        assert!(plan.is_complete());
    }

    #[test]
    fn an_undelivered_piece_is_requested_from_others() {
        let mut plan = Plan::new((0..1).collect(), 2);
        assert_eq!(plan.next(at(0), 0), Next::Piece(0));
        plan.failed(0, 0, true);
        assert_eq!(plan.next(at(1), 0), Next::Over, "it is dropped");
        assert!(!plan.is_over(), "another holder is left");
        for _ in 0..FAILURES {
            assert_eq!(plan.next(at(1), 1), Next::Piece(0));
            plan.failed(1, 0, false);
        }
        assert_eq!(plan.next(at(2), 1), Next::Over);
        assert!(!plan.is_complete());
        assert!(plan.is_over());
    }

    proptest! {
        #[test]
        fn one_honest_holder_is_enough(
            pieces in prop::collection::btree_set(0u64..60, 1..40),
            others in 0usize..4,
            luck in prop::collection::vec((any::<bool>(), any::<bool>()), 1..200),
        ) {
            let mut plan = Plan::new(pieces.clone(), others + 1);
            let (mut delivered, mut luck) = (BTreeSet::new(), luck.into_iter().cycle());
            for round in 0..10_000u64 {
                for holder in 0..=others {
                    let Next::Piece(piece) = plan.next(at(round), holder) else { continue };
                    prop_assert!(!delivered.contains(&piece), "a delivered piece is not requested");
                    let (fails, permanent) = luck.next().expect("without end");
                    if fails && holder > 0 {
                        plan.failed(holder, piece, permanent);
                    } else {
                        prop_assert!(plan.received(at(round), holder, piece));
                        delivered.insert(piece);
                    }
                }
            }
            prop_assert!(plan.is_complete());
            prop_assert_eq!(delivered, pieces);
        }
    }
}
