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

/// Whether no number is infinite or NaN: those have all bits of the exponent. Blocks, so that a
/// compiler takes many numbers at once.
pub(crate) fn is_finite(dtype: Dtype, data: &[u8]) -> bool {
    let exponent: u32 = match dtype {
        Dtype::F32 => 0x7f80_0000,
        Dtype::BF16 => 0x7f80,
        Dtype::F16 => 0x7c00,
        _ => return true,
    };
    let is_fine = |numbers: &mut dyn Iterator<Item = u32>| {
        numbers.fold(true, |fine, bits| fine & (bits & exponent != exponent))
    };
    match dtype {
        Dtype::F32 => data
            .as_chunks::<4>()
            .0
            .chunks(1024)
            .all(|block| is_fine(&mut block.iter().map(|bytes| u32::from_le_bytes(*bytes)))),
        _ => {
            data.as_chunks::<2>().0.chunks(1024).all(|block| {
                is_fine(&mut block.iter().map(|bytes| u16::from_le_bytes(*bytes).into()))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Dtype, is_finite};

    #[test]
    fn infinite_numbers_are_found() {
        let f32s = |number: f32| [1.0, number].map(f32::to_le_bytes).concat();
        assert!(is_finite(Dtype::F32, &f32s(f32::MAX)));
        assert!(!is_finite(Dtype::F32, &f32s(f32::NAN)));
        assert!(!is_finite(Dtype::F32, &f32s(f32::NEG_INFINITY)));
        let bf16 = |number: f32| half::bf16::from_f32(number).to_le_bytes();
        assert!(is_finite(Dtype::BF16, &bf16(-3e38)));
        assert!(!is_finite(Dtype::BF16, &bf16(f32::NAN)));
        let f16 = |number: f32| half::f16::from_f32(number).to_le_bytes();
        assert!(is_finite(Dtype::F16, &f16(65504.0)));
        assert!(!is_finite(Dtype::F16, &f16(1e6)));
    }
}
