//! The memory and disk of a machine, and the part that hosting stages takes.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use nix::sys::statvfs::statvfs;
use shoal_engine::{
    Device, DeviceChoice, LowerTier, Tiers, device_floor, gpu_overhead, island_overhead,
    memory_floor, optimizer_elements, parameter_count, pass_overhead, swapped_bytes,
    swapping_floor,
};
use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_protocol::units::Bytes;
use shoal_scheduler::coordinator::placing::placement::NO_ROOM_ADVICE;

use super::setup::PeerDevices;
use super::spill::SpillFile;
use crate::memory::HostMemory;

/// Versions of weights and of the optimizer's state on the disk: one kept and one being written.
const DISK_VERSIONS: u64 = 2;

/// Bytes on the disk per weight of an older version that steps still read.
const DISK_PER_STALE_PARAMETER: u64 = 8;

/// A peer gives this part of its memory to the output log, at most.
const LOG_SHARE: u64 = 8;

/// The part of the machine that a peer may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceLimits {
    /// Memory; `None` stands for the free memory.
    pub memory: Option<Bytes>,
    /// Memory of each device; `None` stands for what is free on a GPU.
    pub device_memory: Option<Bytes>,
    /// Memory for the output log; its rest is on the disk.
    pub log_memory: Bytes,
    /// Disk for shards of data that no step reads soon.
    pub data_cache: Bytes,
}

impl Default for ResourceLimits {
    fn default() -> Self {
        Self {
            memory: None,
            device_memory: None,
            log_memory: Bytes::mebi(1 << 10),
            data_cache: Bytes::mebi(1 << 12),
        }
    }
}

/// A machine that lacks room for stages.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InsufficientResources {
    /// Too little memory.
    #[error(
        "hosting stage {span} takes {needs} of memory and {has} is there: {NO_ROOM_ADVICE}{} \
         (--memory says how much may be used)", fewer(*.devices)
    )]
    Memory {
        /// The stages.
        span: StageSpan,
        /// The devices that share this memory.
        devices: usize,
        /// The room that they take.
        needs: Bytes,
        /// The room that exists.
        has: Bytes,
    },
    /// Too little memory of the device for the passes of one stage, or of all that replicas host.
    #[error(
        "the weights of {} and a pass take {needs} of the device's memory and {has} is there: {NO_ROOM_ADVICE} \
         (--device-memory says how much may be used)", counted(*.stages)
    )]
    Device {
        /// The stages whose weights are there at once, at least.
        stages: usize,
        /// The room that one stage takes.
        needs: Bytes,
        /// The room that exists.
        has: Bytes,
    },
    /// Too little room on the disk.
    #[error(
        "hosting stage {span} takes {needs} of disk and {path} has {has}: {NO_ROOM_ADVICE} \
         (--data-dir says which disk)", path = path.display()
    )]
    Disk {
        /// The stages.
        span: StageSpan,
        /// The room that they take.
        needs: Bytes,
        /// The room that exists.
        has: Bytes,
        /// The data directory.
        path: PathBuf,
    },
}

/// The memory and disk that a machine has for a run.
#[derive(Debug, Clone)]
pub(crate) struct ResourceBudget {
    memory: Bytes,
    /// The devices whose state of stages is in this memory.
    devices: usize,
    /// Whether that is the devices' own memory and not the machine's.
    on_gpus: bool,
    /// Whether GPUs have this program's kernels.
    has_kernels: bool,
    /// How often this memory is there, each time for all of the state: on GPUs without slices once for each.
    copies: usize,
    /// Memory of each device, where they have the weights of stages only while passes read them.
    device: Option<Bytes>,
    /// The devices that compute a pass together.
    together: usize,
    /// The number of devices, if they divide the stages. All their memory is then counted together.
    dividing: Option<usize>,
    log_memory: Bytes,
    disk: Bytes,
    folder: PathBuf,
}

