//! Splits lists into pages if a single message would exceed its size limit.

use std::collections::BTreeMap;

use shoal_protocol::limits;

/// Maximum number of members in one message or log record. It is small in tests, so that every test
/// swarm exceeds it.
pub(crate) const CHANGED: usize = if cfg!(test) { 3 } else { limits::CHANGED_MEMBERS };

/// Maximum number of pages of a list.
const PARTS: u32 = limits::MEMBERS.div_ceil(CHANGED) as u32;

/// The received pages of the newest list. They may arrive repeatedly, late and in any order.
#[derive(Debug)]
pub(crate) struct Pages<T> {
    number: u64,
    here: BTreeMap<u32, Vec<T>>,
}

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Self { number: 0, here: BTreeMap::new() }
    }
}

impl<T> Pages<T> {
    /// Adds a page. Returns the whole list with the last one.
    pub(crate) fn take(
        &mut self,
        number: u64,
        (part, count): (u32, u32),
        items: Vec<T>,
    ) -> Option<Vec<T>> {
        let fits = part < count && count <= PARTS && items.len() <= CHANGED;
        if number < self.number || !fits {
            return None;
        }
        if number > self.number {
            *self = Self { number, here: BTreeMap::new() };
        }
        self.here.insert(part, items);
        let whole = self.here.len() >= count as usize;
        whole.then(|| std::mem::take(&mut self.here).into_values().flatten().collect())
    }
}

/// Splits a list into pages, each with its index and their number. An empty list is one page.
pub(crate) fn cut<T: Clone>(all: &[T]) -> Vec<((u32, u32), Vec<T>)> {
    let count = all.len().div_ceil(CHANGED).max(1) as u32;
    let mut rest = all.chunks(CHANGED);
    (0..count).map(|part| ((part, count), rest.next().unwrap_or_default().to_vec())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_assembled_from_pages_in_any_order() {
        let all: Vec<usize> = (0..CHANGED * 2 + 1).collect();
        let parts = cut(&all);
        assert_eq!(parts.len(), 3);
        let mut taken = Pages::default();
        for (number, items) in [parts[2].clone(), parts[0].clone(), parts[2].clone()] {
            assert_eq!(taken.take(4, number, items), None);
        }
        assert_eq!(taken.take(3, parts[1].0, parts[1].1.clone()), None, "of an older list");
        assert_eq!(taken.take(4, parts[1].0, parts[1].1.clone()), Some(all));
    }

    #[test]
    fn a_newer_list_replaces_the_pages_and_too_many_are_rejected() {
        let mut taken = Pages::default();
        assert_eq!(taken.take(1, (0, 2), vec![1]), None);
        assert_eq!(taken.take(2, (1, 2), vec![4]), None);
        assert_eq!(taken.take(2, (0, 2), vec![3]), Some(vec![3, 4]));
        for part in [(2, 2), (0, PARTS + 1)] {
            assert_eq!(taken.take(3, part, vec![1]), None);
        }
        assert_eq!(taken.take(3, (0, 1), vec![0; CHANGED + 1]), None);
        assert_eq!(cut::<u8>(&[]), [((0, 1), vec![])]);
    }
}
