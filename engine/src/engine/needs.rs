//! What the engine's work touches: brought to where it is needed, ahead of it where that is planned.

use shoal_protocol::ids::{Stage, Step, WeightGroup};

use super::Engine;
use crate::all_reduce::AllReduce;
use crate::error::{EngineError, Result};
use crate::parameters::group_elements;
use crate::swap::{Part, Place, Swap, Swappable, Use};

impl Engine {
    /// Brings what a pass of a stage reads to where it is computed, and begins to fetch what is planned.
    pub(super) fn need_pass(&self, stage: Stage) -> Result<()> {
        let Some(images) = &self.images else {
            let Some(swap) = &self.swap else { return Ok(()) };
            let mut swap = swap.borrow_mut();
            swap.need(&self.stage(stage)?.touches(Use::Pass), false)?;
            return swap.fetch_planned();
        };
        let mut images = images.borrow_mut();
        if !images.has(stage) {
            self.need(stage, Use::Pass, false)?;
        }
        images.need(stage)?;
        let Some(next) = images.fetched_beside(stage) else { return Ok(()) };
        if let Some(swap) = &self.swap {
            let mut swap = swap.borrow_mut();
            swap.fetch_planned()?;
            if !swap.are_here(&self.stage(next)?.touches(Use::Pass)) {
                return Ok(());
            }
        }
        images.fetch(next)
    }

    /// Brings what this work on a stage touches into memory.
    pub(super) fn need(&self, stage: Stage, work: Use, changes: bool) -> Result<()> {
        let hosted = self.stage(stage)?;
        if changes {
            self.forget_image(stage, work)?;
        }
        match &self.swap {
            Some(swap) => swap.borrow_mut().need(&hosted.touches(work), changes),
            None => Ok(()),
        }
    }

    /// Drops what the device has of a stage whose weights this work changes.
    pub(super) fn forget_image(&self, stage: Stage, work: Use) -> Result<()> {
        match (&self.images, work) {
            (Some(images), Use::Update | Use::Frozen) => images.borrow_mut().drop_values(stage),
            _ => Ok(()),
        }
    }

    /// The all-reduce of a weight group. Where the stages are swapped, its mean gradient is too.
    ///
    /// # Errors
    /// If no stage of the group is hosted, or there is too little memory or disk.
    pub fn all_reduce(&self, weights: WeightGroup) -> Result<AllReduce> {
        let all_reduce = AllReduce::new(&self.manifest, group_elements(&self.manifest, weights))?;
        if let Some(swap) = &self.swap {
            let (stage, part) = self.mean_of(weights)?;
            let tensor = all_reduce.mean_tensor();
            swap.borrow_mut().adopt(stage, vec![Swappable { part, tensor, is_zero: true }])?;
        }
        Ok(all_reduce)
    }

    /// Takes over the mean gradient of an all-reduce that began before the stages were swapped.
    ///
    /// # Errors
    /// If there is too little memory or disk.
    pub fn take_over(&self, weights: WeightGroup, all_reduce: &AllReduce) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let (stage, part) = self.mean_of(weights)?;
        let mut swap = swap.borrow_mut();
        if swap.holds((stage, part)) {
            return Ok(());
        }
        let tensor = all_reduce.mean_tensor();
        swap.adopt(stage, vec![Swappable { part, tensor, is_zero: false }])
    }

    /// Brings the mean gradient of an all-reduce into memory. To be called before [`AllReduce::install`].
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn need_mean(&self, weights: WeightGroup) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        swap.borrow_mut().need(&[self.mean_of(weights)?], true)
    }

    /// Brings what an update of a stage touches into memory, with the mean gradients of its all-reduces. To
    /// be called before [`AllReduce::mean`].
    ///
    /// # Errors
    /// If the stage is not hosted, or the file of swapped weights fails.
    pub fn need_update(&self, stage: Stage) -> Result<()> {
        self.forget_image(stage, Use::Update)?;
        let Some(swap) = &self.swap else { return Ok(()) };
        let mut swap = swap.borrow_mut();
        let places = self.update_of(stage, &swap)?;
        swap.need(&places, true)?;
        // Updates go in the order of stages.
        let Some((next, _)) = self.stages.range(stage..).nth(1) else { return Ok(()) };
        let places = self.update_of(*next, &swap)?;
        swap.fetch_ahead(&places)
    }

    /// Forgets the values of an all-reduce's mean gradient, all of which are about to be replaced. To be
    /// called before [`AllReduce::begin`].
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn forget_mean(&self, weights: WeightGroup) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        swap.borrow_mut().clear(self.mean_of(weights)?)
    }

    /// The place of a weight group's mean gradient.
    pub(super) fn mean_of(&self, weights: WeightGroup) -> Result<Place> {
        let mut stages = self.manifest.stages_of(weights);
        let stage = stages.find(|stage| self.stages.contains_key(stage));
        let stage = stage.ok_or(EngineError::NotHosted(Stage(0)))?;
        Ok((stage, Part::Mean(weights)))
    }

    /// Brings what a visit of a stage touches into memory beside the next pass, once that has what it needs
    /// itself: what passes of the stage read, and the accumulator of `sums` if there are backward passes
    /// among them. Does nothing where all is in memory, or the stage is not hosted.
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn fetch_ahead(&mut self, stage: Stage, sums: Option<Step>) -> Result<()> {
        self.plan_image(stage);
        let Some(hosted) = self.stages.get(&stage) else { return Ok(()) };
        let Some(swap) = &self.swap else { return Ok(()) };
        let mut parts = hosted.touches(Use::Pass);
        parts.extend(sums.into_iter().flat_map(|step| hosted.touches(Use::Sums(step))));
        swap.borrow_mut().plan(parts)
    }

    /// Plans to copy what passes of a stage read to the device beside the next pass.
    pub(crate) fn plan_image(&self, stage: Stage) {
        if let Some(images) = &self.images
            && self.stages.contains_key(&stage)
        {
            images.borrow_mut().plan(stage);
        }
    }

    pub(super) fn need_mean_if_held(&self, weights: WeightGroup) -> Result<()> {
        let Some(swap) = &self.swap else { return Ok(()) };
        let (mean, mut swap) = (self.mean_of(weights)?, swap.borrow_mut());
        if swap.holds(mean) { swap.need(&[mean], true) } else { Ok(()) }
    }

    /// What an update of a stage touches, with the mean gradients of its weight groups.
    pub(super) fn update_of(&self, stage: Stage, swap: &Swap) -> Result<Vec<Place>> {
        let mut places = self.stage(stage)?.touches(Use::Update);
        for weights in self.manifest.groups_of(stage) {
            places.extend(Some(self.mean_of(weights)?).filter(|mean| swap.holds(*mean)));
        }
        Ok(places)
    }
}
