//! Trained layers that compress an activation between stages.
//!
//! As in SWARM's compression-aware architectures (Ryabinin et al., arXiv 2301.11913, and its code),
//! the end of a stage normalises `[B, T, H]`, reduces it to `[B, T, W]` by a matrix or by the
//! maximum of H / W neighbours, and normalises again. The beginning of the next stage expands it to
//! `[B, T, H]` by a matrix. There is no residual path around the bottleneck. Norms and matrices
//! have no bias, as in the model; SWARM's have one. Boundaries without weights are in `subspace`.

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Boundary, BoundaryKind, Manifest};
use tch::{Kind, Tensor};

use crate::error::Result;
use crate::model::layer::Shape;
use crate::model::norm::rms_norm;

/// Prefix of the names of boundaries' weights.
const PREFIX: &str = "shoal.boundary.";

/// Name of a weight of the boundary after a stage.
pub(crate) fn weight_name(before: Stage, part: &str) -> String {
    format!("{PREFIX}{}.{part}.weight", before.0)
}

/// Whether a name belongs to a boundary's weight.
pub(crate) fn owns(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Weights at the end of a stage.
#[derive(Debug)]
pub(crate) struct Compress {
    /// Weight of the first norm, `[H]`.
    pub(crate) input_norm: Tensor,
    /// `[W, H]`; if `None`, the maximum of each H / W neighbours is used.
    pub(crate) matrix: Option<Tensor>,
    /// Weight of the second norm, `[W]`.
    pub(crate) output_norm: Tensor,
}

impl Compress {
    /// Takes the weights; `cut` returns the one of a name, in its shape.
    pub(crate) fn cut(
        boundary: Boundary,
        hidden: i64,
        mut cut: impl FnMut(&str, &[i64]) -> Result<Tensor>,
    ) -> Result<Self> {
        let width = i64::from(boundary.width);
        Ok(Self {
            input_norm: cut("input_norm", &[hidden])?,
            matrix: match boundary.kind {
                BoundaryKind::Bottleneck => Some(cut("compress", &[width, hidden])?),
                BoundaryKind::Maxout | BoundaryKind::Subspace => None,
            },
            output_norm: cut("output_norm", &[width])?,
        })
    }
}

/// The boundary at the beginning of a stage, if it is trained.
pub(crate) fn before(manifest: &Manifest, stage: Stage) -> Option<Boundary> {
    manifest.model.trained_boundary().filter(|_| stage > Stage(0))
}

/// The boundary at the end of a stage, if it is trained.
pub(crate) fn after(manifest: &Manifest, stage: Stage) -> Option<Boundary> {
    manifest.model.trained_boundary().filter(|_| stage < manifest.last_stage())
}

/// Compresses `[B, T, H]` to `[B, T, W]`.
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

/// Layer normalisation (Ba et al., arXiv 1607.06450): unlike root mean square normalisation it
/// removes the mean, which a maximum of several numbers always has.
fn layer_norm(x: &Tensor, weight: &Tensor, shape: &Shape) -> Result<Tensor> {
    let mean = x.f_mean_dim(Some(&[-1i64][..]), true, Kind::Float)?;
    let centred = x.f_sub(&mean)?.f_to_kind(x.kind())?;
    rms_norm(&centred, weight, shape.epsilon, 0.0)
}

/// Expands `[B, T, W]` to `[B, T, H]` by a matrix `[H, W]`.
pub(crate) fn expand(x: &Tensor, matrix: &Tensor) -> Result<Tensor> {
    Ok(x.f_linear(matrix, None::<Tensor>)?)
}
