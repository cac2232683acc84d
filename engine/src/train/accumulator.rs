//! Sums of weight gradients that are independent of the order and distribution of the work.
//!
//! The integers are those of [`crate::FixedPoint`].

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shoal_protocol::ids::ClaimKey;
use shoal_protocol::manifest::Manifest;
use tch::{Device, Kind, Tensor};

use crate::device::cuda::{Argument, Kernels};
use crate::device::tensor::{bytes_of, elements, elements_mut};
use crate::error::{EngineError, Result};
use crate::model::parameters::Parameter;
use crate::numeric::fixed_point::{
    FixedPoint, add_bf16, add_f32, add_words, largest_bf16, largest_f32, widen,
};
use crate::weights::gradient::{Piece, Rows, RowsOnDevice, Values, columns_of};
use crate::weights::held::Held;

/// The sum of one stage's weight gradients over the microbatches counted so far. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Accumulator {
    fixed_point: FixedPoint,
    /// i64, flat, on the device.
    sums: Arc<Mutex<Tensor>>,
    /// The elements of the flat vector that it has, if not all.
    held: Option<Arc<Held>>,
}

impl Accumulator {
    /// Sums of a stage of so many weights, or of those among them that are held.
    pub(crate) fn new(
        manifest: &Manifest,
        elements: usize,
        held: Option<Held>,
        device: Device,
    ) -> Result<Self> {
        let elements = held.as_ref().map_or(elements, Held::len);
        let sums = Tensor::f_zeros([elements as i64], (Kind::Int64, device))?;
        let sums = Arc::new(Mutex::new(sums));
        Ok(Self { fixed_point: FixedPoint::of(manifest), sums, held: held.map(Arc::new) })
    }

    /// Another device's sums: those of the elements that it holds.
    pub(crate) fn of_device(&self, sums: Tensor, held: Arc<Held>) -> Self {
        let sums = Arc::new(Mutex::new(sums));
        Self { fixed_point: self.fixed_point, sums, held: Some(held) }
    }

    /// A handle of the tensor, whose memory may be elsewhere while nothing is added or read.
    pub(crate) fn tensor(&self) -> Tensor {
        self.lock().shallow_clone()
    }

    fn lock(&self) -> MutexGuard<'_, Tensor> {
        // Nothing panics between the changes of an addition.
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the gradient of one microbatch. All pieces are checked before any is added, so an error
    /// leaves the sums unchanged.
    pub(crate) fn add(
        &self,
        key: ClaimKey,
        gradient: &[Piece],
        parameters: &[Parameter],
    ) -> Result<()> {
        let elements = self.lock().numel();
        assert!(covers(gradient, elements), "the gradients are not those of this stage");
        self.add_part(key, gradient, parameters)
    }

    /// Like [`Self::add`], of the part of the weights that one device computes the gradient of.
    pub(crate) fn add_part(
        &self,
        key: ClaimKey,
        gradient: &[Piece],
        parameters: &[Parameter],
    ) -> Result<()> {
        if let Some((kernels, launches)) = self.kernels(gradient)
            && self.add_at_once(kernels, &launches)?
        {
            return Ok(());
        }
        self.check(key, gradient, parameters)?;
        let mut sums = self.lock();
        gradient.iter().try_for_each(|piece| self.add_piece(&mut sums, piece))
    }

    /// Names the first element that is out of range.
    fn check(&self, key: ClaimKey, gradient: &[Piece], parameters: &[Parameter]) -> Result<()> {
        for piece in gradient {
            let largest = match &piece.values {
                Values::Dense(values) | Values::Columns(values, _) => largest(values)?,
                Values::Rows(rows) => f32::from_bits(largest_f32(bits_of(rows))),
                Values::RowsOnDevice(rows) => largest(&rows.values)?,
            };
            if let Err(problem) = self.fixed_point.check(largest) {
                let at = self.first_bad(piece)?;
                let parameter = parameters.iter().find(|parameter| parameter.range().contains(&at));
                let tensor = parameter.map_or_else(String::new, |found| found.name.clone());
                return Err(EngineError::BadGradient { tensor, key, problem });
            }
        }
        Ok(())
    }

