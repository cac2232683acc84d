//! Chooses the kernels that MKL, which is a part of libtorch, uses on AMD's processors.
//!
//! MKL asks a function of its own, `mkl_serv_intel_cpu_true`, whether Intel made the processor. If not, MKL takes
//! plain AVX2 kernels, whatever the processor can do. Their products have half the speed of AVX-512, and their square
//! roots are not all rounded correctly. The function is exported and undocumented. A program that exports a function of
//! the same name is asked instead: see `engine/build/link.rs`.
//!
//! # The rule
//!
//! On a processor of AMD, MKL takes Intel's kernels: for AVX-512 on Zen 4 and later, for AVX2 on processors without
//! AVX-512. All others get what MKL chooses by itself. So the answer follows from the processor alone, and all processes
//! of one machine give the same one: a swarm of them computes the bits of `shoal local`. MKL remembers the first answer,
//! so one process cannot try both kinds of kernels.
//!
//! A measurement of 1 to 2 ms guards the rule against a processor, or an emulator, that knows AVX-512 and is slow at
//! it: MKL keeps its own choice where multiplications by AVX-512 reach less than [`LEAST_GAIN`] of AVX2's
//! throughput. They reach 2x on processors with 512-bit units and 1x on those with 256-bit units. The guard takes the
//! median of ratios of neighbouring measurements, which noise from other processes hits alike, so that noise does not
//! decide.
//!
//! [`VARIABLE`] overrides both.
//!
//! # Alignment
//!
//! The last bits of a product by MKL's AVX2 kernels depend on where its matrices begin in memory, so devices that share
//! slices would differ from one device. MKL's strict mode of conditional numerical reproducibility (Intel's oneMKL
//! Developer Guide, "Obtaining Numerically Reproducible Results") removes that. Its AVX-512 kernels do not need it.

use std::ffi::c_int;
use std::fmt;
use std::sync::OnceLock;

/// The environment variable that decides instead of the rule: `0` leaves the choice to MKL, `1` takes AVX-512 on any
/// processor that has it.
const VARIABLE: &str = "SHOAL_MKL_AVX512";

/// MKL's own environment variable for its mode of reproducibility.
const MKL_MODE: &str = "MKL_CBWR";

/// The least throughput of AVX-512 over that of AVX2 at which MKL's AVX-512 kernels are used.
#[cfg(target_arch = "x86_64")]
const LEAST_GAIN: f64 = 0.7;

/// The kernels that MKL uses for f32 products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MklDispatch {
    /// Those that MKL chooses by itself.
    Stock,
    /// Intel's of AVX2, although MKL would choose others.
    Avx2,
    /// Intel's of AVX-512, although MKL would choose others.
    Avx512,
}

impl MklDispatch {
    /// The kernels of this process. The first call decides.
    #[must_use]
    pub fn of_this_process() -> Self {
        static DECISION: OnceLock<MklDispatch> = OnceLock::new();
        *DECISION.get_or_init(|| if is_asked() { decide() } else { Self::Stock })
    }

    /// A short name for tables and fingerprints.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Avx2 => "AVX2",
            Self::Avx512 => "AVX-512",
        }
    }
}

impl fmt::Display for MklDispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Answers in place of MKL's function.
#[unsafe(no_mangle)]
extern "C" fn mkl_serv_intel_cpu_true() -> c_int {
    let is_intel = processor::vendor() == *b"GenuineIntel";
    c_int::from(is_intel || MklDispatch::of_this_process() != MklDispatch::Stock)
}

/// Keeps the linker from dropping the function.
#[used]
static KEPT: extern "C" fn() -> c_int = mkl_serv_intel_cpu_true;

/// Whether MKL finds this program's function: a program that was linked without `engine/build/link.rs` does not
/// export it.
fn is_asked() -> bool {
    // SAFETY: the name ends with a zero byte; the address is compared, not used.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mkl_serv_intel_cpu_true".as_ptr()) };
    found.addr() == std::hint::black_box(KEPT) as usize
}

