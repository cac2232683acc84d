//! Kernels on a device.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use tch::Tensor;

use super::compiler;
use crate::error::{EngineError, Result};
use crate::shim::check;

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
}

impl Argument {
    /// An element of a tensor, counted in bytes from its first.
    pub(crate) fn of(tensor: &Tensor, bytes: usize) -> Self {
        Self::Address(tensor.data_ptr().wrapping_byte_add(bytes))
    }

    fn place(&mut self) -> *mut c_void {
        match self {
            Self::Address(address) => (&raw mut *address).cast(),
            Self::Count(count) => (&raw mut *count).cast(),
            Self::Number(number) => (&raw mut *number).cast(),
            Self::Bits(bits) => (&raw mut *bits).cast(),
            Self::Numbers(numbers) => (&raw mut *numbers).cast(),
        }
    }
}

/// The kernels of this crate, on one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    index: usize,
    context: sys::CUcontext,
    module: sys::CUmodule,
    functions: Mutex<BTreeMap<&'static str, Function>>,
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
        let ordinal = i32::try_from(index).unwrap_or(i32::MAX);
        let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let minor = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR;
        // SAFETY: libtorch has loaded the driver, which lists the device.
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
        if elements == 0 {
            return Ok(());
        }
        let blocks = elements.div_ceil(u64::from(THREADS)).min(BLOCKS) as u32;
        let mut places = arguments.each_mut().map(Argument::place);
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` lives for the call.
        check(unsafe { shoal_computing_stream(self.index as i64, &raw mut stream) })?;
        within(self.context, || {
            let Function(function) = self.function(name)?;
            // SAFETY: the caller's arguments are those of the kernel.
            let launched = unsafe {
                result::launch_kernel(
                    function,
                    (blocks, 1, 1),
                    (THREADS, 1, 1),
                    0,
                    stream.cast(),
                    &mut places,
                )
            };
            launched.map_err(failed(name))
        })
    }

    fn function(&self, name: &'static str) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(*function);
        }
        let of_c =
            CString::new(name).map_err(|_| EngineError::Kernels(format!("{name:?} is no name")))?;
        // SAFETY: the module is loaded, and the context is current.
        let function = unsafe { result::module::get_function(self.module, of_c) };
        let function = Function(function.map_err(failed(name))?);
        functions.insert(name, function);
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

fn failed(function: &'static str) -> impl Fn(DriverError) -> EngineError {
    move |DriverError(code)| {
        EngineError::Kernels(format!("{function}: error {} of CUDA's driver", code as u32))
    }
}
