//! libtorch's collectives between the devices of a peer (`csrc/collectives.cpp`), and the proof that they work.

use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use tch::Tensor;

use crate::device::exchange::{Seat, sum_in_order};
use crate::device::setup::{Device, DeviceChoice, all_differ};
use crate::device::shim::check;
use crate::device::tensor::elements;
use crate::error::{EngineError, Result};

unsafe extern "C" {
    fn shoal_store_new() -> *mut c_void;
    fn shoal_store_free(store: *mut c_void);
    fn shoal_collectives_new(
        store: *mut c_void,
        rank: usize,
        size: usize,
        nccl: bool,
        result: *mut *mut c_void,
    ) -> *mut c_char;
    fn shoal_collectives_free(collectives: *mut c_void);
}

/// How long the first sum may take. Links that work are set up within seconds; broken ones can block for ever.
const PATIENCE: Duration = Duration::from_secs(60);
/// Elements of the first sum: as many as are divided among devices (`csrc/sums.cpp`), and not in equal parts.
const PROOF: usize = (1 << 14) + 1;

/// How devices that compute slices together exchange large sums. The bits of the sums are the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceLinks {
    /// They have the same memory.
    Memory,
    /// NCCL.
    Nccl,
    /// libtorch's copies from device to device, because NCCL does not work.
    Copies {
        /// What NCCL lacks.
        reason: String,
    },
}

/// A library of collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    /// Between GPUs.
    Nccl,
    /// Between workers of the processor, which are faster without: it runs in tests what NCCL runs between GPUs.
    #[cfg(test)]
    Gloo,
}

/// One device's end of a group, for one thread at a time.
#[derive(Debug)]
pub(crate) struct Collectives(NonNull<c_void>);

// SAFETY: it belongs to no thread.
unsafe impl Send for Collectives {}

impl Collectives {
    /// The end of one device. That of gloo waits for the others.
    fn new(library: Library, store: &Store, rank: usize, size: usize) -> Result<Self> {
        let mut end = ptr::null_mut();
        let nccl = library == Library::Nccl;
        // SAFETY: the store is live, and `end` lives for the call.
        check(unsafe { shoal_collectives_new(store.0.as_ptr(), rank, size, nccl, &raw mut end) })?;
        Ok(Self(NonNull::new(end).expect("an object, as there was no error")))
    }

    /// The ends of a group of these devices, in order.
    fn all(library: Library, devices: &[DeviceChoice]) -> Result<Vec<Self>> {
        let store = &Store::new();
        let end = |rank| {
            // Loads the half of libtorch that has NCCL.
            Device::open(devices[rank], 1)?;
            Self::new(library, store, rank, devices.len())
        };
        std::thread::scope(|scope| {
            let start = |rank| scope.spawn(move || end(rank));
            let made: Vec<_> = (0..devices.len()).map(start).collect();
            made.into_iter().map(|thread| thread.join().expect("no exception leaves C++")).collect()
        })
    }

    /// The object, which the caller frees or hands on.
    pub(crate) fn into_raw(self) -> *mut c_void {
        ManuallyDrop::new(self).0.as_ptr()
    }
}

impl Drop for Collectives {
    fn drop(&mut self) {
        // SAFETY: it is freed once.
        unsafe { shoal_collectives_free(self.0.as_ptr()) }
    }
}

/// Where the members of a group find each other.
struct Store(NonNull<c_void>);

// SAFETY: a mutex guards all that it has.
unsafe impl Sync for Store {}

impl Store {
    fn new() -> Self {
        // SAFETY: it only makes an object.
        Self(NonNull::new(unsafe { shoal_store_new() }).expect("memory for a small object"))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: it is freed once; groups have references of their own.
        unsafe { shoal_store_free(self.0.as_ptr()) }
    }
}

/// Seats for devices of which so many each compute slices together, and how they exchange large sums: by NCCL if that
/// proves itself in every group.
///
/// # Errors
/// If NCCL has begun a sum and does not end it: the GPUs may be busy with it as long as the process lives.
pub(crate) fn seats(devices: &[DeviceChoice], each: usize) -> Result<(Vec<Seat>, DeviceLinks)> {
    let (mut all, mut links) = (Vec::with_capacity(devices.len()), DeviceLinks::Memory);
    for group in devices.chunks(each) {
        let (seats, of_group) = seats_of_group(group)?;
        all.extend(seats);
        if !matches!(links, DeviceLinks::Copies { .. }) {
            links = of_group;
        }
    }
    Ok((all, links))
}

