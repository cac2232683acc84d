//! The weight gradient of one microbatch, in pieces of the stage's flat vector.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::device::cuda::{Argument, Kernels};
use crate::device::tensor::{elements, upload};
use crate::error::Result;

/// The gradient of a tensor.
#[derive(Debug)]
pub(crate) enum Gradient {
    Whole(Tensor),
    /// Of a product's weight, as the factors of the product that it is.
    Factors {
        /// The gradient of the product's result, `[N, outputs]`.
        gradient: Tensor,
        /// What the weight was multiplied with, `[N, inputs]`.
        rows: Tensor,
    },
}

impl From<(Tensor, Option<Tensor>)> for Gradient {
    /// A gradient, or its two factors.
    fn from((gradient, rows): (Tensor, Option<Tensor>)) -> Self {
        match rows {
            None => Self::Whole(gradient),
            Some(rows) => Self::Factors { gradient, rows },
        }
    }
}

impl Gradient {
    /// The gradient itself, with the bits that the backward pass would have computed.
    pub(crate) fn into_whole(self) -> Result<Tensor> {
        match self {
            Self::Whole(gradient) => Ok(gradient),
            Self::Factors { gradient, rows } => Ok(gradient.f_tr()?.f_mm(&rows)?),
        }
    }
}

/// The gradient of one weight, or of adjacent ones.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Index of its first element in the flat vector.
    pub(crate) offset: usize,
    pub(crate) values: Values,
}

/// The values of a piece.
#[derive(Debug)]
pub(crate) enum Values {
    /// Of every element, contiguous.
    Dense(Tensor),
    /// Of some adjacent columns of a matrix, whose rows are so many elements apart: contiguous, `[rows,
    /// columns]`. Other pieces have the other columns.
    Columns(Tensor, usize),
    /// Of some rows of a matrix of f32; those of all others are zero.
    Rows(Rows),
    /// The same on a GPU.
    RowsOnDevice(RowsOnDevice),
}

/// Some rows of a matrix.
#[derive(Debug)]
pub(crate) struct Rows {
    /// Rows of the whole matrix.
    pub(crate) count: usize,
    /// Elements of a row.
    pub(crate) width: usize,
    /// Indices of the rows, in ascending order.
    pub(crate) indices: Vec<usize>,
    /// The rows one after the other.
    pub(crate) values: Vec<f32>,
}

/// Some rows of a matrix, on a GPU.
#[derive(Debug)]
pub(crate) struct RowsOnDevice {
    /// Rows of the whole matrix.
    pub(crate) count: usize,
    /// Numbers of the rows, in ascending order: i64.
    pub(crate) numbers: Tensor,
    /// The rows one after the other: f32 `[rows, width]`, at least one.
    pub(crate) values: Tensor,
}

impl RowsOnDevice {
    /// Elements of a row.
    pub(crate) fn width(&self) -> usize {
        columns_of(&self.values)
    }

    /// A copy in the machine's memory.
    pub(crate) fn to_host(&self) -> Result<Rows> {
        let numbers = self.numbers.f_to(Device::Cpu)?;
        let indices = elements::<i64>(&numbers).iter().map(|number| *number as usize).collect();
        let values = elements(&self.values.f_to(Device::Cpu)?).to_vec();
        Ok(Rows { count: self.count, width: self.width(), indices, values })
    }
}

/// The tokens of a microbatch that read each row of an embedding that any reads.
struct Readers {
    /// Numbers of the rows, in ascending order.
    numbers: Vec<i64>,
    /// Where the tokens of each row begin among all, and their number.
    starts: Vec<i64>,
    /// The places of the tokens: of those that read the same row in the order of tokens.
    order: Vec<i64>,
}

impl Readers {
    /// Of rows for `held` tokens.
    fn new(held: &Range<i64>, tokens: &[i64]) -> Self {
        let mut places: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for (place, token) in (0..).zip(tokens) {
            if held.contains(token) {
                places.entry(*token - held.start).or_default().push(place);
            }
        }
        let (mut starts, mut order) = (vec![0], Vec::with_capacity(tokens.len()));
        for of_row in places.values() {
            order.extend(of_row);
            starts.push(order.len() as i64);
        }
        Self { numbers: places.into_keys().collect(), starts, order }
    }
}

impl Piece {
    /// The elements of the flat vector that it is the gradient of, and those between its rows.
    pub(crate) fn range(&self) -> Range<usize> {
        let length = match &self.values {
            Values::Dense(values) => values.numel(),
            Values::Columns(values, stride) => {
                let width = columns_of(values);
                values.numel() / width * stride - (stride - width)
            }
            Values::Rows(rows) => rows.count * rows.width,
            Values::RowsOnDevice(rows) => rows.count * rows.width(),
        };
        self.offset..self.offset + length
    }

    /// Whether it is of rows, and of none.
    pub(crate) fn has_no_row(&self) -> bool {
        matches!(&self.values, Values::Rows(rows) if rows.indices.is_empty())
    }

    /// The piece of a view that was read as a whole.
    pub(crate) fn dense(offset: usize, gradient: &Tensor) -> Result<Self> {
        Ok(Self { offset, values: Values::Dense(gradient.f_contiguous()?) })
    }