impl ResourceBudget {
    /// Measures the machine for a run of which it hosts the chosen stages.
    ///
    /// # Errors
    /// When the system does not report the free room.
    pub(crate) fn measure(
        limits: ResourceLimits,
        peer_devices: &PeerDevices,
        folder: &Path,
        (manifest, choice): (&Manifest, StageChoice),
    ) -> anyhow::Result<Self> {
        let devices = &peer_devices.each;
        let dividing = peer_devices.divide_stages.then_some(devices.len());
        let disk = statvfs(folder).context("the file system does not say how much is free")?;
        // Devices that do not suit the run are refused elsewhere.
        let together = devices.len() / peer_devices.passes_at_once(manifest).unwrap_or(1).max(1);
        let on_device = limits.device_memory.or_else(|| free_on(devices));
        let sharing = if manifest.model.slices == 1 { 1 } else { devices.len() };
        let gpus = devices.iter().all(|device| !device.is_processor());
        let has_kernels = devices.iter().all(|device| device.lacks_kernels().is_none());
        let of_gpu = |span| match gpus {
            true => gpu_overhead(manifest, span, 1, has_kernels),
            false => Bytes(0),
        };
        let run = (manifest, choice);
        let device = on_device
            .filter(|memory| dividing.is_none() && passes_through(run, *memory, sharing, of_gpu));
        let on_gpus = device.is_none() && gpus;
        // What is brief in a pass on a GPU is beside the weights that it has room for.
        let of_pass = manifest.stages().map(|stage| of_gpu(StageSpan::one(stage))).max();
        let of_pass = of_pass.unwrap_or_default();
        let device = device.map(|memory| Bytes(memory.0.saturating_sub(of_pass.0)));
        let memory = match limits.memory {
            Some(memory) => memory,
            None if on_gpus => Bytes(u64::MAX),
            None => HostMemory::now().map(|memory| memory.available)?,
        };
        let sharing = if on_gpus && dividing.is_none() { sharing } else { devices.len() };
        let memory = match device {
            Some(_) => memory,
            None => {
                let of_all = |each: Bytes| Bytes(each.0.saturating_mul(sharing as u64));
                memory.min(on_device.map_or(Bytes(u64::MAX), of_all))
            }
        };
        Ok(Self {
            memory,
            devices: if dividing.is_some() { 1 } else { sharing },
            on_gpus,
            has_kernels,
            copies: devices.len() / sharing,
            device,
            together,
            dividing,
            log_memory: limits.log_memory,
            disk: Bytes(disk.blocks_available() * disk.fragment_size()),
            folder: folder.to_owned(),
        })
    }

    /// Returns the memory that the peer may use, if the tensors are in this machine's memory.
    pub(crate) fn memory(&self) -> Option<Bytes> {
        (self.memory != Bytes(u64::MAX)).then_some(self.memory)
    }

    /// Returns the memory for the output log; its rest is on the disk.
    pub(crate) fn log_memory(&self) -> Bytes {
        self.log_memory.min(Bytes(self.memory.0 / LOG_SHARE))
    }

    /// Returns whether stages are swapped where they do not fit into memory at once: the tensors of a single device, or of
    /// those that compute each pass together, are in this machine's memory. A virtual worker's are not swapped.
    fn can_swap(&self, manifest: &Manifest) -> bool {
        let is_divided = self.dividing.is_some();
        !self.on_gpus && !is_divided && self.devices == self.together && manifest.inner.is_none()
    }

    /// Returns whether devices, or groups of them, compute passes of their own. All weights that they read are on each.
    fn are_replicas(&self) -> bool {
        !self.on_gpus && self.devices > self.together
    }

    /// Returns whether these stages are swapped.
    fn swaps(&self, manifest: &Manifest, span: StageSpan) -> bool {
        self.can_swap(manifest) && self.memory_for(manifest, span, 1) > self.memory
    }

    /// Returns the tiers of stages that memory or the device does not hold.
    pub(crate) fn tiers(&self, manifest: &Manifest, choice: StageChoice, room: StageRoom) -> Tiers {
        let resident = self.in_memory(manifest, choice);
        let swaps = resident == 0 || room.most > resident.min(manifest.training.stages);
        let lower = (swaps && self.can_swap(manifest)).then(|| LowerTier {
            folder: self.folder.clone(),
            memory: self.memory - self.log_memory(),
            resident: usize::from(resident),
        });
        Tiers { device: self.device, lower }
    }

