//! Pairs the devices of neighbouring stages.

use std::time::Duration;

/// Pairs every row of a square matrix with a column of its own so that the largest paired entry is
/// minimal (bottleneck assignment: Fulkerson, Glicksberg and Gross 1953). Returns that entry (zero
/// for an empty matrix) and each row's column.
///
/// Entries are allowed in ascending order; at each one the pairs so far are kept and augmented.
pub(super) fn bottleneck(
    side: usize,
    entry: impl Fn(usize, usize) -> Duration,
) -> (Duration, Vec<usize>) {
    let mut entries = Vec::with_capacity(side * side);
    for row in 0..side {
        entries.extend((0..side).map(|column| entry(row, column)));
    }
    let mut pairs =
        Pairs { side, entries: &entries, row_of: vec![None; side], seen: vec![false; side] };
    let mut limit = pairs.at_least();
    for row in 0..side {
        pairs.seen.fill(false);
        while !pairs.augment(row, limit) {
            limit = pairs.next(limit);
            pairs.seen.fill(false);
        }
    }
    let mut columns = vec![0; side];
    for (column, row) in pairs.row_of.iter().enumerate() {
        columns[row.expect("every row is paired, and so every column")] = column;
    }
    (limit, columns)
}

struct Pairs<'a> {
    side: usize,
    entries: &'a [Duration],
    row_of: Vec<Option<usize>>,
    /// Columns visited by this search.
    seen: Vec<bool>,
}

impl Pairs<'_> {
    /// A lower bound: every row and every column needs at least its smallest entry.
    fn at_least(&self) -> Duration {
        let mut columns = vec![Duration::MAX; self.side];
        let mut needed = Duration::ZERO;
        for row in self.entries.chunks(self.side.max(1)) {
            needed = needed.max(row.iter().copied().min().unwrap_or_default());
            for (least, entry) in columns.iter_mut().zip(row) {
                *least = (*least).min(*entry);
            }
        }
        columns.into_iter().fold(needed, Duration::max)
    }

    /// The smallest entry above a limit.
    fn next(&self, limit: Duration) -> Duration {
        let above = self.entries.iter().filter(|entry| **entry > limit);
        *above.min().expect("with all entries allowed every row has a column")
    }

    /// Finds a column for a row, reassigning other rows if needed (Kuhn 1955).
    fn augment(&mut self, row: usize, limit: Duration) -> bool {
        let entries = self.entries;
        let own = &entries[row * self.side..][..self.side];
        for (column, entry) in own.iter().enumerate() {
            if *entry > limit || self.seen[column] {
                continue;
            }
            self.seen[column] = true;
            if self.row_of[column].is_none_or(|other| self.augment(other, limit)) {
                self.row_of[column] = Some(row);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The minimal largest entry over all pairings, by exhaustive search.
    fn exhaustive(entries: &[Vec<u64>], row: usize, taken: &mut Vec<bool>) -> u64 {
        if row == entries.len() {
            return 0;
        }
        let mut best = u64::MAX;
        for column in 0..entries.len() {
            if !taken[column] {
                taken[column] = true;
                let rest = exhaustive(entries, row + 1, taken);
                best = best.min(rest.max(entries[row][column]));
                taken[column] = false;
            }
        }
        best
    }

    proptest! {
        #[test]
        fn no_pairing_has_a_smaller_largest_entry(
            entries in (0usize..7).prop_flat_map(|side| {
                prop::collection::vec(prop::collection::vec(0u64..12, side), side)
            }),
        ) {
            let side = entries.len();
            let (worst, columns) =
                bottleneck(side, |row, column| Duration::from_nanos(entries[row][column]));
            let best = exhaustive(&entries, 0, &mut vec![false; side]);
            prop_assert_eq!(worst, Duration::from_nanos(best));
            let paired = (0..side).map(|row| entries[row][columns[row]]).max().unwrap_or(0);
            prop_assert_eq!(paired, best);
            let mut all = columns;
            all.sort_unstable();
            prop_assert_eq!(all, (0..side).collect::<Vec<_>>());
        }
    }
}
