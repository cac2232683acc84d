//! A safetensors file in memory, with a bounded header.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata};

/// Maximum size of a header, and of a JSON file of a checkpoint, that is read.
pub(crate) const HEADER_CAP: u64 = 16 << 20;

/// Why a file cannot be read.
#[derive(Debug)]
pub(crate) enum FileProblem {
    /// The file system failed.
    Io(std::io::Error),
    /// It is no whole safetensors file.
    Damaged(String),
}

/// A safetensors file in memory.
pub(crate) struct SafetensorsFile {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    /// The position of the first tensor's data.
    start: usize,
    names: Vec<String>,
}

impl SafetensorsFile {
    /// Opens a file and checks its header.
    pub(crate) fn open(path: &Path) -> Result<Self, FileProblem> {
        let file = File::open(path).map_err(FileProblem::Io)?;
        let length = file.metadata().map_err(FileProblem::Io)?.len();
        if length < 8 {
            return Err(FileProblem::Damaged(format!("it has {length} bytes")));
        }
        // SAFETY: files of weights are written elsewhere and renamed into place, never changed.
        let map = unsafe { Mmap::map(&file) }.map_err(FileProblem::Io)?;
        let announced = u64::from_le_bytes(*map.first_chunk().expect("eight bytes are there"));
        if announced > HEADER_CAP {
            let reason = format!("it announces a header of {announced} bytes");
            return Err(FileProblem::Damaged(reason));
        }
        let damaged = |error: safetensors::SafeTensorError| {
            FileProblem::Damaged(match error {
                safetensors::SafeTensorError::MetadataIncompleteBuffer => {
                    format!("it has {length} bytes, which are not those that its header announces")
                }
                other => other.to_string(),
            })
        };
        let (header_length, header) = SafeTensors::read_metadata(&map).map_err(damaged)?;
        let mut names = header.offset_keys();
        names.sort();
        Ok(Self { path: path.to_owned(), start: 8 + header_length, map, header, names })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// All names, sorted.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// A tensor.
    pub(crate) fn tensor(&self, name: &str) -> Option<FileTensor<'_>> {
        let info = self.header.info(name)?;
        let (from, to) = info.data_offsets;
        let data = self.map.get(self.start + from..self.start + to)?;
        Some(FileTensor { dtype: info.dtype, shape: &info.shape, data })
    }
}

/// A tensor of a file.
#[derive(Clone, Copy)]
pub(crate) struct FileTensor<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    /// Little-endian.
    pub(crate) data: &'a [u8],
}