    /// Returns how many of the stages that the peer may host both memory and the device hold at once.
    pub(crate) fn resident(&self, manifest: &Manifest, choice: StageChoice) -> u16 {
        self.in_memory(manifest, choice).min(self.on_device(manifest))
    }

    /// Returns the stages, whichever, whose weights the device holds at once.
    fn on_device(&self, manifest: &Manifest) -> u16 {
        let stages = |memory| device_floor(manifest, self.together).stages_in(memory);
        self.device.map_or(u16::MAX, |memory| u16::try_from(stages(memory)).unwrap_or(u16::MAX))
    }

    /// Returns how many of the stages that the peer may host memory holds at once.
    fn in_memory(&self, manifest: &Manifest, choice: StageChoice) -> u16 {
        let all = StageSpan::all(manifest.training.stages);
        let span = match choice {
            StageChoice::Auto => return self.stages_in_memory(manifest),
            StageChoice::Span(span) if span.last <= manifest.last_stage() => span,
            StageChoice::All => all,
            StageChoice::Span(_) | StageChoice::None => return u16::MAX,
        };
        if self.swaps(manifest, span) { 0 } else { u16::MAX }
    }

    /// Returns how many stages, whichever, memory holds at once.
    fn stages_in_memory(&self, manifest: &Manifest) -> u16 {
        let stages = manifest.training.stages;
        if self.memory_for(manifest, StageSpan::all(stages), 1) <= self.memory {
            return stages;
        }
        let each =
            manifest.stages().map(|stage| self.memory_for(manifest, StageSpan::one(stage), 1));
        at_once(self.memory, each.max().unwrap_or_default()).min(stages)
    }

    /// Returns the stages that fit, each alone.
    ///
    /// # Errors
    /// When the chosen stages do not fit.
    pub(crate) fn fits(
        &self,
        manifest: &Manifest,
        choice: StageChoice,
    ) -> Result<BTreeSet<Stage>, InsufficientResources> {
        let fits = |stage: &Stage| self.check(manifest, StageSpan::one(*stage)).is_ok();
        let fitting: BTreeSet<Stage> = manifest.stages().filter(fits).collect();
        match choice {
            StageChoice::None => {}
            StageChoice::All => self.check(manifest, StageSpan::all(manifest.training.stages))?,
            // The coordinator knows which stages there are.
            StageChoice::Span(span) if span.last > manifest.last_stage() => {}
            StageChoice::Span(span) => self.check(manifest, span)?,
            StageChoice::Auto if fitting.is_empty() => {
                self.check(manifest, StageSpan::one(Stage(0)))?;
            }
            StageChoice::Auto => {}
        }
        Ok(fitting)
    }

    /// Returns the numbers of microbatches that each stage can have in flight in this memory, at most `most`: of a
    /// peer that hosts one of these stages, two, and so on up to `resident`; last of one that swaps them.
    pub(crate) fn windows(
        &self,
        manifest: &Manifest,
        stages: &BTreeSet<Stage>,
        (resident, most): (u16, usize),
    ) -> Vec<usize> {
        let all = StageSpan::all(manifest.training.stages);
        let log = LogSize::of(manifest, all).bytes.min(self.log_memory());
        let descending = |of: &dyn Fn(StageSpan) -> Bytes| {
            let mut sizes: Vec<Bytes> = stages.iter().map(|one| of(StageSpan::one(*one))).collect();
            sizes.sort_unstable_by(|one, other| other.cmp(one));
            sizes
        };
        let floor = |span, in_flight| self.floor(manifest, span, in_flight);
        // What is brief is there once, whichever stage computes.
        let brief = |span| self.of_gpus(manifest, span, 0);
        let log = log + descending(&brief).first().copied().unwrap_or_default();
        let idle = descending(&|span| floor(span, 0) - brief(span));
        let each = descending(&|span| floor(span, 1) - floor(span, 0));
        let window = |hosted: usize| {
            // Whichever stages they are.
            let largest = |sizes: &[Bytes]| sizes.iter().take(hosted).copied().sum::<Bytes>();
            let left = self.memory.0.saturating_sub((largest(&idle) + log).0);
            let window = usize::try_from(left / largest(&each).0.max(1)).unwrap_or(usize::MAX);
            window.saturating_mul(self.copies).clamp(1, most)
        };
        let hosted = usize::from(resident).min(stages.len());
        (1..=hosted).map(window).chain([most]).collect()
    }

