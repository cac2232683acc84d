//! Boundaries of kind `subspace` (Ramasinghe et al., arXiv 2506.01260): the residual stream less the
//! embedding of its token stays in a fixed subspace, so its coordinates there are all that crosses a stage
//! boundary.
//!
//! With `R` the orthonormal columns of the subspace, `[H, W]`, and `e` the initial embedding of a token, an
//! activation `x` crosses as `c = Rᵀ(x - e)`, and `x = Rc + e` on the other side. Nothing but rounding is
//! lost, since all that joins the residual stream before the last boundary is constrained:
//!
//! - the matrices (and biases) whose outputs are added to the stream, of all stages but the last: their
//!   columns lie in the subspace, `W = RRᵀW`;
//! - the embedding: its difference from the initial one does, `E = E₀ + (E - E₀)RRᵀ`. Every stage draws the
//!   rows of `E₀` that a microbatch reads from the seed.
//!
//! The constraint ([`Subspace::constrain`]) is a part of every update, whatever the optimizer, and of drawing
//! the initial weights. The gradients of constrained weights are projected in the same way as they arise, so
//! that a gradient does not depend on the number of boundaries behind it. The layers of the last stage are
//! free: no boundary follows.

mod basis;
mod projection;

use std::ops::Range;

use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::Manifest;
use tch::Tensor;

pub(crate) use self::projection::Projection;
use crate::device::tensor::elements_mut;
use crate::error::Result;
use crate::model::layer_table::joins_stream;
use crate::model::parameters::{EMBEDDING, Parameter, parameters, source_of};
use crate::numeric::normal_stream::NormalStream;
use crate::numeric::product::{Symmetry, multiply};

/// Rows of an embedding that are constrained together.
const ROWS: usize = 256;

/// The subspace of a run, and the weights of a stage that stay in it.
#[derive(Debug)]
pub(crate) struct Subspace {
    /// `R`: `[H, W]`, row-major.
    columns: Vec<f32>,
    /// Its transpose.
    rows: Vec<f32>,
    hidden: usize,
    width: usize,
    /// In the order of the flat vector.
    constrained: Vec<(Parameter, Constraint)>,
    initial: NormalStream,
}

/// The part of a weight that lies in the subspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Constraint {
    /// The columns of a matrix `[H, inputs]`, or a vector `[H]`.
    Columns,
    /// The differences of rows `[V, H]` from the initial embedding's.
    Rows,
}

impl Constraint {
    /// How a weight of a stage is constrained; `None` is free.
    fn of(manifest: &Manifest, stage: Stage, parameter: &Parameter) -> Option<Self> {
        let name = &parameter.name;
        if source_of(parameter, manifest.model.block.tied) == EMBEDDING {
            return Some(Self::Rows);
        }
        (joins_stream(name) && stage < manifest.last_stage()).then_some(Self::Columns)
    }
}

impl Subspace {
    /// The subspace of a run that has one, for a stage.
    pub(crate) fn of(manifest: &Manifest, stage: Stage) -> Option<Self> {
        let width = manifest.model.subspace()? as usize;
        let columns = basis::draw(manifest, width);
        let constrained = parameters(manifest, stage).into_iter().filter_map(|parameter| {
            let constraint = Constraint::of(manifest, stage, &parameter)?;
            Some((parameter, constraint))
        });
        Some(Self {
            rows: crate::numeric::product::transpose(&columns, width),
            columns,
            hidden: manifest.model.hidden as usize,
            width,
            constrained: constrained.collect(),
            initial: NormalStream::of_weight(manifest, EMBEDDING),
        })
    }

    /// The constraint of the weight that has this element of the flat vector; `None` is free.
    pub(crate) fn constraint_at(&self, offset: usize) -> Option<Constraint> {
        let has = |parameter: &Parameter| parameter.range().contains(&offset);
        let found = self.constrained.iter().find(|(parameter, _)| has(parameter));
        found.map(|(_, constraint)| *constraint)
    }

    /// Replaces the constrained weights by their nearest values within the constraint. The bits depend on
    /// no processor, device or number of threads.
    pub(crate) fn constrain(&self, flat: &mut [f32], threads: usize) {
        let all = 0..flat.len();
        self.constrain_within(all, flat, threads);
    }

