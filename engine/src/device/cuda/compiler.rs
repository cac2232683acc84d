//! NVRTC: kernels from their source.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts, sys};

use crate::error::{EngineError, Result};

/// The source of all kernels.
pub(super) const SOURCE: &str = concat!(
    include_str!("../../../kernels/portable.h"),
    include_str!("../../../kernels/accumulate.cu"),
    include_str!("../../../kernels/adamw.cu"),
    include_str!("../../../kernels/embedding.cu"),
    include_str!("../../../kernels/nf4.cu"),
    include_str!("../../../kernels/norm.cu"),
    include_str!("../../../kernels/rotary.cu"),
    include_str!("../../../kernels/swiglu.cu"),
    include_str!("../../../kernels/loss.cu"),
);

/// NVRTC's files in a Python's packages, beside `torch`. The first finds the others by their names.
const LIBRARIES: [&str; 2] = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"];

/// Compiles the kernels for cards of a compute capability, as 10 · major + minor.
///
/// # Errors
/// If there is no NVRTC, or it refuses the capability.
pub(super) fn compile(capability: i32) -> Result<Ptx> {
    load();
    // SAFETY: it opens a library, whose initialisers are its own.
    if !unsafe { sys::is_culib_present() } {
        return Err(EngineError::Kernels("there is no libnvrtc.so.13 beside libtorch".to_owned()));
    }
    let options = CompileOptions {
        // A product is rounded before it is added, as on a processor.
        fmad: Some(false),
        options: vec![format!("--gpu-architecture=compute_{capability}"), "--std=c++17".to_owned()],
        ..CompileOptions::default()
    };
    compile_ptx_with_opts(SOURCE, options).map_err(|error| {
        let reason = match &error {
            CompileError::CompileError { log, .. } => log.to_string_lossy().into_owned(),
            other => format!("{other:?}"),
        };
        EngineError::Kernels(format!("for compute capability {capability}: {}", reason.trim()))
    })
}

/// Loads NVRTC from beside libtorch. Where it is not, the loader finds it on its own path or not at all.
fn load() {
    if let Some(folder) = packages() {
        load_from(&folder);
    }
}

/// Loads NVRTC from a Python's packages, if it is there.
fn load_from(folder: &Path) {
    for name in LIBRARIES {
        let path = folder.join("nvidia/cu13/lib").join(name);
        let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { continue };
        // SAFETY: the library's initialisers are its own; the handle is never closed.
        let _ = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    }
}

/// The folder with the package whose libtorch this process has loaded.
fn packages() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let loaded = maps.lines().find(|line| line.ends_with("/torch/lib/libtorch_cpu.so"))?;
    let path = &loaded[loaded.find('/')?..];
    Path::new(path).ancestors().nth(3).map(Path::to_owned)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Those of the tests' Python, which has NVRTC too where libtorch was downloaded without it.
    fn packages_of_tests() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/lib");
        let versions = fs::read_dir(root).into_iter().flatten().flatten();
        versions.map(|version| version.path().join("site-packages")).collect()
    }

    /// Loads NVRTC; returns whether there is one, and says where not.
    pub(in super::super) fn is_there() -> bool {
        // libtorch is loaded when it is first used.
        let _ = tch::Tensor::from(0.0);
        load();
        for folder in packages_of_tests() {
            load_from(&folder);
        }
        // SAFETY: as in `compile`.
        let is_there = unsafe { sys::is_culib_present() };
        if !is_there {
            eprintln!("skipped: there is no NVRTC beside libtorch");
        }
        is_there
    }

    /// The capabilities of the cards from 2018 on that libtorch serves.
    pub(in super::super) const CAPABILITIES: [i32; 7] = [75, 80, 86, 89, 90, 100, 120];

    #[test]
    fn kernels_compile_for_all_cards() {
        if !is_there() {
            return;
        }
        for capability in CAPABILITIES {
            let code = compile(capability).unwrap_or_else(|error| panic!("{error}"));
            let code = code.to_src();
            for kernel in ["largest_f32", "add_bf16", "adamw", "rotate_f32", "cross_entropy_bf16"] {
                assert!(
                    code.contains(&format!(".entry shoal_{kernel}(")),
                    "{capability}: {kernel}"
                );
            }
            for kernel in code.split(".entry ").skip(1) {
                let name = kernel.split('(').next().expect("the first part");
                // CUDA's own logarithm has some.
                let is_rounded = name.contains("cross_entropy") || !kernel.contains("fma.rn");
                assert!(
                    is_rounded,
                    "{name}, {capability}: a product is added without its rounding"
                );
            }
        }
        let error = compile(1).expect_err("no such card").to_string();
        assert!(error.contains("compute capability 1"), "{error}");
    }
}
