//! Who keeps the run's log.

use std::collections::BTreeSet;

use shoal_protocol::ids::PeerId;

/// Anchors that keep the log together, at most: with five, two may be gone.
const MOST: usize = 5;

/// Who is to keep the log, where `voters` do and the members `able` would. An even number bears no
/// more deaths than the odd one below it, so there are one, three or five. Whoever is gone stays
/// counted until another takes its place: a majority of what is left would be no majority.
pub(crate) fn desired(voters: &BTreeSet<PeerId>, able: &BTreeSet<PeerId>) -> BTreeSet<PeerId> {
    let odd = able.len().min(MOST).saturating_sub(1) / 2 * 2 + 1;
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
    fn who_is_gone_is_counted_until_another_takes_its_place() {
        assert_eq!(desired(&peers(&[1, 2, 3]), &peers(&[1, 2])), peers(&[1, 2, 3]));
        assert_eq!(desired(&peers(&[1, 2, 3]), &peers(&[1, 2, 9])), peers(&[1, 2, 9]));
        assert_eq!(desired(&peers(&[1, 2, 3]), &peers(&[1])), peers(&[1, 2, 3]));
    }
}
