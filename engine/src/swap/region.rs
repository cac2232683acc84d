//! Page-aligned memory for the bytes of one tensor.

use std::ffi::c_void;
use std::io;

use memmap2::{Advice, MmapMut};

/// Alignment of addresses, lengths and places in the file, as direct reads and writes need it.
pub(super) const PAGE: usize = 4096;

/// The bytes of a tensor, and zeros up to the next page. The system gets the memory back when it is
/// dropped.
#[derive(Debug)]
pub(super) struct Region(MmapMut);

impl Region {
    /// Zeros.
    pub(super) fn zeroed(length: usize) -> io::Result<Self> {
        let map = MmapMut::map_anon(padded(length).max(PAGE))?;
        // Large pages cost fewer faults; a kernel without them refuses the advice.
        let _ = map.advise(Advice::HugePage);
        Ok(Self(map))
    }

    /// All bytes, with those after the tensor.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    pub(super) fn address(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }
}

/// The length of a region for so many bytes.
pub(super) fn padded(length: usize) -> usize {
    length.next_multiple_of(PAGE)
}
