//! Which piece of a file is asked of whom: pure decisions.
//!
//! Whoever is free takes the next piece, so who is fast brings more of them. When none is left, a piece
//! that another holder has been asked for long is asked a second time, of who would bring it sooner.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::units::Moment;

/// A holder that failed so often without having brought a piece in between is asked no more.
pub(super) const FAILURES: u32 = 16;

/// A piece is asked of a second holder once it has taken so many times as long as that one's take.
const LATE: u32 = 2;

/// What who is free does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Asks for a piece.
    Piece(u64),
    /// Looks again when something has changed, or at a moment, if there is one.
    Wait(Option<Moment>),
    /// Nothing more: everything is here, or the holder is asked no more.
    Over,
}

/// The pieces of one file and those who have it.
#[derive(Debug)]
pub(super) struct Plan {
    todo: BTreeSet<u64>,
    /// Asked for and not here: of whom, since when.
    asked: BTreeMap<u64, BTreeMap<usize, Moment>>,
    /// Not here.
    missing: u64,
    holders: Vec<Holder>,
}

#[derive(Debug, Clone, Default)]
struct Holder {
    failures: u32,
    out: bool,
    /// How long its last piece took.
    took: Option<Duration>,
}

impl Plan {
    /// A plan to bring these pieces.
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

    /// Whether nothing more comes: all is here, or nobody is asked any more.
    pub(super) fn is_over(&self) -> bool {
        self.is_complete() || self.holders.iter().all(|holder| holder.out)
    }

    pub(super) fn next(&mut self, now: Moment, holder: usize) -> Next {
        if self.is_complete() || self.holders[holder].out {
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

    /// A holder brought a piece. Returns whether it was still missing.
    pub(super) fn brought(&mut self, now: Moment, holder: usize, piece: u64) -> bool {
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

    /// Nobody is asked any more.
    pub(super) fn give_up(&mut self) {
        self.holders.iter_mut().for_each(|holder| holder.out = true);
    }

    /// A holder did not bring a piece; `for_good`, since it has none or another, or is gone.
    pub(super) fn failed(&mut self, holder: usize, piece: u64, for_good: bool) {
        let known = &mut self.holders[holder];
        known.failures += 1;
        known.out |= for_good || known.failures >= FAILURES;
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
    fn who_is_free_takes_the_next_piece() {
        let mut plan = Plan::new((0..3).collect(), 2);
        assert_eq!(plan.next(at(0), 0), Next::Piece(0));
        assert_eq!(plan.next(at(0), 1), Next::Piece(1));
        assert!(plan.brought(at(10), 1, 1));
        assert_eq!(plan.next(at(10), 1), Next::Piece(2));
        assert_eq!(plan.next(at(10), 0), Next::Wait(None), "it has brought nothing yet");
        assert!(plan.brought(at(20), 0, 0) && plan.brought(at(20), 1, 2));
        assert!(plan.is_complete());
        assert_eq!(plan.next(at(20), 0), Next::Over);
    }

    #[test]
    fn who_would_be_sooner_is_asked_for_a_late_piece_as_well() {
        let mut plan = Plan::new((0..2).collect(), 2);
        assert_eq!(plan.next(at(0), 0), Next::Piece(0));
        assert_eq!(plan.next(at(0), 1), Next::Piece(1));
        assert!(plan.brought(at(10), 1, 1));
        assert_eq!(plan.next(at(15), 1), Next::Wait(Some(at(20))));
        assert_eq!(plan.next(at(20), 1), Next::Piece(0));
        assert_eq!(plan.next(at(99), 1), Next::Wait(None), "not a third time");
        assert!(plan.brought(at(30), 1, 0));
        assert!(!plan.brought(at(90), 0, 0), "it came before");
        assert!(plan.is_complete());
    }

    #[test]
    fn what_a_holder_does_not_bring_is_asked_of_others() {
        let mut plan = Plan::new((0..1).collect(), 2);
        assert_eq!(plan.next(at(0), 0), Next::Piece(0));
        plan.failed(0, 0, true);
        assert_eq!(plan.next(at(1), 0), Next::Over, "it lies");
        assert!(!plan.is_over(), "there is another");
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
            let (mut here, mut luck) = (BTreeSet::new(), luck.into_iter().cycle());
            for round in 0..10_000u64 {
                for holder in 0..=others {
                    let Next::Piece(piece) = plan.next(at(round), holder) else { continue };
                    prop_assert!(!here.contains(&piece), "what is here is not asked for");
                    let (fails, lies) = luck.next().expect("without end");
                    if fails && holder > 0 {
                        plan.failed(holder, piece, lies);
                    } else {
                        prop_assert!(plan.brought(at(round), holder, piece));
                        here.insert(piece);
                    }
                }
            }
            prop_assert!(plan.is_complete());
            prop_assert_eq!(here, pieces);
        }
    }
}
