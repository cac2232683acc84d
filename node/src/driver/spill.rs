//! Tensors on the disk.
//!
//! The file has no name, so it never outlives the process. It consists of places of equal size. Each
//! place holds the tensors of one payload, and is free again after the last handle to them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use shoal_protocol::frame::Element;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::units;

use super::payload::{Tensor, Tensors};

/// A file for tensors that do not fit into memory.
#[derive(Debug)]
pub(crate) struct SpillFile {
    file: File,
    /// The size of one place, in bytes.
    place: u64,
    free: Mutex<BTreeSet<u64>>,
}

impl SpillFile {
    /// Creates a file in a folder. It reserves its room at once where the file system can do that, so
    /// that a disk which fills up later does no harm.
    ///
    /// # Errors
    /// When the folder cannot be written to, or the disk has less room.
    pub(crate) fn create(folder: &Path, place: units::Bytes, places: u64) -> io::Result<Arc<Self>> {
        let file = tempfile::tempfile_in(folder)?;
        if places > 0 {
            let length = places.checked_mul(place.0).ok_or(io::ErrorKind::FileTooLarge)?;
            let length = i64::try_from(length).map_err(io::Error::other)?;
            match fallocate(&file, FallocateFlags::empty(), 0, length) {
                Ok(()) | Err(Errno::EOPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let free = Mutex::new((0..places).collect());
        Ok(Arc::new(Self { file, place: place.0, free }))
    }

    /// Returns the number of free places.
    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.free().len()
    }

    /// Writes tensors into a free place.
    ///
    /// # Errors
    /// When the disk does not take them, or no place is free.
    pub(crate) fn write(self: &Arc<Self>, tensors: &Tensors) -> io::Result<Spilled> {
        let length: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        assert!(length as u64 <= self.place, "a place is for the largest payload");
        let place = self.free().pop_first().ok_or(io::ErrorKind::StorageFull)?;
        let parts = tensors.iter().map(Part::of).collect();
        let spilled = Spilled { file: Arc::clone(self), place, parts };
        let mut at = place * self.place;
        for tensor in tensors.iter() {
            self.file.write_all_at(&tensor.bytes, at)?;
            at += tensor.bytes.len() as u64;
        }
        Ok(spilled)
    }

    fn free(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tensors in a file.
#[derive(Debug)]
pub(crate) struct Spilled {
    file: Arc<SpillFile>,
    place: u64,
    parts: Vec<Part>,
}

/// The description of a tensor whose elements are on the disk.
#[derive(Debug)]
struct Part {
    element: Element,
    shape: Vec<u32>,
    length: usize,
    hash: ContentHash,
}

impl Part {
    fn of(tensor: &Tensor) -> Self {
        Self {
            element: tensor.element,
            shape: tensor.shape.clone(),
            length: tensor.bytes.len(),
            hash: ContentHash::of(&tensor.bytes),
        }
    }
}

impl Spilled {
    /// Returns the size of the tensors.
    pub(crate) fn size(&self) -> units::Bytes {
        self.parts.iter().map(|part| units::Bytes(part.length as u64)).sum()
    }

    /// Reads the tensors into memory.
    ///
    /// # Errors
    /// When the disk does not give back the bytes that were written.
    pub(crate) fn read(&self) -> io::Result<Tensors> {
        let mut at = self.place * self.file.place;
        let mut tensors = Vec::with_capacity(self.parts.len());
        for Part { element, shape, length, hash } in &self.parts {
            let mut bytes = vec![0; *length];
            self.file.file.read_exact_at(&mut bytes, at)?;
            if ContentHash::of(&bytes) != *hash {
                let text = "the disk gave back other bytes than were written";
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            at += *length as u64;
            let bytes = Bytes::from(bytes);
            tensors.push(Tensor { element: *element, shape: shape.clone(), bytes });
        }
        Ok(tensors.into())
    }
}

impl Drop for Spilled {
    fn drop(&mut self) {
        self.file.free().insert(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(byte: u8, length: usize) -> Tensors {
        let tensor = |byte| Tensor::flat(Element::U8, length, vec![byte; length].into());
        [tensor(byte), tensor(byte + 1)].into()
    }

    #[test]
    fn written_tensors_come_back_and_places_are_used_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = SpillFile::create(folder.path(), units::Bytes(32), 3).expect("a file");
        let kept: Vec<Spilled> =
            (0..3).map(|byte| file.write(&tensors(byte, 16)).expect("written")).collect();
        let full = file.write(&tensors(9, 1)).expect_err("all three places are taken");
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        for (byte, spilled) in (0..).zip(&kept) {
            let read = spilled.read().expect("read");
            assert_eq!(read[0].bytes, tensors(byte, 16)[0].bytes);
            assert_eq!(read[1].bytes, tensors(byte, 16)[1].bytes);
            assert_eq!((read[1].element, read[1].shape.as_slice()), (Element::U8, &[16][..]));
        }
        drop(kept);
        file.write(&tensors(9, 16)).expect("a place that is free again");
        let names = std::fs::read_dir(folder.path()).expect("listed").count();
        assert_eq!(names, 0, "the file has no name");
    }

    #[test]
    fn other_bytes_than_were_written_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = SpillFile::create(folder.path(), units::Bytes(32), 1).expect("a file");
        let spilled = file.write(&tensors(1, 16)).expect("written");
        file.file.write_all_at(&[7], 20).expect("damaged");
        let error = spilled.read().expect_err("damaged");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_disk_without_room_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = units::Bytes(1 << 30);
        for places in [1 << 30, u64::MAX] {
            SpillFile::create(folder.path(), place, places).expect_err("too large");
        }
    }
}
