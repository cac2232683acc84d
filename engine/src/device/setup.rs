//! The device of tensors, and the setup of libtorch.

use std::ffi::CStr;
use std::fmt;
use std::str::FromStr;
use std::sync::{Once, OnceLock};

use shoal_protocol::units::Bytes;
use tch::{Cuda, Kind, Tensor};

use crate::device::card;
use crate::device::cuda::Kernels;
use crate::device::mkl::{self, MklDispatch};
use crate::device::shim;
use crate::error::{EngineError, Result};

/// A requested device: `auto`, `cpu` or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first working CUDA device, otherwise the CPU.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// The CUDA device with this index.
    Cuda(usize),
}

impl DeviceChoice {
    /// Whether tensors are in the machine's own memory.
    #[must_use]
    pub fn is_processor(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Auto => self.known() == Self::Cpu,
            Self::Cuda(_) => false,
        }
    }

    /// Why an open GPU computes with libtorch's kernels alone, and not with those of this crate, which are faster.
    #[must_use]
    pub fn lacks_kernels(self) -> Option<String> {
        match self.known() {
            Self::Cuda(index) => Kernels::missing(tch::Device::Cuda(index)),
            Self::Auto | Self::Cpu => None,
        }
    }

    /// The device that [`Device::open`] opens for it.
    fn known(self) -> Self {
        match self {
            Self::Auto => open_cuda(0).map_or(Self::Cpu, |_| Self::Cuda(0)),
            Self::Cpu | Self::Cuda(_) => self,
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self> {
        let number = || text.strip_prefix("cuda:")?.parse().ok();
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => {
                number().map(Self::Cuda).ok_or_else(|| EngineError::UnknownDevice(text.to_owned()))
            }
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// The devices of a process: one that is `auto`, `cpu` or `cuda:N`, several GPUs as `cuda:0,cuda:1`, `all`
/// for every GPU, or `cpu:N` for N workers that share the processor's threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// One or more, all of one kind.
    Listed(Vec<DeviceChoice>),
    /// Every CUDA device.
    AllCuda,
}

impl Devices {
    /// The most workers on a processor, and the most GPUs.
    pub const MOST: usize = 64;

    /// The devices one by one.
    ///
    /// # Errors
    /// If every GPU was requested and none works.
    pub fn resolve(&self) -> Result<Vec<DeviceChoice>> {
        match self {
            Self::Listed(devices) => Ok(devices.iter().copied().map(DeviceChoice::known).collect()),
            Self::AllCuda => {
                open_cuda(0)?;
                let count = usize::try_from(Cuda::device_count()).unwrap_or(0);
                Ok((0..count.min(Self::MOST)).map(DeviceChoice::Cuda).collect())
            }
        }
    }
}

impl Default for Devices {
    fn default() -> Self {
        DeviceChoice::default().into()
    }
}

impl From<DeviceChoice> for Devices {
    fn from(device: DeviceChoice) -> Self {
        Self::Listed(vec![device])
    }
}

impl FromStr for Devices {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || EngineError::UnknownDevice(text.to_owned());
        if text == "all" {
            return Ok(Self::AllCuda);
        }
        if let Some(workers) = text.strip_prefix("cpu:") {
            let workers = workers.parse().ok().filter(|count| (1..=Self::MOST).contains(count));
            return Ok(Self::Listed(vec![DeviceChoice::Cpu; workers.ok_or_else(unknown)?]));
        }
        let listed = text.split(',').map(|name| name.trim().parse().map_err(|_| unknown()));
        let listed: Vec<DeviceChoice> = listed.collect::<Result<_>>()?;
        let are_gpus = listed.iter().all(|device| matches!(device, DeviceChoice::Cuda(_)));
        if listed.len() > Self::MOST || listed.len() > 1 && !are_gpus {
            return Err(unknown());
        }
        all_differ(&listed)?;
        Ok(Self::Listed(listed))
    }
}

/// Checks that no device is named twice.
pub(crate) fn all_differ(devices: &[DeviceChoice]) -> Result<()> {
    let again = (1..devices.len()).find(|place| devices[..*place].contains(&devices[*place]));
    again.map_or(Ok(()), |place| Err(EngineError::SameDeviceTwice(devices[place].to_string())))
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllCuda => f.write_str("all"),
            Self::Listed(devices) => match &devices[..] {
                [DeviceChoice::Cpu, _, ..] => write!(f, "cpu:{}", devices.len()),
                devices => {
                    let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
                    f.write_str(&names.join(","))
                }
            },
        }
    }
}

/// A working device, with libtorch set up for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Where passes are computed.
    pub(crate) torch: tch::Device,
    /// Whether the state of stages is in the machine's memory, and passes read images of weights.
    pub(crate) has_images: bool,
    pub(crate) threads: usize,
}