    /// The piece of some columns of a matrix, whose rows are `stride` elements apart.
    pub(crate) fn columns(offset: usize, stride: usize, gradient: &Tensor) -> Result<Self> {
        Ok(Self { offset, values: Values::Columns(gradient.f_contiguous()?, stride) })
    }

    /// The piece of an embedding's rows for `held` tokens, the first at `offset`, from the gradients `[N, H]`, f32, of
    /// the rows that were read for N tokens. Gradients of the same row are added in the order of tokens.
    pub(crate) fn embedding(
        offset: usize,
        held: &Range<i64>,
        tokens: &[i64],
        gradients: &Tensor,
    ) -> Result<Self> {
        let gradients = gradients.f_contiguous()?;
        let (count, width) = ((held.end - held.start) as usize, gradients.size2()?.1 as usize);
        let device = gradients.device();
        let kernels = Kernels::of(device);
        if device != Device::Cpu && kernels.is_none() {
            return Self::whole_embedding(offset, held, tokens, &gradients);
        }
        let readers = Readers::new(held, tokens);
        let values = match kernels.filter(|_| !readers.numbers.is_empty()) {
            Some(kernels) => {
                Values::RowsOnDevice(rows_on_device(kernels, count, &readers, &gradients)?)
            }
            None => Values::Rows(rows_of(count, width, readers, &gradients)),
        };
        Ok(Self { offset, values })
    }

    /// The same with the rows that no token read, by libtorch.
    fn whole_embedding(
        offset: usize,
        held: &Range<i64>,
        tokens: &[i64],
        gradients: &Tensor,
    ) -> Result<Self> {
        let count = held.end - held.start;
        // A row more takes the gradients of all other tokens.
        let row = |token: &i64| if held.contains(token) { token - held.start } else { count };
        let rows: Vec<i64> = tokens.iter().map(row).collect();
        let rows = upload(&Tensor::f_from_slice(&rows)?, gradients.device())?;
        let dense = Tensor::f_embedding_dense_backward(gradients, &rows, count + 1, -1, false)?;
        Self::dense(offset, &dense.f_narrow(0, 0, count)?)
    }
}

/// The sums of rows' gradients by the processor.
fn rows_of(count: usize, width: usize, readers: Readers, gradients: &Tensor) -> Rows {
    let Readers { numbers, starts, order } = readers;
    let mut values = vec![0.0; numbers.len() * width];
    // Without a row there is no gradient to read: it may be a GPU's.
    let gradients: &[f32] = if numbers.is_empty() { &[] } else { elements(gradients) };
    for (row, ends) in values.chunks_exact_mut(width).zip(starts.windows(2)) {
        for place in &order[ends[0] as usize..ends[1] as usize] {
            let start = *place as usize * width;
            let gradient = &gradients[start..start + width];
            row.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
        }
    }
    let indices = numbers.into_iter().map(|number| number as usize).collect();
    Rows { count, width, indices, values }
}

/// The sums of at least one row's gradients by a GPU.
fn rows_on_device(
    kernels: &Kernels,
    count: usize,
    readers: &Readers,
    gradients: &Tensor,
) -> Result<RowsOnDevice> {
    let (device, width) = (gradients.device(), gradients.size2()?.1);
    let Readers { numbers, starts, order } = readers;
    let rows = numbers.len() as i64;
    let all = Tensor::f_from_slice(&[&numbers[..], starts, order].concat())?;
    let all = upload(&all, device)?;
    let sums = Tensor::f_empty([rows, width], (Kind::Float, device))?;
    let numbers = all.f_narrow(0, 0, rows)?;
    let starts = all.f_narrow(0, rows, rows + 1)?;
    let order = all.f_narrow(0, 2 * rows + 1, order.len() as i64)?;
    let arguments = [
        Argument::of(gradients, 0),
        Argument::Count(rows as u64),
        Argument::Count(width as u64),
        Argument::of(&starts, 0),
        Argument::of(&order, 0),
        Argument::of(&sums, 0),
    ];
    // SAFETY: the gradients are contiguous with a row for each place in the order, and `starts` ends with their number.
    unsafe { kernels.launch("shoal_embedding_rows", (rows * width) as u64, arguments) }?;
    Ok(RowsOnDevice { count, numbers, values: sums })
}

/// The number of columns of a matrix.
pub(crate) fn columns_of(matrix: &Tensor) -> usize {
    matrix.size().last().map_or(1, |columns| *columns as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_divide_the_rows_of_an_embedding() {
        let tokens = [3i64, 0, 5, 3];
        let gradients = Tensor::from_slice(&[1f32, 2.0, 4.0, 8.0]).view([4, 1]);
        let piece = |held| Piece::embedding(10, &held, &tokens, &gradients).expect("small");
        for (held, indices, values) in [
            (0..6, vec![0, 3, 5], vec![2.0, 9.0, 4.0]),
            (0..3, vec![0], vec![2.0]),
            (3..6, vec![0, 2], vec![9.0, 4.0]),
        ] {
            let piece = piece(held.clone());
            assert_eq!(piece.range().len(), (held.end - held.start) as usize);
            let Values::Rows(rows) = piece.values else { panic!("rows") };
            assert_eq!((rows.indices, rows.values), (indices, values));
        }
    }
}
