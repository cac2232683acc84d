//! Checks of libtorch, of the GPUs and of the driver that both need.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use shoal_protocol::units::Bytes;

use super::Finding;
use super::room::room;

/// Devices of the PCI bus, a folder each.
const PCI: &str = "/sys/bus/pci/devices";

/// NVIDIA's number among the vendors of PCI devices, and the beginning of the class of a GPU.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// A version of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cuda {
    major: u32,
    minor: u32,
}

impl Cuda {
    fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    /// The oldest driver that runs its libraries, as NVIDIA's release notes have it.
    fn least_driver(self) -> &'static str {
        if self.major >= 13 { "580" } else { "525" }
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA {}.{}", self.major, self.minor)
    }
}

/// Checks libtorch, the GPUs and their driver.
pub(crate) fn libtorch() -> Vec<Finding> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let folder = folder_of(&maps);
    let cuda = folder.as_deref().and_then(cuda_of);
    let mut findings = vec![build(&shoal_engine::torch_version(), folder.as_deref(), cuda)];
    findings.extend(match Nvml::init() {
        Ok(nvml) => {
            gpus(&nvml, cuda).unwrap_or_else(|error| vec![Finding::note("GPU", error.to_string())])
        }
        Err(error) => no_driver(Path::new(PCI), &error).into_iter().collect(),
    });
    findings
}

/// The folder of the library in the memory of a process.
fn folder_of(maps: &str) -> Option<PathBuf> {
    let line = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so"))?;
    Some(Path::new(&line[line.find('/')?..]).parent()?.to_owned())
}

/// The version of CUDA that the libtorch in a folder is built for; `None` if it computes on processors only.
fn cuda_of(folder: &Path) -> Option<Cuda> {
    if !folder.join("libtorch_cuda.so").exists() {
        return None;
    }
    let text = fs::read_to_string(folder.with_file_name("version.py")).ok()?;
    let line = text.lines().find(|line| line.starts_with("cuda"))?;
    Cuda::parse(line.split('\'').nth(1)?)
}

fn build(version: &str, folder: Option<&Path>, cuda: Option<Cuda>) -> Finding {
    let place = folder.map_or_else(String::new, |folder| format!(" in {}", folder.display()));
    let kind = match cuda {
        Some(cuda) => cuda.to_string(),
        None => "processors only".to_owned(),
    };
    Finding::well("libtorch", format!("{version}{place}, for {kind}"))
}

/// A finding for the driver, and one for each GPU.
fn gpus(nvml: &Nvml, libtorch: Option<Cuda>) -> Result<Vec<Finding>, NvmlError> {
    let most = nvml.sys_cuda_driver_version()?;
    let [major, minor] = [cuda_driver_version_major(most), cuda_driver_version_minor(most)];
    let most = Cuda { major: major.unsigned_abs(), minor: minor.unsigned_abs() };
    let mut findings = vec![driver(&nvml.sys_driver_version()?, most, libtorch)];
    for number in 0..nvml.device_count()? {
        let gpu = nvml.device_by_index(number)?;
        let memory = gpu.memory_info()?;
        let (free, total) = (Bytes(memory.free), Bytes(memory.total));
        let text = format!("{}, {free} free of {total}: {}", gpu.name()?, room(free));
        findings.push(Finding::well(&format!("GPU {number}"), text));
    }
    Ok(findings)
}

/// Compares a driver, which runs versions of CUDA up to one and all of its major version, with libtorch.
fn driver(version: &str, most: Cuda, libtorch: Option<Cuda>) -> Finding {
    const ABOUT: &str = "NVIDIA driver";
    let text = format!("{version}, for {most}");
    match libtorch {
        Some(needed) if needed.major > most.major => Finding::wrong(
            ABOUT,
            format!("{text}; libtorch is built for {needed}, so that no GPU can be used"),
            format!(
                "install driver {} or newer, or the libtorch of an older CUDA (`pip install torch==2.11.0 --index-url \
                 https://download.pytorch.org/whl/cu126`)",
                needed.least_driver()
            ),
        ),
        _ => Finding::well(ABOUT, text),
    }
}

