//! The devices of one peer as one engine.
//!
//! One device computes on the caller's thread. Several have a thread each, and host the same stages: as replicas,
//! so that passes of different microbatches run at the same time, each with its slices of every pass, or as replicas of
//! several devices that share slices. Or they divide the stages, each with some of its own.

mod additions;
mod audit;
mod several;
mod sums;
mod worker;

use std::ops::Range;
use std::path::Path;

use shoal_protocol::ids::{ClaimKey, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::manifest::{Manifest, Verdict};

use self::several::Several;
use crate::checkpoint::StageState;
use crate::device::collectives::DeviceLinks;
use crate::device::setup::{Device, DeviceChoice};
use crate::engine::Engine;
use crate::engine::footprint::Footprint;
use crate::engine::origin::Origin;
use crate::error::Result;
use crate::model::expert_loads::StageRouting;
use crate::optimizer::Update;
use crate::swap::{Means, SwapStats, Tiers};
use crate::train::all_reduce::AllReduce;

/// The threads of each of so many devices: an equal part, at least one.
#[must_use]
pub fn threads_of_each(threads: usize, devices: usize) -> usize {
    (threads / devices.max(1)).max(1)
}

/// What each of several devices has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arrangement {
    /// Passes of its own of every stage, or its slices of them.
    Passes,
    /// Some of the stages, in turn ([`Stage::device_in_turn`]).
    Stages,
}

/// The devices of one peer. Methods that [`Engine`] has too do the same, for all devices; their errors are the
/// same, and [`crate::EngineError::DeviceStopped`].
#[derive(Debug)]
pub struct Island(Devices);

#[derive(Debug)]
enum Devices {
    One(Box<Engine>),
    Several(Box<Several>),
}

impl From<Engine> for Island {
    fn from(engine: Engine) -> Self {
        Self(Devices::One(Box::new(engine)))
    }
}

impl Island {
    /// Hosts a span's stages on each of these devices, as [`Engine::new`] does. `threads` are those of one
    /// device.
    ///
    /// # Errors
    /// If a device does not work or has too little memory.
    ///
    /// # Panics
    /// If the run has no such stage, or there is no device.
    pub fn new(
        manifest: &Manifest,
        span: StageSpan,
        devices: &[DeviceChoice],
        threads: usize,
    ) -> Result<Self> {
        Self::swapping(manifest, span, (devices, threads), Tiers::default())
    }

    /// Like [`Island::new`], but the devices divide the stages.
    ///
    /// # Errors
    /// If a device does not work or has too little memory.
    ///
    /// # Panics
    /// If the run has no such stage, has slices or virtual workers, or there is no device.
    pub fn by_stage(
        manifest: &Manifest,
        span: StageSpan,
        devices: &[DeviceChoice],
        threads: usize,
    ) -> Result<Self> {
        let devices = (devices, Arrangement::Stages);
        let several = Several::new(manifest, span, devices, (threads, Tiers::default()))?;
        Ok(Self(Devices::Several(Box::new(several))))
    }

    /// Like [`Island::new`], with tiers below the devices, as [`Engine::swapping`]. Devices that compute several passes at
    /// the same time have none below the machine's memory.
    ///
    /// # Errors
    /// As [`Island::new`]; if the disk has no room.
    ///
    /// # Panics
    /// As [`Island::new`], and if the devices cannot have these tiers.
    pub fn swapping(
        manifest: &Manifest,
        span: StageSpan,
        (devices, threads): (&[DeviceChoice], usize),
        tiers: Tiers,
    ) -> Result<Self> {
        // Rounds run beside a worker that trains, where it has a thread of its own.
        let overlaps = manifest.inner.is_some() && manifest.steps_at_once() > 1;
        if let ([device], false) = (devices, overlaps) {
            let device = Device::open(*device, threads)?;
            let engine = match tiers.are_none() {
                true => Engine::new(manifest, span, device)?,
                false => Engine::swapping(manifest, span, device, tiers)?,
            };
            return Ok(engine.into());
        }
        let devices = (devices, Arrangement::Passes);
        let several = Several::new(manifest, span, devices, (threads, tiers))?;
        Ok(Self(Devices::Several(Box::new(several))))
    }

