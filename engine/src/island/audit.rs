//! Audits on the devices of one peer: sums that are set aside, and their prints.

use std::ops::Range;

use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::message::{Challenge, SumsPrint, SumsPrinter};

use super::several::Several;
use super::{Devices, Island};
use crate::error::Result;
use crate::model::parameters::{group_elements, range_in_stage, range_within};

/// Elements that are printed at a time.
const PRINTED: usize = 1 << 20;

impl Island {
    /// See [`crate::Engine::set_sums_aside`].
    ///
    /// # Errors
    /// If the stage is not hosted, or there is too little memory.
    pub fn set_sums_aside(&mut self, stage: Stage, step: Step) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.set_sums_aside(stage, step),
            Devices::Several(several) => several.set_sums_aside(stage, step),
        }
    }

    /// See [`crate::Engine::put_sums_back`].
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn put_sums_back(&mut self, stage: Stage, step: Step) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.put_sums_back(stage, step),
            Devices::Several(several) => several.put_sums_back(stage, step),
        }
    }

    /// Whether a stage is hosted.
    #[must_use]
    pub fn hosts(&self, stage: Stage) -> bool {
        match &self.0 {
            Devices::One(engine) => engine.stage(stage).is_ok(),
            Devices::Several(several) => several.hosts(stage),
        }
    }

    /// The print of a step's sums of a weight group at one stage, over all devices.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn print_sums(
        &mut self,
        stage: Stage,
        weights: WeightGroup,
        step: Step,
        challenge: &Challenge,
    ) -> Result<SumsPrint> {
        let of = (weights, step);
        let mut printer = SumsPrinter::of(challenge);
        let mut print = |part: &[u8]| printer.add(bytemuck::cast_slice(part));
        let elements = match &self.0 {
            Devices::One(engine) => group_elements(engine.manifest(), weights),
            Devices::Several(several) => group_elements(several.manifest(), weights),
        };
        for start in (0..elements).step_by(PRINTED) {
            let range = start..elements.min(start + PRINTED);
            match &mut self.0 {
                Devices::One(engine) => engine.read_stage_sums(stage, of, range, &mut print)?,
                Devices::Several(several) => {
                    several.read_one_stage(stage, of, range, &mut print)?
                }
            }
        }
        Ok(printer.print())
    }
}

impl Several {
    pub(super) fn hosts(&self, stage: Stage) -> bool {
        self.sums.contains_key(&stage)
    }

    /// See [`crate::Engine::set_sums_aside`].
    fn set_sums_aside(&mut self, stage: Stage, step: Step) -> Result<()> {
        let turn = self.gather(stage, step)?;
        let lent = self.lend_sums(stage, step, true)?;
        let own = self.sums[&stage].each(turn, |sums| sums.set_aside())?;
        drop(lent);
        let before = self.aside.insert((stage, turn), own);
        assert!(before.is_none(), "sums are set aside once");
        Ok(())
    }

    /// See [`crate::Engine::put_sums_back`].
    fn put_sums_back(&mut self, stage: Stage, step: Step) -> Result<()> {
        let turn = self.gather(stage, step)?;
        let Some(own) = self.aside.remove(&(stage, turn)) else { return Ok(()) };
        let lent = self.lend_sums(stage, step, true)?;
        let mut own = own.iter();
        let put = self.sums[&stage]
            .each(turn, |sums| sums.put_back(own.next().expect("as many as were set aside")));
        drop(lent);
        put.map(|_| ())
    }

    /// See [`crate::engine::Engine::read_stage_sums`].
    fn read_one_stage<T>(
        &mut self,
        stage: Stage,
        (weights, step): (WeightGroup, Step),
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        self.gather(stage, step)?;
        let group = range_in_stage(self.manifest(), stage, weights);
        self.read_stage_sums(stage, step, range_within(&group, range)?, read)
    }
}
