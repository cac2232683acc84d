//! Elementwise loops compiled for the widest vectors of the processor.
//!
//! Only IEEE operations in a fixed order are used, and Rust never fuses a multiplication with an
//! addition, so every width gives the same bits.

/// Defines a function whose body is compiled for processors with AVX-512, with AVX2 and with
/// neither, and dispatched at run time. It may have one type parameter.
macro_rules! widest {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$kind:ident: $bound:ident>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$kind: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body $(<$kind: $bound>)? ($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx512bw")]
                fn avx512 $(<$kind: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2 $(<$kind: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                if $crate::device::kernel::has_avx512() {
                    // SAFETY: the processor has these instructions.
                    return unsafe { avx512($($arg),*) };
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has these instructions.
                    return unsafe { avx2($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}
pub(crate) use widest;

/// Whether the processor has the AVX-512 instructions that [`widest!`] uses.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl")
        && std::arch::is_x86_feature_detected!("avx512bw")
}

/// Name of the widest vectors in use, for fingerprints.
#[must_use]
pub fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            return "avx512";
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            return "avx2";
        }
    }
    std::env::consts::ARCH
}
