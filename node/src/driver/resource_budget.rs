//! The memory and disk of a machine, and the part that hosting stages takes.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use nix::sys::statvfs::statvfs;
use shoal_engine::{
    DeviceChoice, island_overhead, memory_floor, optimizer_elements, parameter_count,
    swapping_floor,
};
use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::StageChoice;
use shoal_protocol::units::Bytes;
use shoal_scheduler::placement::NO_ROOM_ADVICE;

use super::spill::SpillFile;
use crate::memory::HostMemory;

/// Versions of weights and of the optimizer's state on the disk: one kept and one being written.
const DISK_VERSIONS: u64 = 2;

/// Bytes on the disk per weight of an older version that steps still read.
const DISK_PER_STALE_PARAMETER: u64 = 8;

/// Bytes on the disk per swapped weight beside the optimizer's state: weights, accumulator, mean gradient and
/// a copy in bf16.
const DISK_PER_SWAPPED_PARAMETER: u64 = 18;

/// A peer that swaps its stages gives this part of its memory to the output log, at most.
const SWAPPING_LOG_SHARE: u64 = 8;

/// The part of the machine that a peer may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResourceLimits {
    /// Memory; `None` stands for the free memory.
    pub memory: Option<Bytes>,
    /// Memory for the output log; its rest is on the disk.
    pub log_memory: Bytes,
}

impl Default for ResourceLimits {
    fn default() -> Self {
        Self { memory: None, log_memory: Bytes::mebi(1 << 10) }
    }
}

/// A machine that lacks room for stages.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InsufficientResources {
    /// Too little memory.
    #[error(
        "hosting stage {span} takes {needs} of memory and {has} is there: {NO_ROOM_ADVICE} \
         (--memory says how much may be used)"
    )]
    Memory {
        /// The stages.
        span: StageSpan,
        /// The room that they take.
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
    /// The devices whose tensors are in this memory.
    workers: usize,
    log_memory: Bytes,
    disk: Bytes,
    folder: PathBuf,
}

impl ResourceBudget {
    /// Measures the machine. The memory of GPUs among the devices is not measured.
    ///
    /// # Errors
    /// When the system does not report the free room.
    pub(crate) fn measure(
        limits: ResourceLimits,
        devices: &[DeviceChoice],
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let disk = statvfs(folder).context("the file system does not say how much is free")?;
        let workers = devices.iter().filter(|device| device.is_processor()).count();
        let memory = match limits.memory {
            Some(memory) => memory,
            None if workers > 0 => HostMemory::now().map(|memory| memory.available)?,
            None => Bytes(u64::MAX),
        };
        Ok(Self {
            memory,
            workers,
            log_memory: limits.log_memory,
            disk: Bytes(disk.blocks_available() * disk.fragment_size()),
            folder: folder.to_owned(),
        })
    }

    /// Returns the memory that the peer may use, if the tensors are in this machine's memory.
    pub(crate) fn memory(&self) -> Option<Bytes> {
        (self.memory != Bytes(u64::MAX)).then_some(self.memory)
    }

    /// Returns the memory for the output log of stages that fit into memory.
    pub(crate) fn log_memory(&self) -> Bytes {
        self.log_memory
    }

    /// Returns whether these stages are swapped: they do not fit into memory at once, and the tensors of a
    /// single device are in this machine's memory. A virtual worker's are not swapped.
    pub(crate) fn swaps(&self, manifest: &Manifest, span: StageSpan) -> bool {
        self.workers == 1
            && manifest.inner.is_none()
            && self.memory_for(manifest, span, 1) > self.memory
    }

    /// Returns the memory for swapped tensors; `None` where all stages fit.
    pub(crate) fn swapped_memory(&self, manifest: &Manifest, span: StageSpan) -> Option<Bytes> {
        self.swaps(manifest, span)
            .then(|| Bytes(self.memory.0.saturating_sub(self.beside_swapped(manifest, span).0)))
    }

    /// Returns the memory that stays as it is where stages are swapped.
    fn beside_swapped(&self, manifest: &Manifest, span: StageSpan) -> Bytes {
        let floor = swapping_floor(manifest, span, manifest.training.microbatches);
        floor.resident + self.log_memory_for(manifest, span)
    }

