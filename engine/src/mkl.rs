//! AVX-512 in MKL on processors that are not Intel's.
//!
//! MKL asks a function of its own whether the processor is Intel's, and if not, takes its AVX2
//! kernels. A program that exports a function of that name is asked instead.

use std::ffi::c_int;

/// Stands in for MKL's function: take the best instructions that there are.
#[unsafe(no_mangle)]
extern "C" fn mkl_serv_intel_cpu_true() -> c_int {
    1
}

#[used]
static KEPT: extern "C" fn() -> c_int = mkl_serv_intel_cpu_true;

/// A reference, so that the linker takes this file.
pub(crate) fn keep() {
    std::hint::black_box(KEPT());
}
