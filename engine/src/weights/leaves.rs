//! The weights that get gradients from a backward pass through a stage's layers.

use tch::Tensor;

use crate::error::Result;
use crate::model::own_slices::OwnSlices;
use crate::model::parameters::WeightPart;
use crate::weights::gradient::{Gradient, Piece};

/// A view that gets a gradient, and the index of its first element in the flat vector.
#[derive(Debug)]
pub(crate) struct Leaf {
    pub(crate) offset: usize,
    pub(crate) tensor: Tensor,
    pub(crate) part: WeightPart,
}

impl Leaf {
    /// The piece of the stage's gradient that is this view's.
    pub(crate) fn piece(&self, gradient: &Tensor) -> Result<Piece> {
        match self.part {
            WeightPart::Whole | WeightPart::Rows => Piece::dense(self.offset, gradient),
            WeightPart::Columns(stride) => Piece::columns(self.offset, stride, gradient),
        }
    }
}

/// Every view that gets a gradient from a backward pass through the layers: all trained ones but the embedding's and
/// the head's matrices.
#[derive(Debug, Default)]
pub(crate) struct Leaves {
    /// Those that products or all tokens read.
    leaves: Vec<Leaf>,
    /// Those of the residual stream in a run with slices: the same weights once for each group of tokens that this
    /// device has, so that the gradients from different groups stay apart.
    of_groups: Vec<Vec<Leaf>>,
}

impl Leaves {
    /// Adds a view that a group of tokens of this device reads, or products or all tokens if there is none.
    pub(crate) fn add(&mut self, leaf: Leaf, group: Option<usize>) {
        let Some(group) = group else { return self.leaves.push(leaf) };
        self.of_groups.resize_with(self.of_groups.len().max(group + 1), Vec::new);
        self.of_groups[group].push(leaf);
    }

    /// The views, in the order in which [`Self::counted`] expects their gradients.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.leaves.iter().chain(self.of_groups.iter().flatten()).map(|leaf| &leaf.tensor)
    }

    /// The gradients that this device counts, some weights' once for each group of tokens. All devices take part.
    pub(crate) fn counted(
        &self,
        own: &OwnSlices,
        gradients: &mut impl Iterator<Item = Gradient>,
    ) -> Result<Vec<(&Leaf, Gradient)>> {
        let all = self.leaves.iter().zip(gradients.by_ref());
        let counts = |leaf: &Leaf| leaf.part != WeightPart::Whole || own.counts_shared();
        let mut counted: Vec<_> = all.filter(|(leaf, _)| counts(leaf)).collect();
        let Some(weights) = self.of_groups.first() else { return Ok(counted) };
        let of_group = |group: &Vec<Leaf>| -> Result<Tensor> {
            let all = gradients.by_ref().take(group.len()).map(Gradient::into_whole);
            Ok(Tensor::f_cat(&all.collect::<Result<Vec<_>>>()?, 0)?)
        };
        let of_own = self.of_groups.iter().map(of_group).collect::<Result<Vec<_>>>()?;
        let of_all = own.all_parts(&of_own)?;
        if own.counts_shared() {
            for of_group in &of_all {
                let mut start = 0;
                for leaf in weights {
                    let length = leaf.tensor.size1()?;
                    counted.push((leaf, Gradient::Whole(of_group.f_narrow(0, start, length)?)));
                    start += length;
                }
            }
        }
        Ok(counted)
    }
}