    /// Returns how many stages, whichever, the coordinator may assign; none if some stage does not fit, or the user
    /// chose stages.
    pub(crate) fn room(
        &self,
        manifest: &Manifest,
        choice: StageChoice,
        fits: &BTreeSet<Stage>,
    ) -> StageRoom {
        let stages = manifest.training.stages;
        if choice != StageChoice::Auto || fits.len() != usize::from(stages) {
            return StageRoom::NONE;
        }
        let all = StageSpan::all(stages);
        let on_disk = |swapped| {
            let each = manifest.stages().map(|stage| self.disk_of(manifest, stage, swapped));
            match self.disk_for(manifest, all, swapped) <= self.disk {
                true => stages,
                false => at_once(self.disk, each.max().unwrap_or_default()).min(stages),
            }
        };
        let whole = self.stages_in_memory(manifest).min(on_disk(false));
        let whole = if self.are_replicas() { whole.min(self.on_device(manifest)) } else { whole };
        let any: Vec<Stage> = manifest.stages().collect();
        let swapped = |count: &u16| {
            any.windows(usize::from(*count))
                .all(|hosted| self.swapping_memory(manifest, hosted) <= self.memory)
        };
        let most = match self.can_swap(manifest) {
            true => (1..=on_disk(true)).take_while(swapped).last().unwrap_or_default(),
            false => 0,
        };
        let in_memory = whole.min(self.on_device(manifest));
        StageRoom { most: most.max(whole), ..StageRoom::in_memory(in_memory) }
    }

    /// Creates the file for the output log; `None` where the log fits into its memory.
    ///
    /// # Errors
    /// When the disk has too little room for it.
    pub(crate) fn spill_file(
        &self,
        manifest: &Manifest,
        span: StageSpan,
        room: u16,
    ) -> io::Result<Option<Arc<SpillFile>>> {
        let places = match room {
            0 => LogSize::of(manifest, span).spilled(manifest, self.log_memory()),
            // Any stages, as many as there is room for.
            room => {
                let each =
                    manifest.stages().map(|stage| LogSize::of(manifest, StageSpan::one(stage)));
                let largest = each.max_by_key(|log| log.bytes).unwrap_or_default();
                largest.times(room).spilled(manifest, self.log_memory())
            }
        };
        match places {
            0 => Ok(None),
            places => SpillFile::create(&self.folder, manifest.largest_logged(), places).map(Some),
        }
    }

    fn check(&self, manifest: &Manifest, span: StageSpan) -> Result<(), InsufficientResources> {
        let stages = if self.are_replicas() { span.stages().count() } else { 1 };
        if let Some(has) = self.device.filter(|_| usize::from(self.on_device(manifest)) < stages) {
            let floor = device_floor(manifest, self.together);
            let weights = Bytes(floor.weights.0 * stages as u64);
            return Err(InsufficientResources::Device {
                stages,
                needs: floor.passes + weights,
                has,
            });
        }
        let needs = self.least_memory(manifest, span);
        if needs > self.memory {
            let (devices, has) = (self.devices, self.memory);
            return Err(InsufficientResources::Memory { span, devices, needs, has });
        }
        let needs = self.disk_for(manifest, span, self.swaps(manifest, span));
        if needs > self.disk {
            let path = self.folder.clone();
            return Err(InsufficientResources::Disk { span, needs, has: self.disk, path });
        }
        Ok(())
    }

