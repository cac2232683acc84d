//! The tensors that each kind of work on a stage touches.

use shoal_protocol::ids::{Stage, Step};

use super::{Part, Place, Swappable};
use crate::train::stage::StageModel;
use crate::weights::image::{Copied, Image};
use crate::weights::version::Weights;

/// Work on a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// A forward or a backward pass.
    Pass,
    /// Reads or changes the accumulator of a step.
    Sums(Step),
    /// An update, or the replacement of all values.
    Update,
    /// Reads weights and what the optimizer keeps.
    State,
    /// Replaces the frozen weights.
    Frozen,
}

impl StageModel {
    /// All tensors that can be swapped.
    pub(crate) fn swappable(&self, is_fresh: bool) -> Vec<Swappable> {
        let whole = |part, tensor: &tch::Tensor, is_zero| Swappable {
            part,
            tensor: tensor.shallow_clone(),
            is_zero,
        };
        let mut all = Vec::new();
        for (index, weights) in self.versions().enumerate() {
            all.push(whole(Part::Weights(index), &weights.flat, false));
            all.extend(weights.copied().map(|narrow| whole(Part::Narrow(index), narrow, false)));
            let embedding = weights.copied_embedding();
            all.extend(embedding.map(|rows| whole(Part::Embedding(index), rows, false)));
        }
        all.extend(self.frozen.iter().map(|frozen| whole(Part::Frozen, &frozen.flat, false)));
        let slots = self.optimizer.slots.iter();
        all.extend(slots.map(|one| whole(Part::Slot(one.layout.slot), &one.flat, is_fresh)));
        let sums = self.accumulators.iter().enumerate();
        all.extend(sums.map(|(turn, of)| whole(Part::Sums(turn), &of.tensor(), is_fresh)));
        // A device whose share of a stage is nothing has no memory for it.
        all.retain(|one| one.tensor.numel() > 0);
        all
    }

    /// All images that passes read.
    pub(crate) fn images(&self) -> Vec<Copied> {
        let trained = self.versions().filter_map(Weights::image);
        let frozen = self.frozen.iter().filter_map(|frozen| frozen.image.as_ref());
        trained.chain(frozen).flat_map(Image::handles).collect()
    }

    /// The tensors that this work touches.
    pub(crate) fn touches(&self, work: Use) -> Vec<Place> {
        let is_there = |part: &Part| match part {
            Part::Weights(_) => !self.weights.kept().is_empty(),
            Part::Sums(turn) => self.accumulators[*turn].tensor().numel() > 0,
            _ => true,
        };
        let parts = self.parts_of(work).into_iter().filter(is_there);
        parts.map(|part| (self.stage, part)).collect()
    }

    fn parts_of(&self, work: Use) -> Vec<Part> {
        let versions = 0..self.versions().count();
        let narrow = self.weights.copied().is_some();
        let embedding = self.weights.copied_embedding().is_some();
        let weights = versions.clone().map(Part::Weights);
        let copies = |index| {
            let rows = embedding.then_some(Part::Embedding(index));
            narrow.then_some(Part::Narrow(index)).into_iter().chain(rows)
        };
        let copies = versions.flat_map(copies);
        let slots = self.optimizer.slots.iter().map(|one| Part::Slot(one.layout.slot));
        match work {
            Use::Pass => {
                // An embedding that is trained is read in f32.
                let reads_flat = !narrow || self.stage == Stage(0) && !self.weights.copies_all();
                let frozen = self.frozen.iter().map(|_| Part::Frozen);
                weights.filter(|_| reads_flat).chain(copies).chain(frozen).collect()
            }
            Use::Sums(step) => vec![Part::Sums(self.turn(step))],
            Use::Update => weights.chain(copies).chain(slots).collect(),
            Use::State => weights.chain(slots).collect(),
            Use::Frozen => self.frozen.iter().map(|_| Part::Frozen).collect(),
        }
    }

    /// The versions of the weights. An update makes the two change places, so all work that needs one
    /// needs both.
    pub(crate) fn versions(&self) -> impl Iterator<Item = &Weights> {
        [&self.weights].into_iter().chain(&self.stale)
    }
}