    /// Like [`Self::constrain`], of whole weights that are a range of the flat vector.
    fn constrain_within(&self, place: Range<usize>, weights: &mut [f32], threads: usize) {
        assert_eq!(place.len(), weights.len(), "the range is that of the weights");
        let mut jobs = Vec::new();
        let (mut rest, mut end) = (weights, place.start);
        let within = self.constrained.iter().filter(|(one, _)| place.contains(&one.offset));
        for (parameter, constraint) in within {
            let range = parameter.range();
            let part = rest.split_off_mut(range.start - end..).expect("in ascending order");
            let (weights, after) = part.split_at_mut(range.len());
            (rest, end) = (after, range.end);
            match constraint {
                Constraint::Columns => jobs.push(Job::Columns(weights)),
                Constraint::Rows => {
                    let blocks = weights.chunks_mut(ROWS * self.hidden).enumerate();
                    jobs.extend(blocks.map(|(index, rows)| Job::Rows(index * ROWS, rows)));
                }
            }
        }
        let mut shares: Vec<Vec<Job<'_>>> = Vec::new();
        shares.resize_with(threads.max(1), Vec::new);
        let count = shares.len();
        for (index, job) in jobs.into_iter().enumerate() {
            shares[index % count].push(job);
        }
        let own = shares.pop();
        std::thread::scope(|scope| {
            for share in shares.into_iter().filter(|share| !share.is_empty()) {
                scope.spawn(move || share.into_iter().for_each(|job| self.run(job)));
            }
            own.into_iter().flatten().for_each(|job| self.run(job));
        });
    }

    /// Constrains whole weights that are a range of the flat vector, on any device.
    pub(crate) fn constrain_tensor(
        &self,
        place: Range<usize>,
        weights: &mut Tensor,
        threads: usize,
    ) -> Result<()> {
        if place.is_empty() {
            // A device whose share is nothing has no memory for it.
            return Ok(());
        }
        if weights.device() == tch::Device::Cpu {
            self.constrain_within(place, elements_mut(weights), threads);
            return Ok(());
        }
        let mut copied = weights.f_to(tch::Device::Cpu)?;
        self.constrain_within(place, elements_mut(&mut copied), threads);
        Ok(weights.f_copy_(&copied)?)
    }

    fn run(&self, job: Job<'_>) {
        let (hidden, width) = (self.hidden, self.width);
        match job {
            Job::Columns(weights) => {
                let mut coordinates = vec![0.0; weights.len() / hidden * width];
                multiply(&self.rows, weights, &mut coordinates, hidden, Symmetry::None, 1);
                multiply(&self.columns, &coordinates, weights, width, Symmetry::None, 1);
            }
            Job::Rows(first, rows) => {
                let mut initial = vec![0.0; rows.len()];
                self.initial.fill(first * hidden, &mut initial);
                rows.iter_mut().zip(&initial).for_each(|(row, initial)| *row -= initial);
                let mut coordinates = vec![0.0; rows.len() / hidden * width];
                multiply(rows, &self.columns, &mut coordinates, hidden, Symmetry::None, 1);
                multiply(&coordinates, &self.rows, rows, width, Symmetry::None, 1);
                rows.iter_mut().zip(&initial).for_each(|(row, initial)| *row += initial);
            }
        }
    }
}

/// Weights that one thread constrains.
enum Job<'a> {
    Columns(&'a mut [f32]),
    /// The number of the first row, and some rows.
    Rows(usize, &'a mut [f32]),
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::{Boundary, BoundaryKind};

    use super::*;
    use crate::testing;
    use crate::weights::init::initial_weights;

    fn manifest() -> Manifest {
        let mut manifest = testing::manifest();
        manifest.training.stages = 2;
        // An embedding of several blocks, the last one short.
        manifest.model.vocabulary = 2 * ROWS as u32 + 44;
        manifest.model.boundary = Some(Boundary { kind: BoundaryKind::Subspace, width: 3 });
        manifest
    }

    #[test]
    fn the_initial_embedding_is_that_of_a_plain_model() {
        let constrained = manifest();
        let plain = Manifest {
            model: shoal_protocol::manifest::Model { boundary: None, ..constrained.model.clone() },
            ..constrained.clone()
        };
        let [constrained, plain] = [&constrained, &plain].map(|run| initial_weights(run, Stage(0)));
        let embedding = 8 * (2 * ROWS + 44);
        assert_eq!(constrained[..embedding], plain[..embedding]);
        assert_ne!(constrained[embedding..], plain[embedding..]);
    }

    #[test]
    fn threads_change_no_bit_and_what_lies_within_stays() {
        let manifest = manifest();
        let subspace = Subspace::of(&manifest, Stage(0)).expect("it has one");
        let mut flat = initial_weights(&manifest, Stage(0));
        flat.iter_mut()
            .enumerate()
            .for_each(|(place, weight)| *weight += (place % 7) as f32 * 1e-3);
        let constrained = [1, 2, 5].map(|threads| {
            let mut flat = flat.clone();
            subspace.constrain(&mut flat, threads);
            flat
        });
        assert!(constrained[0] == constrained[1] && constrained[0] == constrained[2]);
        assert_ne!(constrained[0], flat);
        let mut again = constrained[0].clone();
        subspace.constrain(&mut again, 1);
        let moved = again.iter().zip(&constrained[0]).map(|(one, other)| (one - other).abs());
        assert!(moved.fold(0.0, f32::max) < 1e-8, "only rounding is left");
    }
}