    /// The pieces with the kernels that add them, if all is on one GPU that has kernels.
    fn kernels<'a>(&self, gradient: &'a [Piece]) -> Option<(&'static Kernels, Vec<Launch<'a>>)> {
        let device = self.lock().device();
        let kernels = Kernels::of(device)?;
        let launch = |piece: &'a Piece| match &piece.values {
            Values::Dense(values) | Values::Columns(values, _)
                if values.device() == device && values.is_contiguous() =>
            {
                Some((piece, values, kernels_for(values)?))
            }
            Values::RowsOnDevice(rows) if rows.values.device() == device => {
                Some((piece, &rows.values, ["shoal_largest_f32", "shoal_add_rows"]))
            }
            _ => None,
        };
        let pieces = gradient.iter().filter(|piece| !piece.has_no_row());
        Some((kernels, pieces.map(launch).collect::<Option<_>>()?))
    }

    /// Adds a gradient on a GPU; returns whether all of it is in range. If not, nothing is added. The host waits once.
    fn add_at_once(&self, kernels: &Kernels, launches: &[Launch<'_>]) -> Result<bool> {
        let sums = self.lock();
        // The bits of the largest magnitude.
        let largest = Tensor::f_zeros([1], (Kind::Int, sums.device()))?;
        let limit = self.fixed_point.largest().to_bits();
        for (_, values, [name, _]) in launches {
            let count = values.numel() as u64;
            let arguments =
                [Argument::of(values, 0), Argument::Count(count), Argument::of(&largest, 0)];
            // SAFETY: the values are contiguous, and `largest` has an element.
            unsafe { kernels.launch(name, count, arguments) }?;
        }
        for (piece, values, [_, name]) in launches {
            if let Values::RowsOnDevice(rows) = &piece.values {
                self.launch_rows(kernels, (piece.offset, rows), (&sums, &largest))?;
                continue;
            }
            let count = values.numel();
            let (width, row) = row_of(piece, values);
            let (place, stride) = self.locate(piece.offset, row);
            let end = place + (count / width).saturating_sub(1) * stride + width;
            assert!(count == 0 || end <= sums.numel(), "the gradients are not those of this stage");
            let arguments = [
                Argument::of(values, 0),
                Argument::Count(count as u64),
                Argument::Count(width as u64),
                Argument::of(&sums, size_of::<i64>() * place),
                Argument::Count(stride as u64),
                Argument::Number(self.fixed_point.scale),
                Argument::of(&largest, 0),
                Argument::Bits(limit),
            ];
            // SAFETY: the values are contiguous, and the sums have all rows that are added to.
            unsafe { kernels.launch(name, count as u64, arguments) }?;
        }
        Ok(largest.f_double_value(&[0])? <= f64::from(limit))
    }

    /// Adds rows of a matrix on a GPU, unless the largest magnitude is above the limit.
    fn launch_rows(
        &self,
        kernels: &Kernels,
        (offset, rows): (usize, &RowsOnDevice),
        (sums, largest): (&Tensor, &Tensor),
    ) -> Result<()> {
        let (count, width) = (rows.numbers.numel(), rows.width());
        let (place, _) = self.locate(offset, width);
        assert!(place + rows.count * width <= sums.numel(), "the rows are not those of this stage");
        let arguments = [
            Argument::of(&rows.values, 0),
            Argument::Count(count as u64),
            Argument::Count(width as u64),
            Argument::of(&rows.numbers, 0),
            Argument::of(sums, size_of::<i64>() * place),
            Argument::Number(self.fixed_point.scale),
            Argument::of(largest, 0),
            Argument::Bits(self.fixed_point.largest().to_bits()),
        ];
        // SAFETY: there is a number below `count` for each row, and the sums have all rows.
        unsafe { kernels.launch("shoal_add_rows", (count * width) as u64, arguments) }
    }

    /// Index of the first element out of range.
    fn first_bad(&self, piece: &Piece) -> Result<usize> {
        let bad = |value: &f32| self.fixed_point.check(*value).is_err();
        let bad_of = |values: &Tensor| -> Result<usize> {
            let values = values.f_to_kind(Kind::Float)?.f_to(Device::Cpu)?.f_contiguous()?;
            Ok(elements::<f32>(&values).iter().position(bad).unwrap_or(0))
        };
        let bad_of_rows = |rows: &Rows| {
            let at = rows.values.iter().position(bad).unwrap_or(0);
            rows.indices[at / rows.width] * rows.width + at % rows.width
        };
        Ok(piece.offset
            + match &piece.values {
                Values::Dense(values) => bad_of(values)?,
                Values::Columns(values, stride) => {
                    let (at, width) = (bad_of(values)?, columns_of(values));
                    at / width * stride + at % width
                }
                Values::Rows(rows) => bad_of_rows(rows),
                Values::RowsOnDevice(rows) => bad_of_rows(&rows.to_host()?),
            })
    }

    /// Where an element of the flat vector is in the sums, and the elements from one row to the next there.
    fn locate(&self, element: usize, row: usize) -> (usize, usize) {
        self.held.as_ref().map_or((element, row), |held| held.locate(element, row))
    }

    fn add_piece(&self, sums: &mut Tensor, piece: &Piece) -> Result<()> {
        let scale = self.fixed_point.scale;
        match &piece.values {
            Values::Dense(gradient) | Values::Columns(gradient, _)
                if sums.device() != Device::Cpu =>
            {
                let rounded = gradient.f_to_kind(Kind::Double)?.f_mul_scalar(scale)?.f_round()?;
                let (width, row) = row_of(piece, gradient);
                let (place, stride) = self.locate(piece.offset, row);
                let (rows, width) = ((gradient.numel() / width) as i64, width as i64);
                let strides = [stride as i64, 1];
                let mut sums = sums.f_as_strided([rows, width], strides, Some(place as i64))?;
                // What a worker rounded is in the machine's memory.
                let rounded = rounded.f_to_kind(Kind::Int64)?.f_to(sums.device())?;
                let _ = sums.f_add_(&rounded.f_view([rows, width])?)?;
            }
            Values::Dense(gradient) | Values::Columns(gradient, _) => {
                let gradient = &gradient.f_to(Device::Cpu)?;
                let (width, row) = row_of(piece, gradient);
                let (place, stride) = self.locate(piece.offset, row);
                let length = (gradient.numel() / width - 1) * stride + width;
                let sums = &mut elements_mut::<i64>(sums)[place..place + length];
                let sums = sums.chunks_mut(stride);
                match gradient.kind() {
                    Kind::BFloat16 => {
                        let rows = elements(gradient).chunks(width);
                        sums.zip(rows).for_each(|(sums, row)| add_bf16(sums, row, scale));
                    }
                    _ => {
                        let rows = elements(gradient).chunks(width);
                        sums.zip(rows).for_each(|(sums, row)| add_f32(sums, row, scale));
                    }
                }
            }
            // The sums may be on a GPU.
            Values::Rows(rows) if rows.indices.is_empty() => {}
            Values::Rows(rows) => self.add_rows(sums, piece.offset, rows),
            Values::RowsOnDevice(rows) => self.add_rows(sums, piece.offset, &rows.to_host()?),
        }
        Ok(())
    }

    /// Adds rows of a matrix by the processor.
    fn add_rows(&self, sums: &mut Tensor, offset: usize, rows: &Rows) {
        let (place, _) = self.locate(offset, rows.width);
        let sums = &mut elements_mut::<i64>(sums)[place..];
        for (index, values) in rows.indices.iter().zip(rows.values.chunks(rows.width)) {
            let start = index * rows.width;
            add_f32(&mut sums[start..start + rows.width], values, self.fixed_point.scale);
        }
    }

    /// Passes the sums of a range of the flat vector to a function: i64, little-endian.
    pub(crate) fn read<T>(&self, range: Range<usize>, read: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let sums = self.lock();
        let piece = sums.f_narrow(0, range.start as i64, range.len() as i64)?;
        let piece = piece.f_to(Device::Cpu)?;
        Ok(read(bytes_of(&piece)))
    }

    /// Adds what it has of a range of the flat vector to sums of that range.
    pub(crate) fn add_to(&self, range: &Range<usize>, sums: &mut [i64]) -> Result<()> {
        let Some(held) = &self.held else {
            return self.read(range.clone(), |part| add_words(sums, part));
        };
        let mut rows = held.rows(range.clone());
        let Some((_, first)) = rows.next() else { return Ok(()) };
        let end = rows.last().map_or(first.end, |(_, last)| last.end);
        self.read(first.start..end, |part| {
            for (start, place) in held.rows(range.clone()) {
                let [from, to] = [place.start, place.end].map(|at| 8 * (at - first.start));
                let start = start - range.start;
                add_words(&mut sums[start..start + place.len()], &part[from..to]);
            }
        })
    }

    /// Moves all that another accumulator of the whole stage has here; this one is in the machine's memory.
    pub(crate) fn take(&self, other: &Self) -> Result<()> {
        assert!(!Arc::ptr_eq(&self.sums, &other.sums), "an accumulator is not moved to itself");
        let mut sums = self.lock();
        let all = 0..sums.numel();
        other.add_to(&all, elements_mut(&mut sums))?;
        other.clear()
    }

    /// Copies the sums into the machine's memory and clears them.
    pub(crate) fn set_aside(&self) -> Result<Tensor> {
        let mut sums = self.lock();
        let mut aside = Tensor::f_empty([sums.numel() as i64], (Kind::Int64, Device::Cpu))?;
        aside.f_copy_(&sums)?;
        let _ = sums.f_zero_()?;
        Ok(aside)
    }

    /// Replaces the sums by those that were set aside.
    pub(crate) fn put_back(&self, aside: &Tensor) -> Result<()> {
        Ok(self.lock().f_copy_(aside)?)
    }

    /// Clears the sums for the next step.
    pub(crate) fn clear(&self) -> Result<()> {
        let _ = self.lock().f_zero_()?;
        Ok(())
    }
}