    /// Returns the memory for the output log of these stages.
    pub(crate) fn log_memory_for(&self, manifest: &Manifest, span: StageSpan) -> Bytes {
        match self.swaps(manifest, span) {
            true => self.log_memory.min(Bytes(self.memory.0 / SWAPPING_LOG_SHARE)),
            false => self.log_memory,
        }
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

    /// Returns the number of microbatches that each of these stages can have in flight in this
    /// memory, at most `most`.
    pub(crate) fn window(
        &self,
        manifest: &Manifest,
        stages: &BTreeSet<Stage>,
        most: usize,
    ) -> usize {
        let window = |stage: &Stage| {
            let span = StageSpan::one(*stage);
            let each = memory_floor(manifest, span, 1) - memory_floor(manifest, span, 0);
            let left = self.memory.0.saturating_sub(self.memory_for(manifest, span, 0).0);
            usize::try_from(left / each.0.max(1)).unwrap_or(usize::MAX)
        };
        stages.iter().map(window).min().unwrap_or(most).clamp(1, most)
    }

    /// Returns how many stages, whichever, fit at once, so that the coordinator may assign them; 0 if some stage does
    /// not fit, or the user chose stages. Swapped stages do not count.
    pub(crate) fn room(
        &self,
        manifest: &Manifest,
        choice: StageChoice,
        fits: &BTreeSet<Stage>,
    ) -> u16 {
        let stages = manifest.training.stages;
        if choice != StageChoice::Auto || fits.len() != usize::from(stages) {
            return 0;
        }
        let alone = |stage| StageSpan::one(stage);
        let memory = manifest.stages().map(|stage| self.memory_for(manifest, alone(stage), 1));
        // The memory for the log is there once.
        let log = |stage| LogSize::of(manifest, alone(stage)).bytes.min(self.log_memory);
        let disk = |stage| self.disk_for(manifest, alone(stage)) + log(stage);
        let disk = manifest.stages().map(disk);
        let (memory, disk) = (memory.max().unwrap_or_default(), disk.max().unwrap_or_default());
        let times = |has: Bytes, each: Bytes| has.0.checked_div(each.0).unwrap_or(u64::MAX);
        let each = times(self.memory, memory).min(times(self.disk, disk));
        let all = StageSpan::all(stages);
        let whole = self.memory_for(manifest, all, 1) <= self.memory
            && self.disk_for(manifest, all) <= self.disk;
        let each = u16::try_from(each).unwrap_or(u16::MAX).min(stages);
        if whole { stages } else { each }
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
            0 => self.spilled(manifest, span),
            // Any stages, as many as there is room for.
            room => {
                let each =
                    manifest.stages().map(|stage| LogSize::of(manifest, StageSpan::one(stage)));
                let largest = each.max_by_key(|log| log.bytes).unwrap_or_default();
                largest.times(room).spilled(manifest, self.log_memory_for(manifest, span))
            }
        };
        match places {
            0 => Ok(None),
            places => SpillFile::create(&self.folder, manifest.largest_logged(), places).map(Some),
        }
    }

    /// Returns the number of tensors of the fullest output log that do not fit into its memory, each
    /// as large as the largest.
    fn spilled(&self, manifest: &Manifest, span: StageSpan) -> u64 {
        LogSize::of(manifest, span).spilled(manifest, self.log_memory_for(manifest, span))
    }

    fn check(&self, manifest: &Manifest, span: StageSpan) -> Result<(), InsufficientResources> {
        let needs = self.least_memory(manifest, span);
        if needs > self.memory {
            return Err(InsufficientResources::Memory { span, needs, has: self.memory });
        }
        let needs = self.disk_for(manifest, span);
        if needs > self.disk {
            let path = self.folder.clone();
            return Err(InsufficientResources::Disk { span, needs, has: self.disk, path });
        }
        Ok(())
    }

    /// Returns the least memory for these stages, swapped or not.
    fn least_memory(&self, manifest: &Manifest, span: StageSpan) -> Bytes {
        let whole = self.memory_for(manifest, span, 1);
        if !self.swaps(manifest, span) {
            return whole;
        }
        let floor = swapping_floor(manifest, span, manifest.training.microbatches);
        let floor = floor.resident + floor.swapped;
        // The log's part grows with the memory: of the least, it is so much.
        let log = Bytes(floor.0.div_ceil(SWAPPING_LOG_SHARE - 1));
        whole.min(floor + self.log_memory.min(log))
    }

    /// Returns the room on the disk for the output log and the files of the stages.
    fn disk_for(&self, manifest: &Manifest, span: StageSpan) -> Bytes {
        let log = self.spilled(manifest, span) * manifest.largest_logged().0;
        let weights: usize = span.stages().map(|stage| parameter_count(manifest, stage)).sum();
        let kept: usize = span.stages().map(|stage| optimizer_elements(manifest, stage)).sum();
        let (weights, kept) = (weights as u64, 4 * kept as u64);
        let stale = (manifest.steps_at_once() - 1) * DISK_PER_STALE_PARAMETER;
        let swapped = match self.swaps(manifest, span) {
            true => weights * (DISK_PER_SWAPPED_PARAMETER + 2 * stale) + kept,
            false => 0,
        };
        Bytes(log + DISK_VERSIONS * (4 * weights + kept) + weights * stale + swapped)
    }

    /// Returns the memory for these stages with so many microbatches in flight.
    pub(crate) fn memory_for(&self, manifest: &Manifest, span: StageSpan, in_flight: u32) -> Bytes {
        let log = LogSize::of(manifest, span).bytes.min(self.log_memory);
        memory_floor(manifest, span, in_flight)
            + island_overhead(manifest, span, self.workers)
            + log
    }
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
mod tests {
    use shoal_scheduler::sim::Scenario;

    use super::*;

    fn manifest() -> Manifest {
        Scenario::small_manifest(3, 8, 1)
    }