    /// Returns the least memory for these stages, swapped or not.
    fn least_memory(&self, manifest: &Manifest, span: StageSpan) -> Bytes {
        let whole = self.floor(manifest, span, 1);
        let whole = self.with_log(whole, LogSize::of(manifest, span).bytes);
        if !self.swaps(manifest, span) {
            return whole;
        }
        whole.min(self.swapping_memory(manifest, &span.stages().collect::<Vec<_>>()))
    }

    /// Returns the least memory in which these stages are swapped.
    fn swapping_memory(&self, manifest: &Manifest, stages: &[Stage]) -> Bytes {
        let microbatches = manifest.training.microbatches;
        let floor = swapping_floor(manifest, stages, microbatches, self.together);
        self.with_log(floor.resident + floor.swapped, Bytes(u64::MAX))
    }

    /// Returns the least memory that has room for so much beside an output log of this size: the log's part grows with
    /// the memory.
    fn with_log(&self, bytes: Bytes, log: Bytes) -> Bytes {
        bytes + log.min(self.log_memory).min(Bytes(bytes.0.div_ceil(LOG_SHARE - 1)))
    }

    /// Returns the room on the disk for the output log and the files of the stages, swapped or not.
    fn disk_for(&self, manifest: &Manifest, span: StageSpan, swapped: bool) -> Bytes {
        let log = LogSize::of(manifest, span).spilled(manifest, self.log_memory());
        let log = Bytes(log * manifest.largest_logged().0);
        let swapped = swapped.then_some(self.together);
        log + span.stages().map(|stage| files_of(manifest, stage, swapped)).sum::<Bytes>()
    }

    /// Returns the room on the disk for each stage like this one, of several.
    fn disk_of(&self, manifest: &Manifest, stage: Stage, swapped: bool) -> Bytes {
        // The memory for the log is there once.
        let span = StageSpan::one(stage);
        let log = LogSize::of(manifest, span).bytes.min(self.log_memory());
        self.disk_for(manifest, span, swapped) + log
    }

    /// Returns the memory for the state of these stages, and for so many microbatches in flight. Where GPUs divide the stages,
    /// each is counted with what the fullest one has.
    fn floor(&self, manifest: &Manifest, span: StageSpan, in_flight: u32) -> Bytes {
        let Some(devices) = self.dividing.filter(|_| self.on_gpus) else {
            return self.floor_of(manifest, span, in_flight);
        };
        let of_device = |device| {
            let own = span.stages().filter(|stage| stage.device_in_turn(devices) == device);
            own.map(|stage| self.floor_of(manifest, StageSpan::one(stage), in_flight))
                .sum::<Bytes>()
        };
        let most = (0..devices).map(of_device).max().expect("a peer has a device");
        Bytes(most.0.saturating_mul(devices as u64))
    }

    fn floor_of(&self, manifest: &Manifest, span: StageSpan, in_flight: u32) -> Bytes {
        let of_devices = island_overhead(manifest, span, self.devices);
        if self.device.is_none() {
            let of_passes = pass_overhead(manifest, span, in_flight, self.devices);
            let of_gpus = self.of_gpus(manifest, span, in_flight);
            return memory_floor(manifest, span, in_flight) + of_devices + of_passes + of_gpus;
        }
        // Graphs are on the device, of one pass at a time. A visit runs as many microbatches as there are.
        let mut manifest = manifest.clone();
        manifest.training.recompute = true;
        memory_floor(&manifest, span, manifest.training.microbatches) + of_devices
    }

    /// Returns what GPUs need beyond the memory of processors.
    fn of_gpus(&self, manifest: &Manifest, span: StageSpan, in_flight: u32) -> Bytes {
        match self.on_gpus {
            true => gpu_overhead(manifest, span, in_flight, self.has_kernels),
            false => Bytes(0),
        }
    }

    /// Returns the memory for these stages with so many microbatches in flight.
    pub(crate) fn memory_for(&self, manifest: &Manifest, span: StageSpan, in_flight: u32) -> Bytes {
        let log = LogSize::of(manifest, span).bytes.min(self.log_memory());
        self.floor(manifest, span, in_flight) + log
    }
}

