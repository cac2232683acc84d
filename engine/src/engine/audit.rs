//! Sums that are set aside while work of others is computed again.

use std::ops::Range;

use shoal_protocol::ids::{Stage, Step, WeightGroup};

use super::Engine;
use crate::error::Result;
use crate::swap::Use;

impl Engine {
    /// Sets a step's sums of a stage aside, so that it has none until [`Engine::put_sums_back`]: a copy in the machine's
    /// memory, of eight bytes a weight.
    ///
    /// # Errors
    /// If the stage is not hosted, or there is too little memory.
    ///
    /// # Panics
    /// If they are aside already.
    pub fn set_sums_aside(&mut self, stage: Stage, step: Step) -> Result<()> {
        self.need(stage, Use::Sums(step), true)?;
        let turn = self.stage(stage)?.turn(step);
        let own = self.stage(stage)?.accumulators[turn].set_aside()?;
        let before = self.aside.insert((stage, turn), own);
        assert!(before.is_none(), "sums are set aside once");
        Ok(())
    }

    /// Puts the sums back that were set aside, in the place of those that are there.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn put_sums_back(&mut self, stage: Stage, step: Step) -> Result<()> {
        let turn = self.stage(stage)?.turn(step);
        let Some(own) = self.aside.remove(&(stage, turn)) else { return Ok(()) };
        self.need(stage, Use::Sums(step), true)?;
        self.stage(stage)?.accumulators[turn].put_back(&own)
    }

    /// Passes a step's sums of a range of a weight group at one stage to a function: i64, little-endian.
    ///
    /// # Errors
    /// If the stage is not hosted, or the group has no such range.
    pub(crate) fn read_stage_sums<T>(
        &self,
        stage: Stage,
        (weights, step): (WeightGroup, Step),
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        self.need(stage, Use::Sums(step), false)?;
        self.stage(stage)?.read_sums(weights, step, range, read)
    }
}