    #[test]
    fn the_least_memory_of_a_machine_that_swaps_is_enough_and_less_is_not() {
        let manifest = Scenario::small_manifest(8, 8, 1);
        let all = StageSpan::all(8);
        for log_memory in [0, 1 << 10, 1 << 30] {
            let log_memory = Bytes(log_memory);
            let of = |memory| ResourceBudget { workers: 1, log_memory, ..budget(memory, 1 << 40) };
            let Err(InsufficientResources::Memory { needs, .. }) = of(1).check(&manifest, all)
            else {
                panic!("a byte is too little");
            };
            assert!(of(needs.0).swaps(&manifest, all), "less than all of it");
            assert_eq!(of(needs.0).check(&manifest, all), Ok(()));
            let less = of(needs.0 - 1).check(&manifest, all);
            assert!(matches!(less, Err(InsufficientResources::Memory { .. })), "{less:?}");
        }
    }

    fn budget(memory: u64, disk: u64) -> ResourceBudget {
        let (memory, disk) = (Bytes(memory), Bytes(disk));
        let folder = PathBuf::from("/data");
        ResourceBudget { memory, workers: 0, log_memory: Bytes(0), disk, folder }
    }

    #[test]
    fn a_measured_machine_has_memory_and_disk() {
        let folder = std::env::temp_dir();
        let limits = ResourceLimits { memory: None, log_memory: Bytes(0) };
        let budget =
            ResourceBudget::measure(limits, &[DeviceChoice::Cpu], &folder).expect("measured");
        assert!(budget.memory > Bytes::mebi(1) && budget.disk > Bytes::mebi(1), "{budget:?}");
    }

    #[test]
    fn an_error_names_the_room_needed_and_the_room_there_is() {
        let manifest = manifest();
        let one = |stage| StageChoice::Span(StageSpan::one(Stage(stage)));
        let enough = budget(1 << 30, 1 << 30);
        let all: BTreeSet<Stage> = manifest.stages().collect();
        for choice in [StageChoice::Auto, StageChoice::All, StageChoice::None, one(1), one(9)] {
            assert_eq!(enough.fits(&manifest, choice), Ok(all.clone()), "{choice:?}");
        }
        let small = budget(1, 1 << 30);
        let none = Ok(BTreeSet::new());
        assert_eq!(small.fits(&manifest, StageChoice::None), none);
        let error = small.fits(&manifest, StageChoice::Auto).expect_err("no memory");
        assert!(matches!(error, InsufficientResources::Memory { has: Bytes(1), .. }), "{error}");
        let error = budget(1 << 30, 1).fits(&manifest, one(1)).expect_err("no disk");
        assert!(matches!(error, InsufficientResources::Disk { has: Bytes(1), .. }), "{error}");
        assert!(error.to_string().contains("/data"), "{error}");
    }

    #[test]
    fn the_disk_has_a_place_for_each_tensor_that_does_not_fit_into_memory() {
        let manifest = manifest();
        let span = StageSpan::one(Stage(1));
        let one = manifest.largest_logged();
        let spilled =
            |log_memory| ResourceBudget { log_memory, ..budget(0, 0) }.spilled(&manifest, span);
        // Eight activations and eight gradients, which are a little smaller.
        assert_eq!(spilled(Bytes(0)), 16);
        assert_eq!(spilled(Bytes(3 * one.0)), 13);
        assert_eq!(spilled(manifest.output_log_bytes(Stage(1))), 0);
    }

    #[test]
    fn a_peer_with_room_for_one_stage_and_not_for_two_keeps_its_first() {
        let manifest = manifest();
        let all: BTreeSet<Stage> = manifest.stages().collect();
        let alone = |stage: &Stage| budget(0, 0).disk_for(&manifest, StageSpan::one(*stage));
        let largest = all.iter().map(alone).max().expect("there are stages").0;
        let auto = |disk| budget(1 << 40, disk).room(&manifest, StageChoice::Auto, &all);
        let one = budget(1 << 40, largest);
        assert_eq!(one.fits(&manifest, StageChoice::Auto), Ok(all.clone()));
        assert_eq!([largest, 2 * largest - 1, 2 * largest].map(auto), [1, 1, 2]);
        assert_eq!(auto(1 << 40), 3, "all of them");
        let folder = tempfile::tempdir().expect("a folder");
        let one = ResourceBudget { folder: folder.path().to_owned(), ..one };
        let places = |room| {
            let file = one.spill_file(&manifest, StageSpan::one(Stage(1)), room);
            file.expect("room").expect("something is spilled").places()
        };
        assert_eq!([0, 1, 2].map(places), [16, 16, 32]);
    }

    #[test]
    fn the_window_follows_from_the_free_memory() {
        let manifest = manifest();
        let stages = BTreeSet::from([Stage(1)]);
        let span = StageSpan::one(Stage(1));
        let window = |budget: &ResourceBudget| budget.window(&manifest, &stages, 64);
        let four = memory_floor(&manifest, span, 4).0;
        assert_eq!(window(&budget(four, 0)), 4);
        assert_eq!(window(&budget(four - 1, 0)), 3);
        assert_eq!(window(&budget(1 << 40, 0)), 64);
        assert_eq!(window(&budget(0, 0)), 1);
    }
}
