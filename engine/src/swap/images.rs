//! The memory of a device that has what passes read of a stage only while they run.
//!
//! Nothing is written back: the state of stages is in the machine's memory, where it is updated (ZeRO-Offload, Ren
//! et al., arXiv 2101.06840). A GPU copies beside its computation.

use std::collections::BTreeMap;
use std::time::Instant;

use shoal_protocol::ids::Stage;
use shoal_protocol::units::{Bytes, Rate};
use tch::{Device, Tensor};

use super::SwapStats;
use crate::device::shim::set_memory;
use crate::device::streams::{CopyEnd, CopyStream};
use crate::device::tensor::byte_count;
use crate::error::{EngineError, Result};
use crate::weights::image::Copied;

/// Bytes that a measurement copies.
const MEASURED: usize = 64 << 20;

/// Images of all hosted stages' weights, with the device's memory that they may take.
#[derive(Debug)]
pub(crate) struct Images {
    budget: usize,
    held: usize,
    /// The most that was held at once.
    most: usize,
    /// Where copies are queued; `None` on a processor, which copies at once.
    stream: Option<CopyStream>,
    stages: BTreeMap<Stage, StageImage>,
    needs: u64,
    /// The stage to fetch beside the next pass.
    planned: Option<Stage>,
    stats: SwapStats,
}

#[derive(Debug)]
struct StageImage {
    tensors: Vec<Copied>,
    bytes: usize,
    /// The device's memory of each, if they are there or on their way.
    memory: Option<Vec<Tensor>>,
    /// The end of copies that are on their way.
    coming: Option<CopyEnd>,
    /// The need for which it was last used.
    used: u64,
}

impl Images {
    /// Images on a device, in so much of its memory.
    pub(crate) fn new(device: Device, budget: Bytes) -> Result<Self> {
        let stream = match device {
            Device::Cuda(index) => Some(CopyStream::new(index)?),
            _ => None,
        };
        Ok(Self {
            budget: usize::try_from(budget.0).unwrap_or(usize::MAX),
            held: 0,
            most: 0,
            stream,
            stages: BTreeMap::new(),
            needs: 0,
            planned: None,
            stats: SwapStats::default(),
        })
    }

    /// The most that images took on the device at once.
    pub(crate) fn most(&self) -> Bytes {
        Bytes(self.most as u64)
    }

    pub(crate) fn stats(&self) -> SwapStats {
        self.stats
    }

    /// Takes over the memory of a stage's images, in place of earlier ones.
    pub(crate) fn adopt(&mut self, stage: Stage, mut tensors: Vec<Copied>) -> Result<()> {
        self.forget(stage)?;
        take_memory(&mut tensors)?;
        let bytes = tensors.iter().map(|one| byte_count(&one.image)).sum();
        let image = StageImage { tensors, bytes, memory: None, coming: None, used: self.needs };
        self.stages.insert(stage, image);
        Ok(())
    }

    /// Forgets a stage.
    pub(crate) fn forget(&mut self, stage: Stage) -> Result<()> {
        self.drop_values(stage)?;
        self.stages.remove(&stage);
        Ok(())
    }

    /// Drops the values of a stage, which are about to change where they are kept, or have to make room.
    pub(crate) fn drop_values(&mut self, stage: Stage) -> Result<()> {
        let Some(image) = self.stages.get_mut(&stage) else { return Ok(()) };
        if let Some(coming) = image.coming.take() {
            coming.wait()?;
        }
        if image.memory.take().is_some() {
            self.held -= image.bytes;
            take_memory(&mut image.tensors)?;
        }
        Ok(())
    }

    /// Whether a stage's values are there, or on their way.
    pub(crate) fn has(&self, stage: Stage) -> bool {
        self.stages.get(&stage).is_some_and(|image| image.memory.is_some())
    }

    /// Lets passes of a stage begin: what the device computes from now on has its values.
    pub(crate) fn need(&mut self, stage: Stage) -> Result<()> {
        self.needs += 1;
        let needs = self.needs;
        self.image_mut(stage).used = needs;
        let start = Instant::now();
        let is_late = !self.has(stage);
        if is_late {
            self.fetch(stage)?;
        }
        let image = self.stages.get_mut(&stage).expect("the stage was handed over");
        if let (Some(stream), Some(coming)) = (&self.stream, image.coming.take()) {
            if is_late || !coming.is_over()? {
                self.stats.late += Bytes(image.bytes as u64);
            }
            stream.join(&coming)?;
        } else if is_late {
            self.stats.late += Bytes(image.bytes as u64);
            self.stats.waited += start.elapsed();
        }
        Ok(())
    }