/// Makes products independent of where matrices begin in memory, unless the user has chosen a mode. Call this before
/// MKL's first use and before other threads start.
pub(crate) fn be_reproducible() {
    let uses_avx2 = match MklDispatch::of_this_process() {
        MklDispatch::Avx512 => false,
        MklDispatch::Avx2 => true,
        MklDispatch::Stock => processor::vendor() == *b"AuthenticAMD" || !processor::has_avx512(),
    };
    if uses_avx2 && std::env::var_os(MKL_MODE).is_none() {
        // SAFETY: the caller has no other threads.
        unsafe { std::env::set_var(MKL_MODE, "AVX2,STRICT") };
    }
}

fn decide() -> MklDispatch {
    let setting = std::env::var(VARIABLE).unwrap_or_default();
    let is_amd = processor::vendor() == *b"AuthenticAMD";
    match setting.trim() {
        "0" => MklDispatch::Stock,
        "1" if processor::has_avx512() => MklDispatch::Avx512,
        _ if is_amd && processor::has_fast_avx512() => MklDispatch::Avx512,
        _ if is_amd && processor::has_only_avx2() => MklDispatch::Avx2,
        _ => MklDispatch::Stock,
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod processor {
    pub(super) fn vendor() -> [u8; 12] {
        [0; 12]
    }

    pub(super) fn has_avx512() -> bool {
        false
    }

    pub(super) fn has_fast_avx512() -> bool {
        false
    }

    pub(super) fn has_only_avx2() -> bool {
        false
    }
}

/// The processor's maker and its throughput.
#[cfg(target_arch = "x86_64")]
mod processor {
    use std::arch::x86_64::{
        __cpuid, __m256, __m512, _mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps,
    };
    use std::hint::black_box;
    use std::time::Instant;

    use super::LEAST_GAIN;

    /// Independent sums, enough to hide the latency of an addition.
    const SUMS: usize = 10;

    /// Multiplications and additions per sum in one measurement: 10 to 50 us.
    const ROUNDS: usize = 10_000;

    /// Pairs of measurements.
    const PAIRS: usize = 21;

    /// The processor's maker, as the processor names it.
    pub(super) fn vendor() -> [u8; 12] {
        let leaf = __cpuid(0);
        let mut name = [0; 12];
        for (part, register) in name.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            part.copy_from_slice(&register.to_le_bytes());
        }
        name
    }

    /// Whether processor and system have the parts of AVX-512 that MKL's kernels need.
    pub(super) fn has_avx512() -> bool {
        std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512cd")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vl")
    }

    /// Whether there is AVX2 and no AVX-512.
    pub(super) fn has_only_avx2() -> bool {
        !std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
    }

    /// Whether there is AVX-512 and it is not slower than AVX2.
    pub(super) fn has_fast_avx512() -> bool {
        has_avx512()
            && std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && gain() >= LEAST_GAIN
    }

    /// Throughput of AVX-512 over that of AVX2 in f32 multiplications and additions. The processor has both.
    pub(super) fn gain() -> f64 {
        // SAFETY: the caller has checked that the processor has the instructions.
        let (narrow, wide) = (|| unsafe { narrow() }, || unsafe { wide() });
        let mut gains: Vec<f64> = (0..PAIRS)
            .map(|pair| {
                let (narrow, wide) = if pair % 2 == 0 {
                    let first = seconds(narrow);
                    (first, seconds(wide))
                } else {
                    let first = seconds(wide);
                    (seconds(narrow), first)
                };
                // One wide operation does the work of two narrow ones.
                2.0 * narrow / wide
            })
            .collect();
        gains.sort_by(f64::total_cmp);
        gains[PAIRS / 2]
    }

    fn seconds(work: impl Fn()) -> f64 {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64().max(1e-9)
    }

    #[target_feature(enable = "avx2,fma")]
    fn narrow() {
        let factor: __m256 = black_box(_mm256_set1_ps(0.999));
        let mut sums = [factor; SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, factor);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f")]
    fn wide() {
        let factor: __m512 = black_box(_mm512_set1_ps(0.999));
        let mut sums = [factor; SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, factor);
            }
        }
        black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mkl_asks_this_program() {
        assert!(is_asked(), "the function is exported");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_processor_with_avx512_is_clear_of_the_guard() {
        if processor::has_avx512() {
            let gain = processor::gain();
            assert!(gain > LEAST_GAIN + 0.1, "{gain}");
        }
        assert!(processor::vendor().iter().all(u8::is_ascii));
    }
}
