//! The file of tensors that are not in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};

use super::region::padded;

/// A file without a name, so it never outlives the process.
///
/// It is read and written around the page cache, where the file system can do that: what is read
/// replaces what was just written, so the cache would hold nothing that is of use again, and its pages
/// count towards the memory limit of a container.
#[derive(Debug)]
pub(super) struct SwapFile {
    file: File,
    end: u64,
}

/// A place in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    start: u64,
}

impl SwapFile {
    pub(super) fn create(folder: &Path) -> io::Result<Self> {
        let file = tempfile::tempfile_in(folder)?;
        let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
        match fcntl(&file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)) {
            Ok(_) | Err(Errno::EINVAL) => Ok(Self { file, end: 0 }),
            Err(error) => Err(error.into()),
        }
    }

    /// Another handle of the file.
    pub(super) fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Reserves a place, so that a disk which fills up later does no harm.
    ///
    /// # Errors
    /// If the disk has less room.
    pub(super) fn reserve(&mut self, length: usize) -> io::Result<Extent> {
        let length = padded(length) as u64;
        let (start, signed) = (self.end, |bytes| i64::try_from(bytes).map_err(io::Error::other));
        match fallocate(&self.file, FallocateFlags::empty(), signed(start)?, signed(length)?) {
            Ok(()) | Err(Errno::EOPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
        self.end += length;
        Ok(Extent { start })
    }
}

/// Reads whole pages.
pub(super) fn read(file: &File, extent: Extent, bytes: &mut [u8]) -> io::Result<()> {
    file.read_exact_at(bytes, extent.start)
}

/// Writes whole pages.
pub(super) fn write(file: &File, extent: Extent, bytes: &[u8]) -> io::Result<()> {
    file.write_all_at(bytes, extent.start)
}