impl Device {
    /// Sets up libtorch and selects the device. Call this before any other work of libtorch, which reads its thread
    /// count once, and looks once for CUDA: where there is a GPU, its library is loaded whatever the device.
    ///
    /// `threads` is the number of threads for tensor work on the processor; the bits of results
    /// depend on it.
    ///
    /// # Errors
    /// If a CUDA device was requested by index and does not work.
    pub fn open(choice: DeviceChoice, threads: usize) -> Result<Self> {
        let torch = match choice {
            DeviceChoice::Cpu => {
                // Otherwise a first backward pass on the processor would turn CUDA off for the process.
                if card::has_driver() {
                    let _ = load_cuda();
                }
                tch::Device::Cpu
            }
            DeviceChoice::Cuda(index) => open_cuda(index)?,
            DeviceChoice::Auto => open_cuda(0).unwrap_or(tch::Device::Cpu),
        };
        // Before MKL asks, so that the measurement has the processor to itself.
        let _ = MklDispatch::of_this_process();
        let count = i32::try_from(threads.max(1)).unwrap_or(i32::MAX);
        tch::set_num_threads(count);
        static FIRST: Once = Once::new();
        FIRST.call_once(|| {
            // libtorch rejects a second call.
            tch::set_num_interop_threads(1);
            mkl::be_reproducible();
        });
        shim::be_deterministic()?;
        Ok(Self { torch, has_images: false, threads: threads.max(1) })
    }

    /// The same device, with the state of stages in the machine's memory, where updates are computed.
    pub(crate) fn with_images(self) -> Self {
        Self { has_images: true, ..self }
    }

    /// Where weights, what the optimizer keeps, and sums are.
    pub(crate) fn state(self) -> tch::Device {
        if self.has_images { tch::Device::Cpu } else { self.torch }
    }

    /// Zeros where weights are kept: in memory from which a GPU copies by itself, if passes read images there.
    pub(crate) fn zeros(self, elements: usize, kind: Kind) -> Result<Tensor> {
        let zeros = Tensor::f_zeros([elements as i64], (kind, self.state()))?;
        match self.has_images && self.is_cuda() {
            true => Ok(zeros.f_pin_memory(self.torch)?),
            false => Ok(zeros),
        }
    }

    /// Memory that is free on a GPU.
    ///
    /// # Errors
    /// If it is no GPU, or its driver does not say.
    pub fn free_memory(self) -> Result<Bytes> {
        crate::device::streams::free_memory(self.torch)
    }

    /// Whether it is a GPU.
    #[must_use]
    pub fn is_cuda(self) -> bool {
        self.torch.is_cuda()
    }

    /// Threads of the processor's tensor work.
    #[must_use]
    pub fn threads(self) -> usize {
        self.threads
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.torch {
            tch::Device::Cuda(index) => write!(f, "cuda:{index}"),
            _ => f.write_str("cpu"),
        }
    }
}

/// Loads libtorch's CUDA library and tests the device.
fn open_cuda(index: usize) -> Result<tch::Device> {
    let missing = |reason: String| EngineError::NoCuda { index, reason };
    load_cuda().map_err(missing)?;
    if !Cuda::is_available() {
        return Err(missing("no NVIDIA driver answers".to_owned()));
    }
    let count = Cuda::device_count();
    if i64::try_from(index).is_ok_and(|index| index >= count) {
        return Err(missing(format!("there are {count}")));
    }
    let device = tch::Device::Cuda(index);
    let _ = Tensor::f_zeros([1], (Kind::Float, device))
        .map_err(|error| missing(EngineError::from(error).to_string()))?;
    Ok(device)
}

/// Loads libtorch's CUDA library, at the first call.
fn load_cuda() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED.get_or_init(|| load_library(c"libtorch_cuda.so")).clone()
}

/// Registers libtorch_cuda's operators. Linking the library would require it on every machine.
fn load_library(name: &CStr) -> Result<(), String> {
    // SAFETY: the library's initialisers are libtorch's own; the handle is never closed.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !handle.is_null() {
        return Ok(());
    }
    // SAFETY: after a failed dlopen it is a message or null.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return Err("libtorch_cuda cannot be loaded".to_owned());
    }
    // SAFETY: it is not null, ends with a zero, and is read before the next call.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_devices_are_read_and_written_alike() {
        use DeviceChoice::{Auto, Cpu, Cuda};
        assert_eq!("auto".parse::<Devices>().expect("a device"), Auto.into());
        let cases: [(&str, &[DeviceChoice]); 5] = [
            ("cpu", &[Cpu]),
            ("cpu:3", &[Cpu; 3]),
            ("cuda", &[Cuda(0)]),
            ("cuda:2", &[Cuda(2)]),
            ("cuda:1,cuda:0", &[Cuda(1), Cuda(0)]),
        ];
        for (text, expected) in cases {
            let devices: Devices = text.parse().expect("a list of devices");
            assert_eq!(devices.resolve().expect("listed"), expected, "{text}");
            assert_eq!(devices.to_string().parse::<Devices>().expect("its own text"), devices);
        }
        assert_eq!("all".parse::<Devices>().expect("every GPU"), Devices::AllCuda);
    }

    #[test]
    fn a_wrong_list_says_what_is_wrong() {
        let error = |text: &str| text.parse::<Devices>().expect_err("wrong").to_string();
        for text in
            ["", "cpu:0", "cpu:65", "cpu,cpu", "cuda:0,cpu", "auto,cuda:0", "gpu", "cuda:0,"]
        {
            assert!(error(text).contains(&format!("{text:?} is no device")), "{text}");
        }
        assert!(error("cuda:1,cuda:0,cuda:1").contains("cuda:1 is named twice"));
    }
}
