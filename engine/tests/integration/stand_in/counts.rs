//! What the stand-in counts (`engine/tests/stand_in/counts.cpp`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// Counts since the last reset, of all devices.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) kernels: u64,
    /// Distinct bytes that kernels read and write.
    pub(super) kernel_bytes: u64,
    /// Times that the host waits for a device.
    pub(super) waits: u64,
    /// Copies between a device and memory that is not pinned.
    pub(super) pageable_copies: u64,
    pub(super) pageable_bytes: u64,
    pub(super) bytes_to_device: u64,
    pub(super) bytes_to_host: u64,
}

impl Counts {
    /// Runs something. Returns what it adds to the counts.
    pub(super) fn of(work: impl FnOnce()) -> Self {
        reset();
        work();
        let read: unsafe extern "C" fn(*mut Self) =
            // SAFETY: the stand-in declares the function so.
            unsafe { std::mem::transmute(function(c"stand_in_read")) };
        let mut counts = Self::default();
        // SAFETY: `counts` lives for the call.
        unsafe { read(&raw mut counts) };
        counts
    }

    /// What it has more than another.
    pub(super) fn minus(self, other: Self) -> [f64; 7] {
        let of = |one: Self| {
            let Self { kernels, kernel_bytes, waits, .. } = one;
            let Self { pageable_copies, pageable_bytes, bytes_to_device, bytes_to_host, .. } = one;
            let copies = [pageable_copies, pageable_bytes, bytes_to_device, bytes_to_host];
            [kernels, kernel_bytes, waits, copies[0], copies[1], copies[2], copies[3]]
        };
        let (own, others) = (of(self), of(other));
        std::array::from_fn(|place| own[place] as f64 - others[place] as f64)
    }
}

/// Begins counting anew. The peak becomes the memory in use.
pub(super) fn reset() {
    let reset: unsafe extern "C" fn() =
        // SAFETY: the stand-in declares the function so.
        unsafe { std::mem::transmute(function(c"stand_in_reset")) };
    // SAFETY: it has no arguments.
    unsafe { reset() };
}

/// Calls of a kernel since the last reset.
pub(super) fn calls(kernel: &str) -> u64 {
    of_kernel(c"stand_in_calls", kernel)
}

/// Distinct bytes that each call of a kernel since the last reset has read and written.
pub(super) fn bytes(kernel: &str) -> u64 {
    of_kernel(c"stand_in_bytes", kernel)
}

fn of_kernel(name: &CStr, kernel: &str) -> u64 {
    let read: unsafe extern "C" fn(*const c_char) -> u64 =
        // SAFETY: the stand-in declares both functions so.
        unsafe { std::mem::transmute(function(name)) };
    let kernel = CString::new(kernel).expect("a name");
    // SAFETY: the name ends with a zero.
    unsafe { read(kernel.as_ptr()) }
}

/// The most memory of the first device in use since the last reset, and what is in use.
pub(super) fn memory() -> (u64, u64) {
    let memory: unsafe extern "C" fn(c_int, *mut u64, *mut u64) =
        // SAFETY: the stand-in declares the function so.
        unsafe { std::mem::transmute(function(c"stand_in_memory")) };
    let (mut peak, mut live) = (0, 0);
    // SAFETY: both live for the call.
    unsafe { memory(0, &raw mut peak, &raw mut live) };
    (peak, live)
}

/// The address of one of the stand-in's functions.
fn function(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}: the stand-in is not loaded");
    found
}