/// Returns what may be used of each GPU, if the driver says what is free: a part is for libraries' workspaces.
fn free_on(devices: &[DeviceChoice]) -> Option<Bytes> {
    let free = |device: &DeviceChoice| {
        let DeviceChoice::Cuda(_) = device else { return None };
        let free = Device::open(*device, 1).and_then(Device::free_memory);
        free.inspect_err(|error| {
            tracing::warn!("the free memory of {device} is not known: {error}");
        })
        .ok()
    };
    let least = devices.iter().map(free).collect::<Option<Vec<_>>>()?.into_iter().min()?;
    Some(Bytes(least.0 / 10 * 9))
}

/// Returns whether so many devices with so much memory each, among which the state is divided, have the weights of the
/// chosen stages only while passes read them, because they do not hold their state. Of stages that the coordinator
/// chooses they hold one at least.
fn passes_through(
    (manifest, choice): (&Manifest, StageChoice),
    memory: Bytes,
    devices: usize,
    of_gpu: impl Fn(StageSpan) -> Bytes,
) -> bool {
    let of_state =
        |span| memory_floor(manifest, span, 1) + island_overhead(manifest, span, devices);
    let of_all = |span| of_state(span) + of_gpu(span);
    let holds = |span| of_all(span).0.div_ceil(devices as u64) <= memory.0;
    let all = StageSpan::all(manifest.training.stages);
    let holds = match choice {
        StageChoice::None => true,
        StageChoice::Auto => manifest.stages().all(|stage| holds(StageSpan::one(stage))),
        StageChoice::Span(span) => span.last > manifest.last_stage() || holds(span),
        StageChoice::All => holds(all),
    };
    // A virtual worker's weights stay.
    !holds && manifest.inner.is_none()
}

/// What else would do where so many devices share the memory: each has some of it for itself.
fn fewer(devices: usize) -> &'static str {
    if devices > 1 { ", or compute with fewer devices" } else { "" }
}

fn counted(stages: usize) -> String {
    if stages == 1 { "one stage".to_owned() } else { format!("{stages} stages") }
}

/// How many things of a size have room in so many bytes.
fn at_once(has: Bytes, each: Bytes) -> u16 {
    let count = has.0.checked_div(each.0).unwrap_or(u64::MAX);
    u16::try_from(count).unwrap_or(u16::MAX)
}

/// The room on the disk for the files of a stage, and for what so many devices swap of it, if they do.
fn files_of(manifest: &Manifest, stage: Stage, swapped: Option<usize>) -> Bytes {
    let weights = parameter_count(manifest, stage) as u64;
    let kept = 4 * optimizer_elements(manifest, stage) as u64;
    let stale = (manifest.steps_at_once() - 1) * DISK_PER_STALE_PARAMETER;
    let below = swapped.map(|devices| swapped_bytes(manifest, stage, devices)).unwrap_or_default();
    Bytes(DISK_VERSIONS * (4 * weights + kept) + weights * stale) + below
}

/// The fullest output log of stages.
#[derive(Debug, Clone, Copy, Default)]
struct LogSize {
    tensors: u64,
    bytes: Bytes,
}

impl LogSize {
    fn of(manifest: &Manifest, span: StageSpan) -> Self {
        let both = |(activations, gradients)| activations + gradients;
        let tensors = span.stages().map(|stage| both(manifest.output_log(stage))).sum();
        let bytes = span.stages().map(|stage| manifest.output_log_bytes(stage)).sum();
        Self { tensors, bytes }
    }

    /// The logs of so many stages like this one.
    fn times(self, stages: u16) -> Self {
        let stages = u64::from(stages);
        Self { tensors: stages * self.tensors, bytes: Bytes(stages * self.bytes.0) }
    }

    /// Returns the number of tensors that do not fit into so much memory, each as large as the largest.
    fn spilled(self, manifest: &Manifest, memory: Bytes) -> u64 {
        let kept = memory.0 / manifest.largest_logged().0;
        if self.bytes <= memory { 0 } else { self.tensors.saturating_sub(kept) }
    }
}

#[cfg(test)]
mod tests;
