// How a program finds libtorch when it runs. Link arguments do not pass from a package to those
// that use it, so the build script of every package with a binary or a test includes this file.

use std::path::PathBuf;

/// The folder with the real libtorch libraries, behind any links.
pub(crate) fn libtorch_folder() -> PathBuf {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let given = std::env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys is a dependency");
    let given = PathBuf::from(given);
    // Written anew by each set-up, so a libtorch that has moved is noticed.
    println!("cargo:rerun-if-changed={}", given.with_file_name("build-version").display());
    let library = given.join("libtorch_cpu.so");
    let real = library.canonicalize().unwrap_or_else(|error| {
        panic!("{}: {error}: run scripts/setup.sh, which installs libtorch", library.display())
    });
    real.parent().expect("a file is in a folder").to_owned()
}

/// Lets this package's binaries and tests run without LD_LIBRARY_PATH.
pub(crate) fn link_arguments() {
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libtorch_folder().display());
    // libtorch's own dependencies are found by its own run path, not at link time.
    println!("cargo:rustc-link-arg=-Wl,--allow-shlib-undefined");
    // MKL looks for its function among exported ones: see engine/src/device/mkl.rs.
    println!("cargo:rustc-link-arg=-Wl,--export-dynamic-symbol=mkl_serv_intel_cpu_true");
}
