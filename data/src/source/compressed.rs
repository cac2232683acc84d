//! Limits of compressed sources.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes that a file may have for each byte of its compressed form. Text has 3 to 30; the most
/// that gzip can pack is 1032, and zstd has no limit.
pub(super) const MOST_RATIO: u64 = 200;

/// Bytes that a file may have whatever its ratio.
const FREE_BYTES: u64 = 64 << 20;

/// Largest window of zstd, as a power of two: 128 MiB of memory, as `zstd -d` allows.
pub(super) const WINDOW_LOG: u32 = 27;

/// A file unpacks to more than [`MOST_RATIO`] times its size.
#[derive(Debug, thiserror::Error)]
#[error("more than {MOST_RATIO} bytes of text for each compressed byte")]
pub(super) struct RatioExceeded;

/// Counts the bytes that are read of a file, and of all files.
pub(super) struct Counted<R> {
    pub(super) inner: R,
    pub(super) of_file: Arc<AtomicU64>,
    pub(super) of_all: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.of_file.fetch_add(count as u64, Ordering::Relaxed);
        self.of_all.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Reads a decompressed file up to the ratio.
pub(super) struct Bounded<R> {
    pub(super) inner: R,
    /// Bytes of the compressed form so far.
    pub(super) packed: Arc<AtomicU64>,
    /// Bytes so far.
    pub(super) unpacked: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.unpacked += count as u64;
        let allowed = self.packed.load(Ordering::Relaxed).saturating_mul(MOST_RATIO);
        match self.unpacked > allowed.max(FREE_BYTES) {
            true => Err(io::Error::other(RatioExceeded)),
            false => Ok(count),
        }
    }
}
