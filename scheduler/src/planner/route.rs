//! Orders groups of devices as the pipeline's stages.

use std::time::Duration;

/// Maximum number of stages that are ordered. Each more doubles time and memory.
pub const MAX_STAGES: usize = 16;

/// The shortest path that visits every place once, between any two ends: the open-loop travelling
/// salesman problem, solved by the dynamic programme over subsets (Held and Karp 1962).
pub(super) struct ShortestPath {
    places: usize,
    /// Nanoseconds between each two places, as a square matrix; the search spends its time on
    /// reading it.
    distances: Vec<u64>,
    /// At `[subset][last]`: the length of the shortest path through a subset that ends at one of
    /// its places.
    lengths: Vec<u64>,
}

impl ShortestPath {
    /// Solves the problem for `places` places; `between` is symmetric.
    ///
    /// # Panics
    /// If there are no places, more than [`MAX_STAGES`], or times of centuries between them.
    pub(super) fn new(places: usize, between: impl Fn(usize, usize) -> Duration) -> Self {
        assert!((1..=MAX_STAGES).contains(&places), "from one to the maximum number of places");
        let distances: Vec<u64> = (0..places * places)
            .map(|pair| {
                let time = between(pair / places, pair % places).as_nanos();
                assert!(time <= u128::from(u64::MAX / 64), "times are capped");
                time as u64
            })
            .collect();
        let all = (1usize << places) - 1;
        let mut lengths = vec![u64::MAX / 2; (all + 1) * places];
        for place in 0..places {
            lengths[(1 << place) * places + place] = 0;
        }
        for subset in 1..all {
            for last in ones(subset) {
                let so_far = lengths[subset * places + last];
                let onward = &distances[last * places..][..places];
                for next in ones(all & !subset) {
                    let longer = &mut lengths[(subset | 1 << next) * places + next];
                    *longer = (*longer).min(so_far + onward[next]);
                }
            }
        }
        Self { places, distances, lengths }
    }

    /// The length of the shortest path through all places.
    pub(super) fn length(&self) -> Duration {
        let through_all = &self.lengths[self.lengths.len() - self.places..];
        Duration::from_nanos(through_all.iter().copied().min().expect("at least one place"))
    }

    /// The places in the order of the shortest path; the choice among equally short ones is
    /// deterministic.
    pub(super) fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = Vec::with_capacity(self.places);
        let mut subset = (1usize << self.places) - 1;
        while subset > 0 {
            let through = |last: &usize| {
                let on = order.last().map_or(0, |next| self.distances[last * self.places + next]);
                self.lengths[subset * self.places + last] + on
            };
            let last = ones(subset).min_by_key(through).expect("a path has a last place");
            order.push(last);
            subset &= !(1 << last);
        }
        order.reverse();
        order
    }
}

/// A lower bound of the shortest path: the length of the minimum spanning tree (Prim 1957), which
/// is fast to compute.
pub(super) fn at_least(places: usize, between: impl Fn(usize, usize) -> Duration) -> Duration {
    let mut near = vec![Duration::MAX; places];
    let mut left: Vec<usize> = (1..places).collect();
    let (mut joined, mut total) = (0, Duration::ZERO);
    while !left.is_empty() {
        for place in &left {
            near[*place] = near[*place].min(between(joined, *place));
        }
        let next = (0..left.len()).min_by_key(|index| near[left[*index]]).expect("places are left");
        joined = left.swap_remove(next);
        total += near[joined];
    }
    total
}

/// The positions of ones, lowest first.
fn ones(mut bits: usize) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (bits != 0).then(|| bits.trailing_zeros() as usize);
        bits &= bits.wrapping_sub(1);
        lowest
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The shortest continuation of a path, by exhaustive search.
    fn exhaustive(distances: &[Vec<u64>], last: Option<usize>, left: &mut Vec<usize>) -> u64 {
        let mut best = if left.is_empty() { 0 } else { u64::MAX };
        for index in 0..left.len() {
            let next = left.remove(index);
            let step = last.map_or(0, |last| distances[last.min(next)][last.max(next)]);
            best = best.min(step + exhaustive(distances, Some(next), left));
            left.insert(index, next);
        }
        best
    }

    proptest! {
        #[test]
        fn no_path_is_shorter(
            distances in (1usize..7).prop_flat_map(|places| {
                prop::collection::vec(prop::collection::vec(0u64..50, places), places)
            }),
        ) {
            let places = distances.len();
            let between = |a: usize, b: usize| Duration::from_nanos(distances[a.min(b)][a.max(b)]);
            let path = ShortestPath::new(places, between);
            let (total, order) = (path.length(), path.order());
            let best = exhaustive(&distances, None, &mut (0..places).collect());
            prop_assert_eq!(total, Duration::from_nanos(best));
            prop_assert!(at_least(places, between) <= total);
            let walked: Duration = order.windows(2).map(|pair| between(pair[0], pair[1])).sum();
            prop_assert_eq!(walked, total);
            let mut all = order;
            all.sort_unstable();
            prop_assert_eq!(all, (0..places).collect::<Vec<_>>());
        }
    }
}