/// A note if there are GPUs without a driver that this process can reach.
fn no_driver(devices: &Path, error: &NvmlError) -> Option<Finding> {
    let count = nvidia_gpus(devices);
    (count > 0).then(|| Finding {
        fix: Some(
            "install NVIDIA's driver, 580 or newer; in a container, start it with `--gpus all`"
                .to_owned(),
        ),
        ..Finding::note(
            "NVIDIA driver",
            format!("this machine has {count} NVIDIA GPUs, and no driver answers: {error}"),
        )
    })
}

/// Counts the GPUs of NVIDIA on the PCI bus.
fn nvidia_gpus(devices: &Path) -> usize {
    let says = |folder: &Path, name: &str, beginning: &str| {
        fs::read_to_string(folder.join(name)).is_ok_and(|text| text.starts_with(beginning))
    };
    let Ok(folders) = fs::read_dir(devices) else { return 0 };
    let folders = folders.flatten().map(|entry| entry.path());
    folders
        .filter(|folder| says(folder, "vendor", NVIDIA) && says(folder, "class", DISPLAY))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    const fn cuda(major: u32, minor: u32) -> Cuda {
        Cuda { major, minor }
    }

    #[test]
    fn libtorch_says_its_folder_and_its_cuda() {
        let site = tempfile::tempdir().expect("a folder");
        let library = site.path().join("lib/libtorch_cpu.so");
        let folder = library.parent().expect("it has one");
        fs::create_dir(folder).expect("room for a folder");
        let maps =
            format!("7f00-7f10 r--p 00000000 08:01 7 /lib/a.so\n7f20 {}\n", library.display());
        assert_eq!(folder_of(&maps).as_deref(), Some(folder));
        assert_eq!(folder_of("7f00 /lib/a.so"), None);
        let version = "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n";
        fs::write(site.path().join("version.py"), version).expect("room for a file");
        assert_eq!(cuda_of(folder), None, "the half for processors alone");
        fs::write(folder.join("libtorch_cuda.so"), "").expect("room for a file");
        assert_eq!(cuda_of(folder), Some(cuda(13, 0)));
        assert!(build("2.11.0", Some(folder), cuda_of(folder)).says.ends_with("for CUDA 13.0"));
        assert!(build("2.11.0", None, None).says.ends_with("for processors only"));
    }

    #[test]
    fn a_driver_runs_every_cuda_of_its_major_version() {
        let state = |most, needed| driver("1", most, needed).state;
        assert_eq!(state(cuda(13, 0), Some(cuda(13, 0))), State::Well);
        assert_eq!(state(cuda(12, 4), Some(cuda(12, 6))), State::Well);
        assert_eq!(state(cuda(13, 1), Some(cuda(12, 6))), State::Well);
        assert_eq!(state(cuda(12, 4), None), State::Well);
        let old = driver("550.54.15", cuda(12, 4), Some(cuda(13, 0)));
        assert_eq!(old.state, State::Wrong);
        assert!(old.fix.is_some_and(|fix| fix.contains("driver 580 or newer")));
    }

    #[test]
    fn gpus_without_a_driver_are_noticed() {
        let bus = tempfile::tempdir().expect("a folder");
        let add = |name: &str, vendor: &str, class: &str| {
            let folder = bus.path().join(name);
            fs::create_dir(&folder).expect("room for a folder");
            fs::write(folder.join("vendor"), vendor).expect("room for a file");
            fs::write(folder.join("class"), class).expect("room for a file");
        };
        assert_eq!(no_driver(bus.path(), &NvmlError::DriverNotLoaded), None);
        add("other", "0x8086\n", "0x030000\n");
        add("sound", "0x10de\n", "0x040300\n");
        assert_eq!(nvidia_gpus(bus.path()), 0);
        add("gpu", "0x10de\n", "0x030200\n");
        let found = no_driver(bus.path(), &NvmlError::DriverNotLoaded).expect("a note");
        assert_eq!(found.state, State::Note);
        assert!(found.fix.is_some_and(|fix| fix.contains("--gpus all")));
        assert_eq!(nvidia_gpus(Path::new("/nowhere")), 0);
    }
}
