//! The part of a stage's flat vector that a device holds: all of it or, on a device that computes slices of each
//! layer's matrices, those slices and all other weights.

use std::iter;
use std::ops::Range;

use tch::Tensor;

use crate::error::Result;
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::{Parameter, WeightPart, range_of};

/// The elements of a flat vector that a device holds, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    /// In the order of the flat vector.
    cuts: Vec<Cut>,
}

/// Rows of equal length that are equally far apart in the flat vector, and adjacent where they are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Index of the first element in the flat vector.
    start: usize,
    rows: usize,
    width: usize,
    /// Elements from one row to the next in the flat vector.
    stride: usize,
    /// Index of the first element where it is held.
    place: usize,
}

impl Cut {
    fn len(&self) -> usize {
        self.rows * self.width
    }

    /// One past the last element in the flat vector.
    fn end(&self) -> usize {
        self.start + (self.rows - 1) * self.stride + self.width
    }

    /// The part of it in a range of the flat vector, which contains it if it has several rows.
    fn within(&self, range: &Range<usize>) -> Option<Self> {
        let [start, end] = [self.start.max(range.start), self.end().min(range.end)];
        if start >= end {
            return None;
        }
        if self.rows > 1 {
            assert!(start == self.start && end == self.end(), "a weight is in one range");
            return Some(*self);
        }
        Some(Self { start, width: end - start, place: self.place + start - self.start, ..*self })
    }

    /// A view of its elements in a tensor: from `first` on, in rows that are `stride` apart.
    fn view(&self, of: &Tensor, first: usize, stride: usize) -> Result<Tensor> {
        let [rows, width, stride, first] =
            [self.rows, self.width, stride, first].map(|count| count as i64);
        Ok(of.f_as_strided([rows, width], [stride, 1], Some(first))?)
    }
}

impl Held {
    /// A whole flat vector of so many elements.
    fn all(elements: usize) -> Self {
        Self::ranges(iter::once(0..elements))
    }

    /// These ranges of a flat vector, in ascending order.
    pub(crate) fn ranges(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut place = 0;
        let cut = |range: Range<usize>| {
            let (start, width) = (range.start, range.len());
            place += width;
            Cut { start, rows: 1, width, stride: width, place: place - width }
        };
        let ranges = ranges.into_iter().filter(|range| !range.is_empty());
        Self { cuts: ranges.map(cut).collect() }
    }

    /// What a device reads that computes these slices: everything, if they are all.
    pub(crate) fn of_passes(parameters: &[Parameter], own: &OwnSlices) -> Self {
        match own.are_all() {
            true => Self::all(range_of(parameters).end),
            false => Self::of(parameters, own, |_| true),
        }
    }

    /// What a device that computes these slices reads of some weights of a flat vector.
    pub(crate) fn of_some(parameters: &[Parameter], own: &OwnSlices) -> Self {
        Self::of(parameters, own, |_| true)
    }

    /// What a device that computes these slices counts the gradients of.
    pub(crate) fn of_gradients(parameters: &[Parameter], own: &OwnSlices) -> Self {
        Self::of(parameters, own, |part| part != WeightPart::Whole || own.counts_shared())
    }

