//! The memory allocator of every program with this crate, also for libtorch.
//!
//! A pass allocates and frees large tensors. glibc returns blocks over 32 MiB to the system at once,
//! so that each next one costs a page fault for every 4 KiB: over 40% of the time of a model with
//! 49,000 tokens. jemalloc keeps freed memory for some seconds.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Its configuration, which it finds by this name: large blocks are kept as small ones are, freed
/// memory returns to the system after ten seconds, also if the program is idle.
// SAFETY: jemalloc reads it as a pointer to a string that ends with a zero.
#[unsafe(export_name = "malloc_conf")]
pub(crate) static CONFIGURATION: &std::ffi::c_char = {
    let text = c"oversize_threshold:0,dirty_decay_ms:10000,muzzy_decay_ms:0,background_thread:true";
    // SAFETY: a string has at least its end.
    unsafe { &*text.as_ptr() }
};