/// A piece, its values, and the kernels for them.
type Launch<'a> = (&'a Piece, &'a Tensor, [&'static str; 2]);

/// The kernels for values of a dtype: of the search for the largest, and of the addition.
fn kernels_for(values: &Tensor) -> Option<[&'static str; 2]> {
    match values.kind() {
        Kind::BFloat16 => Some(["shoal_largest_bf16", "shoal_add_bf16"]),
        Kind::Float => Some(["shoal_largest_f32", "shoal_add_f32"]),
        _ => None,
    }
}

/// The elements of a row of a piece's gradient, and those from one row to the next. A dense piece is one row.
fn row_of(piece: &Piece, gradient: &Tensor) -> (usize, usize) {
    match piece.values {
        Values::Columns(_, stride) => (columns_of(gradient), stride),
        Values::Dense(_) | Values::Rows(_) | Values::RowsOnDevice(_) => {
            (gradient.numel(), gradient.numel())
        }
    }
}

/// Whether pieces cover all of so many elements, and no more. A tied matrix is covered twice if embedding and head are in
/// one stage.
fn covers(gradient: &[Piece], elements: usize) -> bool {
    let mut ranges: Vec<Range<usize>> = gradient.iter().map(Piece::range).collect();
    ranges.sort_by_key(|range| range.start);
    let mut covered = 0;
    let whole = ranges.into_iter().all(|range| {
        let adjacent = range.start <= covered;
        covered = covered.max(range.end);
        adjacent
    });
    whole && covered == elements
}