    /// The engine of the only device; `None` if there are several.
    pub fn only(&mut self) -> Option<&mut Engine> {
        match &mut self.0 {
            Devices::One(engine) => Some(engine),
            Devices::Several(_) => None,
        }
    }

    /// How devices that compute slices together exchange sums; `None` if each computes passes of its own.
    #[must_use]
    pub fn links(&self) -> Option<&DeviceLinks> {
        match &self.0 {
            Devices::One(_) => None,
            Devices::Several(several) => several.links(),
        }
    }

    /// The devices that compute a pass: a group of them, each its part of the slices, or one. `place` is which of the
    /// passes that run at the same time. All do the same work in the same order.
    #[must_use]
    pub fn devices_of_pass(&self, place: usize) -> Range<usize> {
        match &self.0 {
            Devices::One(_) => place..place + 1,
            Devices::Several(several) => several.devices_of_pass(place),
        }
    }

    /// Does work on a device's engine: at once if there is one device, otherwise in turn on the device's
    /// thread. `counts` is the microbatch whose gradient it may add to the device's accumulator.
    ///
    /// # Errors
    /// If the device's thread has ended.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn run(
        &mut self,
        device: usize,
        counts: Option<ClaimKey>,
        work: impl FnOnce(&mut Engine) + Send + 'static,
    ) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => {
                assert!(device == 0, "there is one device");
                work(engine);
                Ok(())
            }
            Devices::Several(several) => several.run(device, counts, Box::new(work)),
        }
    }

    /// Number of hosted stages.
    #[must_use]
    pub fn hosted(&self) -> usize {
        match &self.0 {
            Devices::One(engine) => engine.hosted(),
            Devices::Several(several) => several.hosted(),
        }
    }

    /// See [`Engine::swaps`].
    #[must_use]
    pub fn swaps(&self) -> bool {
        match &self.0 {
            Devices::One(engine) => engine.swaps(),
            Devices::Several(several) => several.swaps(),
        }
    }

    /// What was swapped; `None` if everything was in memory all the time.
    #[must_use]
    pub fn swap_stats(&self) -> Option<SwapStats> {
        match &self.0 {
            Devices::One(engine) => engine.swap_stats(),
            Devices::Several(several) => several.swap_stats(),
        }
    }

    /// What the tensors of each device take: of several, after the newest update or change of stages. What they share counts
    /// for the first of them.
    #[must_use]
    pub fn footprints(&self) -> Vec<Footprint> {
        match &self.0 {
            Devices::One(engine) => vec![engine.footprint()],
            Devices::Several(several) => several.footprints(),
        }
    }

    /// See [`Engine::fetch_ahead`].
    ///
    /// # Errors
    /// If a device's thread has ended.
    pub fn fetch_ahead(&mut self, stage: Stage, sums: Option<Step>) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => {
                engine.fetch_ahead(stage, sums);
                Ok(())
            }
            Devices::Several(several) => several.fetch_ahead(stage, sums),
        }
    }

    fn means(&self) -> Means<'_> {
        match &self.0 {
            Devices::One(engine) => engine.means(),
            Devices::Several(several) => several.means(),
        }
    }

    /// The all-reduce of a weight group. Where the stages are swapped, its mean gradient is too.
    ///
    /// # Errors
    /// If no stage of the group is hosted, or there is too little memory or disk.
    pub fn all_reduce(&self, weights: WeightGroup) -> Result<AllReduce> {
        self.means().all_reduce(weights)
    }

    /// Takes over the mean gradient of an all-reduce that began before the stages were swapped.
    ///
    /// # Errors
    /// If there is too little memory or disk.
    pub fn take_over(&self, weights: WeightGroup, all_reduce: &AllReduce) -> Result<()> {
        self.means().take_over(weights, all_reduce)
    }

    /// Brings the mean gradient of an all-reduce into memory. To be called before [`AllReduce::install`].
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn need_mean(&mut self, weights: WeightGroup) -> Result<()> {
        self.means().need(weights)
    }

    /// Forgets the values of an all-reduce's mean gradient, all of which are about to be replaced. To be
    /// called before [`AllReduce::begin`].
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn forget_mean(&mut self, weights: WeightGroup) -> Result<()> {
        self.means().forget(weights)
    }

    /// Brings what an update of a stage reads from outside its devices into memory, with all that a single device touches.
    /// To be called before [`AllReduce::mean`].
    ///
    /// # Errors
    /// If the stage is not hosted, or the file of swapped weights fails.
    pub fn need_update(&mut self, stage: Stage) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.need_update(stage),
            Devices::Several(several) => several.need_update(stage),
        }
    }

    /// Passes a step's sums of a range of a weight group, over all its hosted stages and all devices, to a
    /// function: i64, little-endian.
    ///
    /// # Errors
    /// If no stage of the group is hosted, or it has no such range.
    pub fn read_sums<T>(
        &mut self,
        weights: WeightGroup,
        step: Step,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        match &mut self.0 {
            Devices::One(engine) => engine.read_sums(weights, step, range, read),
            Devices::Several(several) => several.read_sums(weights, step, range, read),
        }
    }

    /// See [`Engine::apply`].
    ///
    /// # Errors
    /// If the stage is not hosted or a gradient has the wrong length.
    pub fn apply(&mut self, stage: Stage, update: &Update<'_>) -> Result<Verdict> {
        match &mut self.0 {
            Devices::One(engine) => engine.apply(stage, update),
            Devices::Several(several) => several.apply(stage, update),
        }
    }

    /// What the routers of a stage did in this peer's training passes before its newest update.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn take_routing(&mut self, stage: Stage) -> Result<StageRouting> {
        match &mut self.0 {
            Devices::One(engine) => engine.take_routing(stage),
            Devices::Several(several) => Ok(several.take_routing(stage)),
        }
    }

    /// A copy of a stage's weights and optimizer state.
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn state(&self, stage: Stage) -> Result<StageState> {
        match &self.0 {
            Devices::One(engine) => engine.state(stage),
            Devices::Several(several) => several.state(stage),
        }
    }

    /// See [`Engine::needs_base`].
    ///
    /// # Errors
    /// If the stage is not hosted.
    pub fn needs_base(&self, stage: Stage) -> Result<bool> {
        match &self.0 {
            Devices::One(engine) => engine.needs_base(stage),
            Devices::Several(several) => several.needs_base(stage),
        }
    }

    /// See [`Engine::load`].
    ///
    /// # Errors
    /// If the stage is not hosted, or a file is missing or does not fit.
    pub fn load(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.load(stage, origin),
            Devices::Several(several) => several.load(stage, origin),
        }
    }

    /// See [`Engine::host`].
    ///
    /// # Errors
    /// If a device has too little memory.
    pub fn host(&mut self, stage: Stage) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.host(stage),
            Devices::Several(several) => several.host(stage),
        }
    }

    /// Removes a stage and its microbatches in flight.
    ///
    /// # Errors
    /// If the file of swapped weights fails.
    pub fn leave(&mut self, stage: Stage) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.leave(stage),
            Devices::Several(several) => several.leave(stage),
        }
    }

    /// See [`Engine::restart`].
    ///
    /// # Errors
    /// If a device has too little memory, or a file is missing or does not fit.
    pub fn restart(&mut self, stage: Stage, origin: &Origin) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.restart(stage, origin),
            Devices::Several(several) => several.restart(stage, origin),
        }
    }

    /// See [`Engine::read_stage`].
    ///
    /// # Errors
    /// If the stage is not hosted, or the files are missing, damaged or belong to another stage.
    pub fn read_stage(&mut self, stage: Stage, version: Step, folder: &Path) -> Result<()> {
        match &mut self.0 {
            Devices::One(engine) => engine.read_stage(stage, version, folder),
            Devices::Several(several) => several.read_stage(stage, version, folder),
        }
    }
}
