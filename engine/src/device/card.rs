//! What the driver says about a GPU.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::error::{EngineError, Result};

/// Attributes of a device, by their numbers in `cuda.h`.
const MULTIPROCESSORS: c_int = 16;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;

/// Bytes for a name, as in CUDA's own properties of a device.
const NAME: usize = 256;

/// The driver's library.
struct Driver(*mut c_void);

impl Driver {
    fn open() -> Option<Self> {
        // SAFETY: its initialisers are the driver's own; the handle is never closed.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        (!handle.is_null()).then_some(Self(handle))
    }

    /// The address of one of its functions.
    fn function(&self, name: &CStr) -> Result<*mut c_void> {
        // SAFETY: the handle is open, and the name ends with a zero.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() { Err(failed(name)) } else { Ok(found) }
    }

    /// Calls a function that writes a number of a device.
    fn attribute(&self, attribute: c_int, device: c_int) -> Result<c_int> {
        const FUNCTION: &CStr = c"cuDeviceGetAttribute";
        type Function = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
        // SAFETY: `cuda.h` declares the function so.
        let get: Function = unsafe { std::mem::transmute(self.function(FUNCTION)?) };
        let mut value = 0;
        // SAFETY: `value` lives for the call.
        succeeds(FUNCTION, unsafe { get(&raw mut value, attribute, device) })?;
        Ok(value)
    }

    /// The newest CUDA that it serves, as 1000 · major + 10 · minor.
    fn version(&self) -> Result<c_int> {
        const FUNCTION: &CStr = c"cuDriverGetVersion";
        type Function = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: `cuda.h` declares the function so.
        let get: Function = unsafe { std::mem::transmute(self.function(FUNCTION)?) };
        let mut version = 0;
        // SAFETY: `version` lives for the call.
        succeeds(FUNCTION, unsafe { get(&raw mut version) })?;
        Ok(version)
    }

    fn device(&self, index: c_int) -> Result<c_int> {
        type Init = unsafe extern "C" fn(c_uint) -> c_int;
        type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
        // SAFETY: `cuda.h` declares the function so.
        let init: Init = unsafe { std::mem::transmute(self.function(c"cuInit")?) };
        // SAFETY: as above.
        let get: Get = unsafe { std::mem::transmute(self.function(c"cuDeviceGet")?) };
        let mut device = 0;
        // SAFETY: a second initialisation does nothing.
        succeeds(c"cuInit", unsafe { init(0) })?;
        // SAFETY: `device` lives for the call.
        succeeds(c"cuDeviceGet", unsafe { get(&raw mut device, index) })?;
        Ok(device)
    }

    fn name(&self, device: c_int) -> Result<String> {
        const FUNCTION: &CStr = c"cuDeviceGetName";
        type Function = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
        // SAFETY: `cuda.h` declares the function so.
        let get: Function = unsafe { std::mem::transmute(self.function(FUNCTION)?) };
        let mut name = [0 as c_char; NAME];
        // SAFETY: there is room for as many characters as it is told.
        succeeds(FUNCTION, unsafe { get(name.as_mut_ptr(), NAME as c_int, device) })?;
        // SAFETY: the driver ends the name with a zero, and the last character is one that it did not write.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }
}

/// Whether the machine has NVIDIA's driver.
pub(crate) fn has_driver() -> bool {
    Driver::open().is_some()
}

/// The model of a GPU, what it can compute, and its driver's CUDA: equal for GPUs that compute equal bits.
///
/// # Errors
/// If the driver does not say.
pub(crate) fn describe(index: usize) -> Result<String> {
    let driver = Driver::open().ok_or_else(|| failed(c"dlopen of libcuda.so.1"))?;
    let device = driver.device(c_int::try_from(index).unwrap_or(c_int::MAX))?;
    let [major, minor, multiprocessors] =
        [MAJOR, MINOR, MULTIPROCESSORS].map(|attribute| driver.attribute(attribute, device));
    Ok(format!(
        "{}, compute capability {}.{}, {} multiprocessors, driver {}",
        driver.name(device)?,
        major?,
        minor?,
        multiprocessors?,
        driver.version()?
    ))
}

fn failed(function: &CStr) -> EngineError {
    EngineError::Driver(function.to_string_lossy().into_owned())
}

fn succeeds(function: &CStr, status: c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(failed(function)) }
}
