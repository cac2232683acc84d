//! What the engine's work touches: brought to where it is needed, ahead of it where that is planned.

use shoal_protocol::ids::{Stage, Step};

use super::Engine;
use crate::error::Result;
use crate::swap::{Means, Place, Use};

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
    pub(crate) fn need(&self, stage: Stage, work: Use, changes: bool) -> Result<()> {
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

    /// The mean gradients of all-reduces, swapped where the stages are.
    pub(crate) fn means(&self) -> Means<'_> {
        let hosted = self.stages.keys().copied().collect();
        Means { manifest: &self.manifest, hosted, swap: self.swap.as_ref() }
    }

    /// Brings what an update of a stage touches into memory, with the mean gradients of its all-reduces. To
    /// be called before [`crate::AllReduce::mean`].
    ///
    /// # Errors
    /// If the stage is not hosted, or the file of swapped weights fails.
    pub fn need_update(&self, stage: Stage) -> Result<()> {
        self.forget_image(stage, Use::Update)?;
        let Some(swap) = &self.swap else { return Ok(()) };
        let places = self.update_of(stage)?;
        swap.borrow_mut().need(&places, true)?;
        // Updates go in the order of stages.
        let Some((next, _)) = self.stages.range(stage..).nth(1) else { return Ok(()) };
        let places = self.update_of(*next)?;
        swap.borrow_mut().fetch_ahead(&places)
    }

    /// Brings what a visit of a stage touches into memory beside the next pass, once that has what it needs
    /// itself: what passes of the stage read, and the accumulator of `sums` if there are backward passes
    /// among them. Does nothing where all is in memory, or the stage is not hosted.
    pub fn fetch_ahead(&self, stage: Stage, sums: Option<Step>) {
        let Some(hosted) = self.stages.get(&stage) else { return };
        if let Some(images) = &self.images {
            images.borrow_mut().plan(stage);
        }
        if let Some(swap) = &self.swap {
            let mut parts = hosted.touches(Use::Pass);
            parts.extend(sums.into_iter().flat_map(|step| hosted.touches(Use::Sums(step))));
            swap.borrow_mut().plan(parts);
        }
    }

    /// What an update of a stage touches, with the mean gradients of its weight groups.
    fn update_of(&self, stage: Stage) -> Result<Vec<Place>> {
        let mut places = self.stage(stage)?.touches(Use::Update);
        places.extend(self.means().of_stage(stage)?);
        Ok(places)
    }
}