/// The largest magnitude; not finite if any element is not.
fn largest(gradient: &Tensor) -> Result<f32> {
    Ok(match (gradient.device(), gradient.kind()) {
        (Device::Cpu, Kind::BFloat16) => widen(largest_bf16(elements(gradient))),
        (Device::Cpu, Kind::Float) => f32::from_bits(largest_f32(elements(gradient))),
        // The maximum of anything and NaN is NaN.
        _ => gradient.f_abs()?.f_max()?.f_double_value(&[])? as f32,
    })
}

fn bits_of(rows: &Rows) -> &[u32] {
    bytemuck::cast_slice(&rows.values)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use bytes::Bytes;
    use shoal_protocol::ids::Stage;

    use super::*;
    use crate::device::exchange::Seat;
    use crate::error::GradientProblem;
    use crate::model::own_slices::OwnSlices;
    use crate::model::parameters::{WeightPart, parameters as stage_parameters};
    use crate::testing::{key, manifest};

    const COUNT: usize = 37;

    fn parameters() -> Vec<Parameter> {
        vec![
            Parameter { name: "one".to_owned(), shape: vec![30], offset: 0 },
            Parameter { name: "two".to_owned(), shape: vec![7], offset: 30 },
        ]
    }

    fn empty() -> Accumulator {
        Accumulator::new(&manifest(), COUNT, None, Device::Cpu).expect("small")
    }

    /// Values in two pieces, with a cut within a parameter.
    fn pieces(values: &[f32]) -> Vec<Piece> {
        let (one, two) = values.split_at(10);
        let piece = |offset, values| Piece::dense(offset, &Tensor::from_slice(values));
        vec![piece(0, one).expect("small"), piece(10, two).expect("small")]
    }

    fn sums(accumulator: &Accumulator) -> Bytes {
        accumulator.read(0..COUNT, Bytes::copy_from_slice).expect("the whole")
    }

    proptest! {
        #[test]
        fn order_and_distribution_do_not_matter(
            gradients in prop::collection::vec(
                prop::collection::vec(-1e4f32..1e4, COUNT..=COUNT), 6..=6),
            order in Just((0..6usize).collect::<Vec<_>>()).prop_shuffle(),
            cut in 0usize..=6,
        ) {
            let fixed_point = FixedPoint::of(&manifest());
            let one = empty();
            for (index, gradient) in gradients.iter().enumerate() {
                one.add(key(index as u32), &pieces(gradient), &parameters()).expect("in range");
            }
            let two = [empty(), empty()];
            for (place, index) in order.into_iter().enumerate() {
                let half = usize::from(place < cut);
                let gradient = pieces(&gradients[index]);
                two[half].add(key(index as u32), &gradient, &parameters()).expect("in range");
            }
            let whole = fixed_point.reduce(&[sums(&one)]).expect("one part");
            let split = fixed_point.reduce(&[sums(&two[0]), sums(&two[1])]).expect("equal parts");
            prop_assert_eq!(&whole, &split);
            for (index, mean) in whole.as_chunks::<4>().0.iter().enumerate() {
                let exact: f64 = gradients.iter().map(|g| f64::from(g[index])).sum::<f64>() / 6.0;
                let error = (f64::from(f32::from_le_bytes(*mean)) - exact).abs();
                prop_assert!(error <= exact.abs() * 1e-7 + 1e-12);
            }
        }
    }

    #[test]
    fn sums_of_the_slices_of_devices_are_those_of_the_whole() {
        let mut manifest = manifest();
        manifest.model.slices = 2;
        let parameters = stage_parameters(&manifest, Stage(0));
        let count = parameters.last().expect("some").range().end;
        let values: Vec<f32> = (0..count).map(|index| (index as f32).sin()).collect();
        let whole = Accumulator::new(&manifest, count, None, Device::Cpu).expect("small");
        let mut joined = vec![0; count];
        let dense = Piece::dense(0, &Tensor::from_slice(&values)).expect("small");
        whole.add(key(0), &[dense], &parameters).expect("in range");
        for seat in &Seat::all(2) {
            let own = OwnSlices::new(&manifest.model, Some(seat));
            let held = Held::of_gradients(&parameters, &own);
            let device =
                Accumulator::new(&manifest, count, Some(held), Device::Cpu).expect("small");
            let number = seat.index();
            let mut pieces = Vec::new();
            for parameter in &parameters {
                let of = Tensor::from_slice(&values[parameter.range()]);
                let halves = match parameter.part_of_slice() {
                    WeightPart::Columns(all) => {
                        let (half, start) = (all / 2, number * all / 2);
                        let matrix = of.view([-1, all as i64]);
                        let half = matrix.narrow(1, start as i64, half as i64);
                        Piece::columns(parameter.offset + start, all, &half)
                    }
                    WeightPart::Rows => {
                        let (half, start) = (parameter.len() / 2, number * parameter.len() / 2);
                        let half = of.narrow(0, start as i64, half as i64);
                        Piece::dense(parameter.offset + start, &half)
                    }
                    WeightPart::Whole if number == 0 => Piece::dense(parameter.offset, &of),
                    WeightPart::Whole => continue,
                };
                pieces.push(halves.expect("small"));
            }
            device.add_part(key(0), &pieces, &parameters).expect("in range");
            for range in [0..count / 3, count / 3..count / 3 + 1, count / 3 + 1..count] {
                device.add_to(&range, &mut joined[range.clone()]).expect("a part of the stage");
            }
        }
        assert_eq!(joined, elements::<i64>(&whole.tensor()));
    }

    #[test]
    fn a_gradient_out_of_range_is_named_and_changes_nothing() {
        let limit = (i64::MAX / 6) as f64 / 44f64.exp2();
        for (value, finite) in [
            (f32::NAN, false),
            (f32::NEG_INFINITY, false),
            (limit as f32 * 1.001, true),
            (f32::MIN, true),
        ] {
            let accumulator = empty();
            let mut gradient = vec![1.0; COUNT];
            accumulator.add(key(0), &pieces(&gradient), &parameters()).expect("in range");
            let before = sums(&accumulator);
            gradient[31] = value;
            let error = accumulator
                .add(key(3), &pieces(&gradient), &parameters())
                .expect_err("it does not fit");
            let EngineError::BadGradient { tensor, key: named, problem } = error else {
                panic!("{error}")
            };
            assert_eq!((tensor.as_str(), named), ("two", key(3)));
            assert_eq!(matches!(problem, GradientProblem::OutOfRange { .. }), finite);
            assert_eq!(sums(&accumulator), before);
        }
        let accumulator = empty();
        let largest = vec![limit as f32 * 0.999; COUNT];
        for index in 0..6 {
            accumulator.add(key(index), &pieces(&largest), &parameters()).expect("in range");
        }
        let mean = FixedPoint::of(&manifest()).reduce(&[sums(&accumulator)]).expect("one part");
        assert_eq!(mean[..4], largest[0].to_le_bytes());
    }
}