    fn of(parameters: &[Parameter], own: &OwnSlices, is_held: impl Fn(WeightPart) -> bool) -> Self {
        let mut cuts: Vec<Cut> = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let place = cuts.last().map_or(0, |last| last.place + last.len());
            let (start, length) = (parameter.offset, parameter.len());
            let row = |start, width| Cut { start, rows: 1, width, stride: width, place };
            let part = parameter.part_of_slice();
            if !is_held(part) {
                continue;
            }
            cuts.push(match part {
                WeightPart::Whole => row(start, length),
                WeightPart::Rows => {
                    let rows = own.rows(parameter.shape[0]);
                    let width = length / parameter.shape[0];
                    row(start + rows.start * width, rows.len() * width)
                }
                WeightPart::Columns(stride) => {
                    let rows = parameter.shape[0];
                    let columns = own.rows(stride);
                    let start = start + columns.start;
                    Cut { start, rows, width: columns.len(), stride, place }
                }
            });
        }
        Self { cuts }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.cuts.last().map_or(0, |last| last.place + last.len())
    }

    /// Where an element of the flat vector is held, and the elements from one row to the next there: `row` as in
    /// the flat vector, unless only some columns are held.
    ///
    /// # Panics
    /// If it is not held.
    pub(crate) fn locate(&self, element: usize, row: usize) -> (usize, usize) {
        let after = self.cuts.partition_point(|cut| cut.start <= element);
        let cut = after.checked_sub(1).map(|at| &self.cuts[at]);
        let cut = cut.filter(|cut| element < cut.end()).expect("the element is held");
        let within = element - cut.start;
        let place = cut.place + within / cut.stride * cut.width + within % cut.stride;
        (place, if cut.rows == 1 { row } else { cut.width })
    }

    /// Copies to `held` what it holds of a range of the flat vector, none of whose ends is in a weight of
    /// several rows.
    pub(crate) fn take(&self, held: &Tensor, range: &Range<usize>, values: &Tensor) -> Result<()> {
        for cut in self.cuts.iter().filter_map(|cut| cut.within(range)) {
            let values = cut.view(values, cut.start - range.start, cut.stride)?;
            cut.view(held, cut.place, cut.width)?.f_copy_(&values)?;
        }
        Ok(())
    }

    /// The rows that are held of a range of the flat vector, as far as they are in it: where each begins in the flat
    /// vector, and its range where it is held. Those ranges are adjacent.
    pub(crate) fn rows(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<'_> {
        let first = self.cuts.partition_point(|cut| cut.end() <= range.start);
        let (start, end) = (range.start, range.end);
        self.cuts[first..].iter().take_while(move |cut| cut.start < end).flat_map(move |cut| {
            let rows = start.saturating_sub(cut.start) / cut.stride
                ..(end - cut.start).div_ceil(cut.stride).min(cut.rows);
            rows.filter_map(move |row| {
                let (at, place) = (cut.start + row * cut.stride, cut.place + row * cut.width);
                let [from, to] = [at.max(start), (at + cut.width).min(end)];
                (from < to).then(|| (from, place + from - at..place + to - at))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::device::exchange::Seat;
    use crate::device::tensor::elements;
    use crate::model::parameters::parameters;
    use crate::testing::manifest;
    use shoal_protocol::ids::Stage;

    /// The weights of a stage in four slices, and what each of two devices holds of them.
    fn halves() -> (Vec<Parameter>, Vec<OwnSlices>) {
        let mut manifest = manifest();
        manifest.model.slices = 4;
        let own = |seat: &Seat| OwnSlices::new(&manifest.model, Some(seat));
        let own = Seat::all(2).iter().map(own).collect();
        (parameters(&manifest, Stage(0)), own)
    }

    #[test]
    fn devices_hold_each_element_of_sliced_matrices_once_and_all_others() {
        let (parameters, own) = halves();
        let count = parameters.last().expect("some").range().end;
        for (held, of_shared) in [
            (own.iter().map(|own| Held::of_passes(&parameters, own)).collect::<Vec<_>>(), 2),
            (own.iter().map(|own| Held::of_gradients(&parameters, own)).collect(), 1),
        ] {
            let mut times = vec![0; count];
            for held in &held {
                let mut next = 0;
                for (start, place) in held.rows(0..count) {
                    assert_eq!(place.start, next);
                    next = place.end;
                    times[start..start + place.len()].iter_mut().for_each(|times| *times += 1);
                }
                assert_eq!(next, held.len());
            }
            for parameter in &parameters {
                let expected = match parameter.part_of_slice() {
                    WeightPart::Whole => of_shared,
                    WeightPart::Rows | WeightPart::Columns(_) => 1,
                };
                let name = &parameter.name;
                assert!(times[parameter.range()].iter().all(|times| *times == expected), "{name}");
            }
        }
    }

    #[test]
    fn held_elements_are_those_of_the_flat_vector_wherever_the_range_is_cut() {
        let (parameters, own) = halves();
        let count = parameters.last().expect("some").range().end;
        let numbers: Vec<f32> = (0..count).map(|index| index as f32).collect();
        let flat = Tensor::from_slice(&numbers);
        for own in &own {
            let held = Held::of_passes(&parameters, own);
            for cut in [0, parameters[3].offset, parameters[5].range().end, count] {
                let values = Tensor::full([held.len() as i64], -1.0, tch::kind::FLOAT_CPU);
                for range in [0..cut, cut..count] {
                    let [start, length] = [range.start, range.len()].map(|count| count as i64);
                    let part = flat.narrow(0, start, length).copy();
                    held.take(&values, &range, &part).expect("a small copy");
                }
                for (start, place) in held.rows(0..count) {
                    let expected = &numbers[start..start + place.len()];
                    assert_eq!(&elements::<f32>(&values)[place.clone()], expected);
                    assert_eq!(held.locate(start, 1).0, place.start);
                    assert_eq!(held.locate(start + place.len() - 1, 1).0, place.end - 1);
                }
            }
        }
    }

    #[test]
    fn rows_of_a_range_are_those_of_all_that_are_in_it() {
        let (parameters, own) = halves();
        let count = parameters.last().expect("some").range().end;
        let held = Held::of_passes(&parameters, &own[1]);
        let places: BTreeMap<usize, usize> = held
            .rows(0..count)
            .flat_map(|(start, place)| (start..start + place.len()).zip(place))
            .collect();
        for start in (0..count).step_by(7) {
            for end in [start, start + 1, start + 13, count].map(|end| end.min(count)) {
                let found: BTreeMap<usize, usize> = held
                    .rows(start..end)
                    .flat_map(|(start, place)| (start..start + place.len()).zip(place))
                    .collect();
                let expected = places.range(start..end).map(|(at, place)| (*at, *place)).collect();
                assert_eq!(found, expected, "{start}..{end}");
            }
        }
    }

    #[test]
    fn all_is_held_in_its_place() {
        let held = Held::all(7);
        assert_eq!((held.len(), held.locate(5, 3)), (7, (5, 3)));
        assert_eq!(Held::all(0).len(), 0);
    }
}
