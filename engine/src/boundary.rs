//! Trained layers that make an activation narrow where it crosses from stage to stage.
//!
//! As in SWARM's compression-aware architectures (Ryabinin et al., arXiv 2301.11913, and its code):
//! the end of a stage normalises `[B, T, H]`, makes it `[B, T, W]` by a matrix or by the largest of
//! H / W neighbours, and normalises again; the beginning of the next makes it `[B, T, H]` by a
//! matrix. Nothing goes round the narrow place. Like the model's, norms and matrices have no bias,
//! which SWARM's have.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Boundary, BoundaryKind, Manifest};
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::{Shape, rms_norm};

/// What the names of boundaries' weights begin with.
const PREFIX: &str = "shoal.boundary.";

/// Name of a weight of the boundary after a stage.
pub(crate) fn weight_name(before: Stage, part: &str) -> String {
    format!("{PREFIX}{}.{part}.weight", before.0)
}

/// Whether a name is that of a boundary's weight.
pub(crate) fn owns(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Weights at the end of a stage.
#[derive(Debug)]
pub(crate) struct Compress {
    /// Of the norm before, `[H]`.
    pub(crate) input_norm: Tensor,
    /// `[W, H]`; without it, the largest of each H / W neighbours goes on.
    pub(crate) matrix: Option<Tensor>,
    /// Of the norm after, `[W]`.
    pub(crate) output_norm: Tensor,
}

impl Compress {
    /// Takes the weights one after the other; `cut` gives the next one of a shape.
    pub(crate) fn cut(
        boundary: Boundary,
        hidden: i64,
        mut cut: impl FnMut(&[i64]) -> Result<Tensor>,
    ) -> Result<Self> {
        let width = i64::from(boundary.width);
        Ok(Self {
            input_norm: cut(&[hidden])?,
            matrix: match boundary.kind {
                BoundaryKind::Bottleneck => Some(cut(&[width, hidden])?),
                BoundaryKind::Maxout => None,
            },
            output_norm: cut(&[width])?,
        })
    }
}

/// The boundary at the beginning of a stage, if anything is trained there.
pub(crate) fn before(manifest: &Manifest, stage: Stage) -> Option<Boundary> {
    manifest.model.boundary.filter(|_| stage > Stage(0))
}

/// The boundary at the end of a stage, if anything is trained there.
pub(crate) fn after(manifest: &Manifest, stage: Stage) -> Option<Boundary> {
    manifest.model.boundary.filter(|_| stage < manifest.last_stage())
}

/// `[B, T, H]` to `[B, T, W]`.
pub(crate) fn compress(x: &Tensor, weights: &Compress, shape: &Shape) -> Result<Tensor> {
    let normal = layer_norm(x, &weights.input_norm, shape)?;
    let narrow = match &weights.matrix {
        Some(matrix) => normal.f_linear(matrix, None::<Tensor>)?,
        None => {
            let (samples, tokens, _) = normal.size3()?;
            let width = weights.output_norm.size1()?;
            normal.f_view([samples, tokens, width, -1])?.f_max_dim(-1, false)?.0
        }
    };
    layer_norm(&narrow, &weights.output_norm, shape)
}

/// Layer normalisation (Ba et al., arXiv 1607.06450): unlike the root mean square alone it takes out
/// the mean, which the largest of several numbers always has.
fn layer_norm(x: &Tensor, weight: &Tensor, shape: &Shape) -> Result<Tensor> {
    let mean = x.f_mean_dim(Some(&[-1i64][..]), true, Kind::Float)?;
    let centred = x.f_sub(&mean)?.f_to_kind(x.kind())?;
    rms_norm(&centred, weight, shape.epsilon)
}

/// `[B, T, W]` to `[B, T, H]`, by a matrix `[H, W]`.
pub(crate) fn expand(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    Ok(x.f_linear(matrix, None::<Tensor>)?)
}
