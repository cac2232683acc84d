//! Weight gradients of a microbatch between its backward pass and their addition.

use shoal_protocol::ids::{ClaimKey, Stage};
use shoal_protocol::manifest::Manifest;

use super::StageModel;
use crate::error::{EngineError, Result};
use crate::weights::gradient::{Gradient, Piece};
use crate::weights::share::Share;

/// Weight gradients that are neither accumulated nor discarded, in pieces of the flat vector.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) pieces: Vec<Piece>,
    /// Those that are still factors, with the first element of each. They take at most the memory of the graph, whose
    /// parts they are or replace.
    pub(super) factors: Vec<(usize, Gradient)>,
}

impl From<Vec<Piece>> for Pending {
    fn from(pieces: Vec<Piece>) -> Self {
        Self { pieces, factors: Vec::new() }
    }
}

/// Whether a stage has a gradient to send, which products could delay, and is on the only device of a peer: several would
/// have more graphs and factors than microbatches in flight.
pub(super) fn may_leave_products(manifest: &Manifest, stage: Stage, share: &Share) -> bool {
    stage > Stage(0) && manifest.model.slices == 1 && share.is_whole()
}

impl StageModel {
    /// Whether backward passes leave products to [`Self::accumulate`], so that the gradient of the input is there sooner.
    /// Those whose graphs are computed again leave none, since there is room for one graph.
    pub(crate) fn leaves_products(&self) -> bool {
        self.may_leave_products && !self.recomputes
    }

    /// Adds the pending weight gradients of one microbatch to the accumulator. First computes those that the backward
    /// pass left.
    pub(crate) fn accumulate(&mut self, key: ClaimKey) -> Result<()> {
        let mut pending = self.pending.remove(&key).ok_or(EngineError::NotInFlight(key))?;
        let added = self.add(key, &mut pending);
        if added.is_err() {
            self.pending.insert(key, pending);
        }
        added
    }

    fn add(&self, key: ClaimKey, pending: &mut Pending) -> Result<()> {
        for (offset, gradient) in pending.factors.drain(..) {
            let gradient = self.within_constraint(offset, &gradient.into_whole()?)?;
            pending.pieces.push(Piece::dense(offset, &gradient)?);
        }
        let accumulator = &self.accumulators[self.turn(key.step)];
        match self.weights.blocks.own.are_all() {
            true => accumulator.add(key, &pending.pieces, &self.parameters),
            false => accumulator.add_part(key, &pending.pieces, &self.parameters),
        }
    }
}
