//! The slices of a layer's matrices that a device computes.

use std::ops::Range;

use shoal_protocol::manifest::Model;
use tch::Tensor;

use crate::device::exchange::{Seat, all_parts, fan_out, sum_in_order};
use crate::error::Result;

/// The slices that a device computes.
#[derive(Debug, Clone)]
pub(crate) struct OwnSlices {
    /// The numbers of the slices.
    range: Range<usize>,
    /// The number of all slices.
    of: usize,
    /// The device's place among those that compute the others.
    seat: Option<Seat>,
}

impl OwnSlices {
    /// All slices of a model or, with a seat, those of one device. Seats divide slices.
    pub(crate) fn new(model: &Model, seat: Option<&Seat>) -> Self {
        let (index, count) = seat.map_or((0, 1), |seat| (seat.index(), seat.count()));
        let of = usize::from(model.slices);
        let each = of / count;
        Self { range: index * each..(index + 1) * each, of, seat: seat.cloned() }
    }

    /// The device's place among those that compute the others.
    pub(crate) fn seat(&self) -> Option<&Seat> {
        self.seat.as_ref()
    }

    /// Whether there are several slices, on this device and others.
    pub(crate) fn are_several(&self) -> bool {
        self.of > 1
    }

    /// The numbers of the slices.
    pub(crate) fn numbers(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Whether this device counts the gradients of weights that all devices compute with.
    pub(crate) fn counts_shared(&self) -> bool {
        self.range.start == 0
    }

    /// Whether the gradients of this device are those of all weights.
    pub(crate) fn are_all(&self) -> bool {
        self.seat.is_none()
    }

    /// An alias of `x` for each of these slices, whose gradients are added in the order of slices.
    pub(crate) fn fan_out(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        fan_out(x, self.range.len(), self.seat.as_ref())
    }

    /// The parts of all slices, in order.
    pub(crate) fn all_parts(&self, parts: &[Tensor]) -> Result<Vec<Tensor>> {
        all_parts(parts, self.of, self.seat.as_ref())
    }

    /// The sum of one part of each device.
    pub(crate) fn sum_of_devices(&self, part: &Tensor) -> Result<Tensor> {
        sum_in_order(std::slice::from_ref(part), self.seat.as_ref())
    }

    /// The rows of a matrix, or its columns, that these slices have.
    pub(crate) fn rows(&self, rows: usize) -> Range<usize> {
        self.rows_of(self.range.start, rows).start..self.rows_of(self.range.end, rows).start
    }

    /// The rows of a matrix, or its columns, that a slice has: about equally many.
    pub(crate) fn rows_of(&self, slice: usize, rows: usize) -> Range<usize> {
        slice * rows / self.of..(slice + 1) * rows / self.of
    }

    /// The sum of the parts of these slices and of the other devices', whole on each.
    pub(crate) fn sum(&self, parts: &[Tensor]) -> Result<Tensor> {
        sum_in_order(parts, self.seat.as_ref())
    }
}
