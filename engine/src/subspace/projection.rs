//! The subspace in passes: coordinates across boundaries, and the gradients of constrained weights.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use super::{Constraint, Subspace};
use crate::error::Result;
use crate::numeric::normal_stream::NormalStream;

/// A run's subspace on the device of a stage, for passes. All is computed in f32.
#[derive(Debug)]
pub(crate) struct Projection {
    /// `R`: `[H, W]`.
    columns: Tensor,
    /// Its transpose.
    rows: Tensor,
    initial: NormalStream,
    /// The model's factor on the embedding.
    scale: f64,
}

impl Projection {
    pub(crate) fn new(
        subspace: &Subspace,
        scale: Option<f64>,
        device: tch::Device,
    ) -> Result<Self> {
        let (hidden, width) = (subspace.hidden as i64, subspace.width as i64);
        let matrix = |values: &[f32], shape: [i64; 2]| -> Result<Tensor> {
            Ok(Tensor::f_from_slice(values)?.f_view(shape)?.f_to(device)?)
        };
        Ok(Self {
            columns: matrix(&subspace.columns, [hidden, width])?,
            rows: matrix(&subspace.rows, [width, hidden])?,
            initial: subspace.initial,
            scale: scale.unwrap_or(1.0),
        })
    }

    /// What an activation has beside its part in the subspace: the initial embedding `[N, H]` of tokens.
    pub(crate) fn initial(&self, tokens: &[i64]) -> Result<Tensor> {
        let hidden = self.columns.size2()?.0;
        let mut places = BTreeMap::new();
        let place = |token: &i64| {
            let next = places.len() as i64;
            *places.entry(*token).or_insert(next)
        };
        let index: Vec<i64> = tokens.iter().map(place).collect();
        let mut rows = vec![0.0; places.len() * hidden as usize];
        for (token, place) in &places {
            let start = (place * hidden) as usize;
            let row = &mut rows[start..start + hidden as usize];
            self.initial.fill((token * hidden) as usize, row);
        }
        let device = self.columns.device();
        let rows = Tensor::f_from_slice(&rows)?.f_view([-1, hidden])?.f_to(device)?;
        let rows = rows.f_mul_scalar(self.scale)?;
        Ok(rows.f_index_select(0, &Tensor::f_from_slice(&index)?.f_to(device)?)?)
    }

    /// The coordinates `[B, T, W]` of an activation `[B, T, H]`.
    pub(crate) fn compress(&self, x: &Tensor, initial: &Tensor) -> Result<Tensor> {
        let within = x.f_to_kind(Kind::Float)?.f_sub(&initial.f_view_as(x)?)?;
        Ok(within.f_linear(&self.rows, None::<Tensor>)?)
    }

    /// The activation `[B, T, H]` with some coordinates `[B, T, W]`.
    pub(crate) fn expand(
        &self,
        coordinates: &Tensor,
        initial: &Tensor,
        kind: Kind,
    ) -> Result<Tensor> {
        let within = coordinates.f_linear(&self.columns, None::<Tensor>)?;
        Ok(within.f_add(&initial.f_view_as(&within)?)?.f_to_kind(kind)?)
    }

    /// The part of a constrained weight's gradient that its constraint leaves.
    pub(crate) fn gradient(&self, constraint: Constraint, gradient: &Tensor) -> Result<Tensor> {
        let wide = gradient.f_to_kind(Kind::Float)?;
        match constraint {
            Constraint::Columns => {
                let matrix = wide.f_reshape([self.columns.size2()?.0, -1])?;
                let within = self.columns.f_matmul(&self.rows.f_matmul(&matrix)?)?;
                Ok(within.f_view_as(&wide)?)
            }
            Constraint::Rows => Ok(wide.f_matmul(&self.columns)?.f_matmul(&self.rows)?),
        }
    }
}
