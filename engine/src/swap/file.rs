//! The file of tensors that are not in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use shoal_protocol::ids::Stage;
use shoal_protocol::units::Bytes;

use super::disk::Direction;
use super::region::padded;
use crate::error::{EngineError, Result};

/// A file without a name, so it never outlives the process.
///
/// It is read and written around the page cache, where the file system can do that: what is read
/// replaces what was just written, so the cache would hold nothing that is of use again, and its pages
/// count towards the memory limit of a container.
#[derive(Debug)]
pub(super) struct SwapFile {
    file: File,
    folder: PathBuf,
    end: u64,
}

/// A place in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    start: u64,
    /// Whole pages.
    length: u64,
}

impl SwapFile {
    pub(super) fn create(folder: &Path) -> Result<Self> {
        let folder = folder.to_owned();
        match open(&folder) {
            Ok(file) => Ok(Self { file, folder, end: 0 }),
            Err(source) => Err(EngineError::SwapFile { folder, source }),
        }
    }

    /// Another handle of the file.
    pub(super) fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Reserves a place for bytes of a stage, so that a disk which fills up later does no harm.
    ///
    /// # Errors
    /// If the disk has less room.
    pub(super) fn reserve(&mut self, stage: Stage, length: usize) -> Result<Extent> {
        let extent = Extent { start: self.end, length: padded(length) as u64 };
        match self.allocate(FallocateFlags::empty(), extent) {
            Ok(()) => {
                self.end += extent.length;
                Ok(extent)
            }
            Err(source) => {
                let (needs, folder) = (Bytes(extent.length), self.folder.clone());
                Err(EngineError::SwapRoom { stage, needs, folder, source })
            }
        }
    }

    /// Gives the room of a place back to the disk, where the file system can do that.
    pub(super) fn release(&self, extent: Extent) {
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // What stays reserved is lost with the file.
        let _ = self.allocate(hole, extent);
    }

    /// Bytes of the disk that the file takes.
    #[cfg(test)]
    pub(super) fn on_disk(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        512 * self.file.metadata().expect("it is open").blocks()
    }

    /// Changes which places have room on the disk, where the file system can do that.
    fn allocate(&self, flags: FallocateFlags, extent: Extent) -> io::Result<()> {
        let signed = |bytes| i64::try_from(bytes).map_err(io::Error::other);
        let (start, length) = (signed(extent.start)?, signed(extent.length)?);
        loop {
            match fallocate(&self.file, flags, start, length) {
                Ok(()) | Err(Errno::EOPNOTSUPP) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The error of bytes of a stage that were not read or written.
    pub(super) fn failure(
        &self,
        stage: Stage,
        direction: Direction,
        source: io::Error,
    ) -> EngineError {
        let folder = self.folder.clone();
        match direction {
            Direction::In => EngineError::SwapRead { stage, folder, source },
            Direction::Out => EngineError::SwapWrite { stage, folder, source },
        }
    }
}

/// Opens a file without a name, around the page cache where the file system can do that.
fn open(folder: &Path) -> io::Result<File> {
    let file = tempfile::tempfile_in(folder)?;
    let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
    match fcntl(&file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT)) {
        Ok(_) | Err(Errno::EINVAL) => Ok(file),
        Err(error) => Err(error.into()),
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
