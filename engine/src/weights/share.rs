//! The division of a stage's weights among the devices of an island.

use std::ops::Range;

use crate::device::exchange::Seat;
use crate::model::parameters::{Parameter, range_of};

/// One of several about equal parts of each stage's weights. Whole tensors, because the updates of some rules
/// read all elements of one.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    index: usize,
    count: usize,
    /// The device's place among those that compute the slices of each pass together.
    seat: Option<Seat>,
    /// Whether the device has sums and weights of its own.
    is_apart: bool,
}

impl Share {
    /// All weights.
    pub(crate) const WHOLE: Self = Self { index: 0, count: 1, seat: None, is_apart: true };

    /// All shares of so many devices, in order. Devices that are not apart have the weights of the first, and get
    /// accumulators.
    pub(crate) fn all(count: usize, is_apart: bool) -> impl Iterator<Item = Self> {
        (0..count).map(move |index| Self { index, count, seat: None, is_apart })
    }

    /// The shares of devices that compute slices of passes together, in one group or several, each with seats of its own:
    /// all divide the weights.
    pub(crate) fn all_together(seats: Vec<Seat>) -> impl Iterator<Item = Self> {
        let all = Self::all(seats.len(), true);
        all.zip(seats).map(|(share, seat)| Self { seat: Some(seat), ..share })
    }

    /// The same, but each group divides all weights.
    pub(crate) fn all_by_group(seats: Vec<Seat>) -> impl Iterator<Item = Self> {
        seats.into_iter().map(|seat| {
            let (index, count) = (seat.index(), seat.count());
            Self { index, count, seat: Some(seat), is_apart: true }
        })
    }

    /// The device's place among those that compute passes together; `None` if it computes its own.
    pub(crate) fn seat(&self) -> Option<&Seat> {
        self.seat.as_ref()
    }

    /// The number of devices that compute each of the device's passes.
    pub(crate) fn devices_of_pass(&self) -> usize {
        self.seat.as_ref().map_or(1, Seat::count)
    }

    /// The number of devices among which weights are divided.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Whether it is all weights.
    pub(crate) fn is_whole(&self) -> bool {
        self.count == 1
    }

    /// Whether the device has weights of its own, and accumulators that it makes itself.
    pub(crate) fn is_apart(&self) -> bool {
        self.is_apart
    }

    /// The elements of the flat vector that are in each device's share, in order.
    pub(crate) fn elements_of_all(&self, parameters: &[Parameter]) -> Vec<Range<usize>> {
        let share = |index| Self { index, ..self.clone() }.of(parameters);
        (0..self.count).map(|index| range_of(&parameters[share(index)])).collect()
    }

    /// The range of these parameters that is in the share.
    pub(crate) fn of(&self, parameters: &[Parameter]) -> Range<usize> {
        let elements = parameters.last().map_or(0, |last| last.range().end);
        // The number of parameters of which more than half lies before a cut.
        let cut = |index: usize| {
            let at = 2 * elements * index / self.count;
            parameters.partition_point(|one| one.offset + one.range().end <= at)
        };
        cut(self.index)..if self.index + 1 == self.count {
            parameters.len()
        } else {
            cut(self.index + 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters(lengths: &[usize]) -> Vec<Parameter> {
        let mut offset = 0;
        let parameter = |length: &usize| {
            let parameter = Parameter { name: offset.to_string(), shape: vec![*length], offset };
            offset += length;
            parameter
        };
        lengths.iter().map(parameter).collect()
    }

    #[test]
    fn equal_tensors_are_dealt_out_equally() {
        let eight = parameters(&[5; 8]);
        let shares: Vec<_> = Share::all(4, true).map(|share| share.of(&eight)).collect();
        assert_eq!(shares, [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(Share::WHOLE.of(&eight), 0..8);
    }

    proptest! {
        #[test]
        fn each_parameter_is_in_one_share(
            lengths in prop::collection::vec(1usize..1000, 0..20),
            count in 1usize..9,
        ) {
            let parameters = parameters(&lengths);
            let mut next = 0;
            for share in Share::all(count, true) {
                let range = share.of(&parameters);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end >= range.start);
                next = range.end;
            }
            prop_assert_eq!(next, parameters.len());
        }
    }
}
