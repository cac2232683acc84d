//! Kernels on a device.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use tch::Tensor;

use super::compiler;
use crate::device::shim::check;
use crate::error::{EngineError, Result};

/// Threads of a block.
const THREADS: u32 = 256;
/// Most blocks of a launch: each thread takes several elements of more.
const BLOCKS: u64 = 4096;

unsafe extern "C" {
    fn shoal_computing_stream(index: i64, result: *mut *mut c_void) -> *mut c_char;
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Argument {
    /// An address in the device's memory.
    Address(*mut c_void),
    /// A number of elements.
    Count(u64),
    /// A number.
    Number(f64),
    /// 32 bits.
    Bits(u32),
    /// A structure of as many numbers.
    Numbers([f32; 8]),
    /// A structure of as many counts.
    #[cfg(test)]
    Counts([u64; 5]),
    /// A number of f32.
    #[cfg(test)]
    Float(f32),
}

impl Argument {
    /// An element of a tensor, counted in bytes from its first.
    pub(crate) fn of(tensor: &Tensor, bytes: usize) -> Self {
        Self::Address(tensor.data_ptr().wrapping_byte_add(bytes))
    }

    pub(super) fn place(&mut self) -> *mut c_void {
        match self {
            Self::Address(address) => (&raw mut *address).cast(),
            Self::Count(count) => (&raw mut *count).cast(),
            Self::Number(number) => (&raw mut *number).cast(),
            Self::Bits(bits) => (&raw mut *bits).cast(),
            Self::Numbers(numbers) => (&raw mut *numbers).cast(),
            #[cfg(test)]
            Self::Counts(counts) => (&raw mut *counts).cast(),
            #[cfg(test)]
            Self::Float(number) => (&raw mut *number).cast(),
        }
    }
}

/// The kernels of this crate, on one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    index: usize,
    context: sys::CUcontext,
    module: sys::CUmodule,
    functions: Mutex<BTreeMap<String, Function>>,
}

/// The kernels of a GPU, or why it has none.
type Opened = std::result::Result<&'static Kernels, String>;

