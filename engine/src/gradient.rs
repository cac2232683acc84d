//! The weight gradient of one microbatch, in pieces of the stage's flat vector.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::{Device, Tensor};

use crate::error::Result;
use crate::tensor::elements;

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
        };
        self.offset..self.offset + length
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
    /// the rows that were read for `tokens`, i64 `[N]`. Gradients of the same row are added in the order of tokens.
    pub(crate) fn embedding(
        offset: usize,
        held: &Range<i64>,
        tokens: &Tensor,
        gradients: &Tensor,
    ) -> Result<Self> {
        let count = held.end - held.start;
        if gradients.device() != Device::Cpu {
            // A row more takes the gradients of all other tokens.
            let tokens = tokens.f_flatten(0, -1)?.f_sub_scalar(held.start)?;
            let absent = tokens.f_lt(0)?.f_logical_or(&tokens.f_ge(count)?)?;
            let tokens = tokens.f_masked_fill(&absent, count)?;
            let rows = count + 1;
            let dense = Tensor::f_embedding_dense_backward(gradients, &tokens, rows, -1, false)?;
            return Self::dense(offset, &dense.f_narrow(0, 0, count)?);
        }
        let gradients = gradients.f_contiguous()?;
        let width = gradients.size2()?.1 as usize;
        let mut places: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
        for (place, token) in elements::<i64>(tokens).iter().enumerate() {
            if held.contains(token) {
                places.entry(*token - held.start).or_default().push(place);
            }
        }
        let gradients: &[f32] = elements(&gradients);
        let mut values = vec![0.0; places.len() * width];
        for (row, places) in values.chunks_exact_mut(width).zip(places.values()) {
            for place in places {
                let gradient = &gradients[place * width..(place + 1) * width];
                row.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
            }
        }
        let indices = places.into_keys().map(|token| token as usize).collect();
        let count = count as usize;
        Ok(Self { offset, values: Values::Rows(Rows { count, width, indices, values }) })
    }
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
        let tokens = Tensor::from_slice(&[3i64, 0, 5, 3]);
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