    /// Notes a stage to fetch beside the next pass, in place of an earlier one.
    pub(crate) fn plan(&mut self, stage: Stage) {
        self.planned = Some(stage);
    }

    /// The stage to fetch beside passes of this one: the noted one, if it has room beside it; or else the next, if that
    /// takes the place of none.
    pub(crate) fn fetched_beside(&self, stage: Stage) -> Option<Stage> {
        let bytes = |stage: Stage| self.stages.get(&stage).map_or(0, |image| image.bytes);
        let is_away = |stage: &Stage| self.stages.contains_key(stage) && !self.has(*stage);
        let planned = self.planned.filter(is_away);
        let planned = planned.filter(|next| bytes(*next) + bytes(stage) <= self.budget);
        let next = || self.stages.range(stage..).nth(1).map(|(next, _)| *next);
        let fits = |next: &Stage| self.held + bytes(*next) <= self.budget;
        planned.or_else(|| next().filter(is_away).filter(fits))
    }

    /// Begins to copy a stage's values from where they are kept.
    pub(crate) fn fetch(&mut self, stage: Stage) -> Result<()> {
        let bytes = self.image_mut(stage).bytes;
        while self.held + bytes > self.budget {
            let here = self.stages.iter().filter(|(_, image)| image.memory.is_some());
            let victim = here.filter(|(other, image)| image.used < self.needs && **other != stage);
            let Some(victim) = victim.min_by_key(|(_, image)| image.used).map(|(at, _)| *at) else {
                let (needs, has) = (Bytes(bytes as u64), Bytes(self.budget as u64));
                return Err(EngineError::DeviceBudget { needs, has });
            };
            self.drop_values(victim)?;
        }
        let image = self.stages.get_mut(&stage).expect("the stage was handed over");
        let mut memory = Vec::with_capacity(image.tensors.len());
        for Copied { image, .. } in &mut image.tensors {
            let bytes = byte_count(image);
            let own = Tensor::f_empty([bytes as i64], (tch::Kind::Uint8, image.device()))?;
            set_memory(image, own.data_ptr(), bytes)?;
            memory.push(own);
        }
        image.memory = Some(memory);
        self.held += bytes;
        self.most = self.most.max(self.held);
        self.stats.copied += Bytes(bytes as u64);
        let copies = image.tensors.iter().map(|one| (&one.image, &one.kept));
        match &self.stream {
            Some(stream) => image.coming = Some(stream.copy(copies)?),
            None => {
                let _guard = tch::no_grad_guard();
                for (to, from) in copies {
                    to.shallow_clone().f_copy_(from)?;
                }
            }
        }
        Ok(())
    }

    fn image_mut(&mut self, stage: Stage) -> &mut StageImage {
        self.stages.get_mut(&stage).expect("the stage was handed over")
    }
}

impl Drop for Images {
    /// Waits for copies that are on their way: the device may give their memory to something else at once.
    fn drop(&mut self) {
        let coming = self.stages.values().filter_map(|image| image.coming.as_ref());
        // A copy that failed writes nothing any more.
        coming.for_each(|coming| _ = coming.wait());
    }
}

fn take_memory(tensors: &mut [Copied]) -> Result<()> {
    tensors.iter_mut().try_for_each(|one| set_memory(&mut one.image, std::ptr::null_mut(), 0))
}

/// The rate at which weights are copied from the machine's memory to a device.
///
/// # Errors
/// If the device has no memory for it, or fails.
pub fn copy_rate(device: crate::Device) -> Result<Rate> {
    let place = |on| (tch::Kind::Uint8, on);
    let kept = Tensor::f_ones([MEASURED as i64], place(Device::Cpu))?;
    let mut image = Tensor::f_zeros([MEASURED as i64], place(device.torch))?;
    let start = match device.torch {
        Device::Cuda(index) => {
            let (kept, stream) = (kept.f_pin_memory(device.torch)?, CopyStream::new(index)?);
            // The first copy begins with what the driver does once.
            stream.copy([(&image, &kept)].into_iter())?.wait()?;
            let start = Instant::now();
            stream.copy([(&image, &kept)].into_iter())?.wait()?;
            start
        }
        _ => {
            let start = Instant::now();
            image.f_copy_(&kept)?;
            start
        }
    };
    let seconds = start.elapsed().as_secs_f64().max(1e-9);
    Ok(Rate((MEASURED as f64 / seconds) as u64))
}
