//! Chooses the anchors that replicate the run's log.

use std::collections::BTreeSet;

use shoal_protocol::ids::PeerId;

/// Maximum number of anchors: with five, two may fail.
const MOST: usize = 5;

/// The number of anchors that may die before the run pauses, of a number of members that can be anchors.
#[must_use]
pub fn spare(able: usize) -> usize {
    able.min(MOST).saturating_sub(1) / 2
}

/// The desired anchors, given the present ones (`voters`) and the members that can be anchors
/// (`able`). An even number tolerates no more failures than the odd one below it, so there are one,
/// three or five. A lost anchor remains until another replaces it: a majority of the remaining ones
/// alone would not be a majority.
pub(crate) fn desired(voters: &BTreeSet<PeerId>, able: &BTreeSet<PeerId>) -> BTreeSet<PeerId> {
    let odd = spare(able.len()) * 2 + 1;
    let target = odd.max(voters.len());
    let live = voters.intersection(able);
    let spare = able.difference(voters);
    let gone = voters.difference(able);
    live.chain(spare).chain(gone).take(target).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(numbers: &[u8]) -> BTreeSet<PeerId> {
        numbers.iter().map(|number| PeerId([*number; 32])).collect()
    }

    #[test]
    fn there_are_one_three_or_five() {
        let sizes = |able: &[u8]| desired(&peers(&[1]), &peers(able)).len();
        assert_eq!(sizes(&[1]), 1);
        assert_eq!(sizes(&[1, 2]), 1);
        assert_eq!(sizes(&[1, 2, 3]), 3);
        assert_eq!(sizes(&[1, 2, 3, 4]), 3);
        assert_eq!(sizes(&[1, 2, 3, 4, 5, 6, 7]), 5);
    }

    #[test]
    fn a_lost_anchor_counts_until_it_is_replaced() {
        assert_eq!(desired(&peers(&[1, 2, 3]), &peers(&[1, 2])), peers(&[1, 2, 3]));
        assert_eq!(desired(&peers(&[1, 2, 3]), &peers(&[1, 2, 9])), peers(&[1, 2, 9]));
        assert_eq!(desired(&peers(&[1, 2, 3]), &peers(&[1])), peers(&[1, 2, 3]));
    }
}