fn seats_of_group(devices: &[DeviceChoice]) -> Result<(Vec<Seat>, DeviceLinks)> {
    if devices.len() == 1 || devices.iter().all(|device| device.is_processor()) {
        return Ok((Seat::all(devices.len()), DeviceLinks::Memory));
    }
    match proven(Library::Nccl, devices) {
        Ok(seats) => Ok((seats, DeviceLinks::Nccl)),
        Err(error @ EngineError::SilentCollectives { .. }) => Err(error),
        Err(error) => {
            Ok((Seat::all(devices.len()), DeviceLinks::Copies { reason: error.to_string() }))
        }
    }
}

/// Seats whose large sums go through a library, after a first one that has the right bits on every device.
pub(crate) fn proven(library: Library, devices: &[DeviceChoice]) -> Result<Vec<Seat>> {
    if library == Library::Nccl {
        all_differ(devices)?;
    }
    let seats = Seat::all(devices.len());
    for (seat, end) in seats.iter().zip(Collectives::all(library, devices)?) {
        seat.use_collectives(end);
    }
    let (send, proofs) = sync_channel(devices.len());
    for (seat, device) in seats.iter().cloned().zip(devices.to_vec()) {
        let send = send.clone();
        let prove = move || {
            let proof = prove(&seat, device);
            if proof.is_err() {
                seat.end();
            }
            // Nobody receives it if another device failed before.
            drop(send.send(proof));
        };
        let thread = std::thread::Builder::new().name(format!("first sum on {device}"));
        let stopped = |_| EngineError::DeviceStopped { device: device.to_string() };
        thread.spawn(prove).map_err(stopped)?;
    }
    let silent = |_| EngineError::SilentCollectives { patience: PATIENCE };
    devices.iter().try_for_each(|_| proofs.recv_timeout(PATIENCE).map_err(silent)?)?;
    Ok(seats)
}

/// So many tensors of f32 `[elements]`, whose sum depends on the order.
pub(crate) fn parts(count: usize, elements: usize) -> Result<Vec<Tensor>> {
    let part = |index: usize| {
        let value = |at: usize| ((at * 7919 + index * 104_729) % 1009) as f32 / 3.7 - 99.0;
        Ok(Tensor::f_from_slice(&(0..elements).map(value).collect::<Vec<f32>>())?)
    };
    (0..count).map(part).collect()
}

/// Checks that a sum through the seat's collectives has the bits of the same sum on one device.
fn prove(seat: &Seat, device: DeviceChoice) -> Result<()> {
    let device = Device::open(device, 1)?.torch;
    let parts = parts(seat.count(), PROOF)?;
    let own = parts[seat.index()].f_to(device)?;
    let found = sum_in_order(&[own], Some(seat))?.f_to(tch::Device::Cpu)?;
    let expected = sum_in_order(&parts, None)?;
    match elements::<f32>(&found) == elements::<f32>(&expected) {
        true => Ok(()),
        false => Err(EngineError::Torch("a first sum has wrong bits".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::setup::Devices;

    #[test]
    fn a_device_that_ends_ends_the_sums_of_the_others() {
        let workers = [DeviceChoice::Cpu; 2];
        let seats = proven(Library::Gloo, &workers).expect("gloo is a part of libtorch");
        let part = Tensor::ones([PROOF as i64], (tch::Kind::Float, tch::Device::Cpu));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| sum_in_order(&[part], Some(&seats[0])));
            seats[1].end();
            let error = waits.join().expect("an error").expect_err("the other device has ended");
            assert!(matches!(error, EngineError::Torch(_)), "{error}");
        });
    }

    #[test]
    fn nccl_without_a_gpu_is_an_error() {
        // It loads libtorch's half for CUDA, where that is installed.
        if Devices::AllCuda.resolve().is_ok() {
            return;
        }
        let gpus = [DeviceChoice::Cuda(0), DeviceChoice::Cuda(1)];
        let (seats, links) = seats(&gpus, gpus.len()).expect("copies instead");
        assert_eq!(seats.len(), 2);
        let DeviceLinks::Copies { reason } = links else { panic!("{links:?}") };
        assert!(reason.contains("cuda:"), "{reason}");
        let error = Collectives::new(Library::Nccl, &Store::new(), 0, 2).expect_err("no GPU");
        let error = error.to_string();
        assert!(error.contains("NCCL") || error.contains("GPU"), "{error}");
    }
}