#[derive(Debug, Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: contexts, modules and functions are handles that any thread may use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// The kernels of a device; `None` if it is no GPU, or they cannot be compiled for it.
    pub(crate) fn of(device: tch::Device) -> Option<&'static Self> {
        Self::opened(device)?.ok()
    }

    /// Whether a device computes the elementwise parts of a layer in functions of this crate: loops on a processor, kernels
    /// on a GPU.
    pub(crate) fn are_on(device: tch::Device) -> bool {
        device == tch::Device::Cpu || Self::of(device).is_some()
    }

    /// Why a GPU has no kernels of this crate.
    pub(crate) fn missing(device: tch::Device) -> Option<String> {
        Self::opened(device)?.err()
    }

    /// `None` for a processor. They are compiled at the first call.
    fn opened(device: tch::Device) -> Option<Opened> {
        static OPENED: Mutex<BTreeMap<usize, Opened>> = Mutex::new(BTreeMap::new());
        let tch::Device::Cuda(index) = device else { return None };
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = opened.entry(index).or_insert_with(|| match Self::open(index) {
            Ok(kernels) => Ok(Box::leak(Box::new(kernels))),
            Err(error) => Err(error.to_string()),
        });
        Some(opened.clone())
    }

    fn open(index: usize) -> Result<Self> {
        // SAFETY: it opens a library, whose initialisers are its own.
        if !unsafe { sys::is_culib_present() } {
            return Err(EngineError::Kernels("there is no driver".to_owned()));
        }
        result::init().map_err(failed("cuInit"))?;
        let ordinal = i32::try_from(index).unwrap_or(i32::MAX);
        let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let minor = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        // SAFETY: the driver is initialised; it refuses a device that it does not list.
        let (device, major, minor) = unsafe {
            let device = result::device::get(ordinal).map_err(failed("cuDeviceGet"))?;
            let get = |attribute| {
                result::device::get_attribute(device, attribute)
                    .map_err(failed("cuDeviceGetAttribute"))
            };
            (device, get(attribute)?, get(minor)?)
        };
        let code = compiler::compile(10 * major + minor)?;
        let code = CString::new(code.to_src().trim_end_matches('\0'))
            .map_err(|_| EngineError::Kernels("their code has a zero".to_owned()))?;
        // SAFETY: the device exists. libtorch computes in the same context, which is never released.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = context.map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let module = within(context, || {
            // SAFETY: the code ends with a zero, and lives for the call.
            unsafe { result::module::load_data(code.as_ptr().cast()) }
                .map_err(failed("cuModuleLoadData"))
        })?;
        Ok(Self { index, context, module, functions: Mutex::default() })
    }

    /// Lets the device compute a kernel for so many elements, after all that it was told before.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and the tensors of their addresses have as many elements as it reads and
    /// writes. They stay until the device has computed it: libtorch gives their memory to nothing else before, as long as
    /// that computes on the same stream.
    pub(crate) unsafe fn launch<const N: usize>(
        &self,
        name: &'static str,
        elements: u64,
        mut arguments: [Argument; N],
    ) -> Result<()> {
        let mut places = arguments.each_mut().map(Argument::place);
        // SAFETY: those of the caller.
        unsafe { self.launch_at(name, elements, &mut places) }
    }

    /// Like [`Self::launch`], with the places of the arguments.
    ///
    /// # Safety
    /// As there.
    unsafe fn launch_at(
        &self,
        name: &str,
        elements: u64,
        places: &mut [*mut c_void],
    ) -> Result<()> {
        if elements == 0 {
            return Ok(());
        }
        let blocks = elements.div_ceil(u64::from(THREADS)).min(BLOCKS) as u32;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` lives for the call.
        check(unsafe { shoal_computing_stream(self.index as i64, &raw mut stream) })?;
        within(self.context, || {
            let Function(function) = self.function(name)?;
            let (blocks, threads) = ((blocks, 1, 1), (THREADS, 1, 1));
            // SAFETY: the caller's arguments are those of the kernel.
            unsafe { result::launch_kernel(function, blocks, threads, 0, stream.cast(), places) }
                .map_err(failed(name))
        })
    }

    fn function(&self, name: &str) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let of_c =
            CString::new(name).map_err(|_| EngineError::Kernels(format!("{name:?} is no name")))?;
        // SAFETY: the module is loaded, and the context is current.
        let function = unsafe { result::module::get_function(self.module, of_c) };
        let function = Function(function.map_err(failed(name))?);
        functions.insert(name.to_owned(), function);
        Ok(function)
    }
}

/// Calls the driver with a context, and leaves the thread with the one that it had.
fn within<T>(context: sys::CUcontext, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let before = result::ctx::get_current().map_err(failed("cuCtxGetCurrent"))?;
    if before == Some(context) {
        return call();
    }
    let set = |context| {
        // SAFETY: it is null or a context that lives as long as the process.
        unsafe { result::ctx::set_current(context) }.map_err(failed("cuCtxSetCurrent"))
    };
    set(context)?;
    let result = call();
    set(before.unwrap_or(std::ptr::null_mut()))?;
    result
}

/// Launches a kernel for `csrc/fused.cpp`, with the places of `count` arguments. Returns null, or a message to be freed.
///
/// # Safety
/// As of [`Kernels::launch`]; `name` ends with a zero.
#[unsafe(no_mangle)]
unsafe extern "C" fn shoal_launch(
    name: *const c_char,
    index: i64,
    elements: u64,
    arguments: *mut *mut c_void,
    count: usize,
) -> *mut c_char {
    // SAFETY: guaranteed by the caller.
    let (name, places) = unsafe {
        (CStr::from_ptr(name).to_string_lossy(), std::slice::from_raw_parts_mut(arguments, count))
    };
    let device = tch::Device::Cuda(usize::try_from(index).unwrap_or(usize::MAX));
    let launched = match Kernels::of(device) {
        // SAFETY: guaranteed by the caller.
        Some(kernels) => unsafe { kernels.launch_at(&name, elements, places) },
        None => Err(EngineError::Kernels(format!("cuda:{index} has none"))),
    };
    let Err(error) = launched else { return std::ptr::null_mut() };
    let message = CString::new(error.to_string()).unwrap_or_default();
    // SAFETY: it ends with a zero. The copy is freed by its reader.
    unsafe { libc::strdup(message.as_ptr()) }
}

fn failed(function: &str) -> impl Fn(DriverError) -> EngineError {
    move |DriverError(code)| {
        EngineError::Kernels(format!("{function}: error {} of CUDA's driver", code as u32))
    }
}
