//! The mean gradients of all-reduces, which are swapped where stages are.

use std::cell::RefCell;
use std::collections::BTreeSet;

use shoal_protocol::ids::{Stage, WeightGroup};
use shoal_protocol::manifest::Manifest;

use super::{Part, Place, Swap, Swappable};
use crate::error::{EngineError, Result};
use crate::train::all_reduce::AllReduce;

/// The mean gradients of a peer's stages.
pub(crate) struct Means<'a> {
    pub(crate) manifest: &'a Manifest,
    /// The stages that the peer hosts.
    pub(crate) hosted: BTreeSet<Stage>,
    /// Where they are swapped; `None` where they stay in memory.
    pub(crate) swap: Option<&'a RefCell<Swap>>,
}

impl Means<'_> {
    /// The all-reduce of a weight group.
    pub(crate) fn all_reduce(&self, weights: WeightGroup) -> Result<AllReduce> {
        let all_reduce = AllReduce::of_group(self.manifest, weights)?;
        self.adopt(weights, &all_reduce, true)?;
        Ok(all_reduce)
    }

    /// Takes over the mean gradient of an all-reduce that began before the stages were swapped.
    pub(crate) fn take_over(&self, weights: WeightGroup, all_reduce: &AllReduce) -> Result<()> {
        match self.place_if_swapped(weights)? {
            Some(_) => Ok(()),
            None => self.adopt(weights, all_reduce, false),
        }
    }

    fn adopt(&self, weights: WeightGroup, all_reduce: &AllReduce, is_zero: bool) -> Result<()> {
        let Some(swap) = self.swap else { return Ok(()) };
        let (stage, part) = self.place(weights)?;
        let tensor = all_reduce.mean_tensor();
        swap.borrow_mut().adopt(stage, vec![Swappable { part, tensor, is_zero }])
    }

    /// Brings a mean gradient into memory. To be called before [`AllReduce::install`].
    pub(crate) fn need(&self, weights: WeightGroup) -> Result<()> {
        let Some(swap) = self.swap else { return Ok(()) };
        swap.borrow_mut().need(&[self.place(weights)?], true)
    }

    /// Brings a mean gradient into memory, if it is swapped.
    pub(crate) fn need_if_swapped(&self, weights: WeightGroup) -> Result<()> {
        match self.place_if_swapped(weights)? {
            Some(_) => self.need(weights),
            None => Ok(()),
        }
    }

    /// Forgets the values of a mean gradient, all of which are about to be replaced. To be called before
    /// [`AllReduce::begin`].
    pub(crate) fn forget(&self, weights: WeightGroup) -> Result<()> {
        let Some(swap) = self.swap else { return Ok(()) };
        swap.borrow_mut().clear(self.place(weights)?)
    }

    /// The places of a stage's mean gradients that are swapped.
    pub(crate) fn of_stage(&self, stage: Stage) -> Result<Vec<Place>> {
        let groups = self.manifest.groups_of(stage);
        groups.filter_map(|weights| self.place_if_swapped(weights).transpose()).collect()
    }

    /// The place of a mean gradient, if it was handed over.
    pub(crate) fn place_if_swapped(&self, weights: WeightGroup) -> Result<Option<Place>> {
        let Some(swap) = self.swap else { return Ok(None) };
        let place = self.place(weights)?;
        Ok(Some(place).filter(|place| swap.borrow().holds(*place)))
    }

    /// The place of a mean gradient: at the first hosted stage of its weight group.
    fn place(&self, weights: WeightGroup) -> Result<Place> {
        let mut stages = self.manifest.stages_of(weights);
        let stage = stages.find(|stage| self.hosted.contains(stage));
        let stage = stage.ok_or(EngineError::NotHosted(Stage(0)))?;
        Ok((stage, Part::Mean(weights)))
    }
}
