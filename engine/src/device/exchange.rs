//! Sums of parts in the order of slices, over one device or several (`csrc/sums.cpp`, `csrc/slices.cpp`).

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::device::collectives::Collectives;
use crate::device::shim::{new_tensor, new_tensors, pointer};
use crate::error::Result;

unsafe extern "C" {
    fn shoal_exchange_new(seats: usize) -> *mut c_void;
    fn shoal_exchange_free(exchange: *mut c_void);
    fn shoal_exchange_end(exchange: *mut c_void, seat: usize);
    fn shoal_exchange_use(exchange: *mut c_void, seat: usize, collectives: *mut c_void);
    fn shoal_fan_out(
        x: *mut C_tensor,
        count: usize,
        exchange: *mut c_void,
        seat: usize,
        aliases: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn shoal_all_parts(
        own: *const *mut C_tensor,
        count: usize,
        exchange: *mut c_void,
        seat: usize,
        results: *mut *mut C_tensor,
        all: usize,
        alike: bool,
    ) -> *mut c_char;
    fn shoal_sum_in_order(
        parts: *const *mut C_tensor,
        count: usize,
        exchange: *mut c_void,
        seat: usize,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// A meeting place of threads.
#[derive(Debug)]
struct Exchange(NonNull<c_void>);

// SAFETY: a mutex guards all that it has.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

impl Drop for Exchange {
    fn drop(&mut self) {
        // SAFETY: it is freed once, and no seat is left.
        unsafe { shoal_exchange_free(self.0.as_ptr()) }
    }
}

/// The place of one device among several that compute the same passes. What each of them sums is the sum of all,
/// so they sum in the same order; a sum waits for the other devices.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    exchange: Arc<Exchange>,
    index: usize,
    count: usize,
}

impl Seat {
    /// The seats of so many devices, in order.
    pub(crate) fn all(count: usize) -> Vec<Self> {
        // SAFETY: it only makes an object.
        let exchange = NonNull::new(unsafe { shoal_exchange_new(count) });
        let exchange = Arc::new(Exchange(exchange.expect("memory for a small object")));
        let seat = |index| Self { exchange: exchange.clone(), index, count };
        (0..count).map(seat).collect()
    }

    /// Large sums go through these from now on. All seats get theirs before the first exchange.
    pub(crate) fn use_collectives(&self, end: Collectives) {
        // SAFETY: the exchange lives as long as its seats, and owns the object from now on.
        unsafe { shoal_exchange_use(self.exchange.0.as_ptr(), self.index, end.into_raw()) }
    }

    /// The seats of all devices, in order.
    pub(crate) fn each(&self) -> impl Iterator<Item = Self> {
        (0..self.count).map(|index| Self { index, ..self.clone() })
    }

    /// Its number, from 0.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The number of seats.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// A tensor of each seat, of any shapes, in order and on this one's device.
    pub(crate) fn gather(&self, own: &Tensor) -> Result<Vec<Tensor>> {
        gather(std::slice::from_ref(own), self.count, Some(self), false)
    }

    /// This device takes no part any more: an error of all that wait for it, now or later. For the thread that computes
    /// on it.
    pub(crate) fn end(&self) {
        // SAFETY: the exchange lives as long as its seats.
        unsafe { shoal_exchange_end(self.exchange.0.as_ptr(), self.index) }
    }
}

/// Ends the seat's part when it is dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct EndOnDrop(pub(crate) Seat);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The exchange for C++, and the number of the seat.
pub(crate) fn place(seat: Option<&Seat>) -> (*mut c_void, usize) {
    seat.map_or((ptr::null_mut(), 0), |seat| (seat.exchange.0.as_ptr(), seat.index))
}

/// As many aliases of `x` as this device has slices. Their gradients and those of the other seats are added in
/// order: in f32, rounded once to the type of `x`. The seat must outlive the graph.
pub(crate) fn fan_out(x: &Tensor, count: usize, seat: Option<&Seat>) -> Result<Vec<Tensor>> {
    let (exchange, index) = place(seat);
    // SAFETY: all pointers are of live objects, and the array has `count` elements.
    new_tensors(count, |aliases| unsafe {
        shoal_fan_out(pointer(x), count, exchange, index, aliases)
    })
}

/// The sum of the parts of this device's slices and of those of the other seats, in order: in f32, rounded once
/// to the type of the parts. The gradient of each part is that of the sum.
pub(crate) fn sum_in_order(parts: &[Tensor], seat: Option<&Seat>) -> Result<Tensor> {
    let parts: Vec<*mut C_tensor> = parts.iter().map(pointer).collect();
    let (exchange, index) = place(seat);
    // SAFETY: all pointers are of live objects or of the result, and the array has `parts.len()` elements.
    new_tensor(|result| unsafe {
        shoal_sum_in_order(parts.as_ptr(), parts.len(), exchange, index, result)
    })
}

/// The parts of all `count` slices in order, of this device and the other seats.
pub(crate) fn all_parts(own: &[Tensor], count: usize, seat: Option<&Seat>) -> Result<Vec<Tensor>> {
    gather(own, count, seat, true)
}

fn gather(own: &[Tensor], count: usize, seat: Option<&Seat>, alike: bool) -> Result<Vec<Tensor>> {
    let own: Vec<*mut C_tensor> = own.iter().map(pointer).collect();
    let (exchange, index) = place(seat);
    // SAFETY: all pointers are of live objects, and the arrays have these numbers of elements.
    new_tensors(count, |all| unsafe {
        shoal_all_parts(own.as_ptr(), own.len(), exchange, index, all, count, alike)
    })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::device::collectives::{self, Library, proven};
    use crate::device::setup::{DeviceChoice, Devices};
    use crate::device::shim::gradients;
    use crate::device::tensor::elements;

    /// Parts of slices, whose sum depends on the order.
    fn parts(slices: usize, count: usize, kind: Kind) -> Vec<Tensor> {
        let all = collectives::parts(slices, count).expect("memory").into_iter();
        all.map(|part| part.view([1, -1]).to_kind(kind)).collect()
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        elements(&tensor.to_device(Device::Cpu).to_kind(Kind::Float).contiguous()).to_vec()
    }

    /// Forward, the sum of products of `x` with each part; then the gradient of `x`.
    fn pass(parts: &[Tensor], seat: Option<&Seat>) -> [Vec<f32>; 2] {
        let like = (parts[0].kind(), parts[0].device());
        let x = Tensor::full([1, parts[0].numel() as i64], 0.3, like).set_requires_grad(true);
        let read = fan_out(&x, parts.len(), seat).expect("equal shapes");
        let products: Vec<Tensor> = read.iter().zip(parts).map(|(x, part)| x * part).collect();
        let sum = sum_in_order(&products, seat).expect("equal shapes");
        let of_x = gradients(&sum, Some(&sum.ones_like()), &[&x]).expect("a graph").remove(0);
        [floats(&sum), floats(&of_x)]
    }

    /// Compares sums by devices with sums by one.
    fn compare(slices: usize, devices: &[Device], seats: impl Fn() -> Vec<Seat>) {
        for kind in [Kind::Float, Kind::BFloat16] {
            // A few elements are not divided; many are, into unequal shares.
            for count in [5, (1 << 14) + 1] {
                let parts = parts(slices, count, kind);
                let expected = pass(&parts, None);
                let own = parts.chunks(slices / devices.len()).zip(devices);
                let own = own.map(|(own, device)| {
                    own.iter().map(|part| part.to_device(*device)).collect::<Vec<_>>()
                });
                std::thread::scope(|scope| {
                    let started: Vec<_> = seats()
                        .into_iter()
                        .zip(own)
                        .map(|(seat, own)| scope.spawn(move || pass(&own, Some(&seat))))
                        .collect();
                    for thread in started {
                        let found = thread.join().expect("no device fails");
                        assert!(found == expected, "{kind:?}, {slices} slices, {count}");
                    }
                });
            }
        }
    }

    const CASES: [(usize, usize); 3] = [(2, 2), (4, 2), (3, 3)];

    #[test]
    fn devices_sum_to_the_bits_of_one_whether_they_divide_the_elements_or_not() {
        for (slices, seats) in CASES {
            compare(slices, &vec![Device::Cpu; seats], || Seat::all(seats));
        }
    }

    #[test]
    fn collectives_sum_to_the_bits_of_one_device() {
        for (slices, seats) in CASES {
            let workers = vec![DeviceChoice::Cpu; seats];
            let seats = || proven(Library::Gloo, &workers).expect("gloo is a part of libtorch");
            compare(slices, &vec![Device::Cpu; workers.len()], seats);
        }
        // None without a GPU.
        let gpus = Devices::AllCuda.resolve().unwrap_or_default();
        for count in 1..=gpus.len().min(4) {
            let devices: Vec<Device> = (0..count).map(Device::Cuda).collect();
            let seats =
                || proven(Library::Nccl, &gpus[..count]).expect("NCCL is a part of libtorch");
            compare(2 * count, &devices, seats);
        }
    }
}
