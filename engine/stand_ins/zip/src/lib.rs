//! Stands in for the crate `zip`, which tch needs for `.npz` files and torch-sys for downloads of libtorch. Shoal has
//! neither: every archive is refused. With the real crate, each build compiles zstd, bzip2, AES and SHA twice more.

#![expect(clippy::uninhabited_references, reason = "no value of an archive exists")]

use std::convert::Infallible;
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;

/// Results of operations on archives.
pub mod result {
    /// The error of every operation.
    #[derive(Debug)]
    pub struct ZipError;

    impl std::fmt::Display for ZipError {
        fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            formatter.write_str("this build reads and writes no zip archives")
        }
    }

    impl std::error::Error for ZipError {}

    /// A result of an operation.
    pub type ZipResult<T> = Result<T, ZipError>;
}

/// Options of written files.
pub mod write {
    /// The options of one file, which have no effect.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct FileOptions;

    impl FileOptions {
        /// The same options.
        #[must_use]
        pub fn compression_method(self, _: crate::CompressionMethod) -> Self {
            self
        }
    }
}

/// How files in an archive are packed.
#[derive(Clone, Copy, Debug)]
pub enum CompressionMethod {
    /// They are not.
    Stored,
}

use result::{ZipError, ZipResult};

/// An archive to read, of which there is none.
pub struct ZipArchive<R>(Infallible, std::marker::PhantomData<R>);

impl<R: Read + Seek> ZipArchive<R> {
    /// Refuses an archive.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn new(_: R) -> ZipResult<Self> {
        Err(ZipError)
    }

    /// The number of files.
    pub fn len(&self) -> usize {
        match self.0 {}
    }

    /// Whether there are no files.
    pub fn is_empty(&self) -> bool {
        match self.0 {}
    }

    /// A file of the archive.
    ///
    /// # Errors
    ///
    /// None: there is no archive.
    pub fn by_index(&mut self, _: usize) -> ZipResult<read::ZipFile> {
        match self.0 {}
    }
}

/// Files of archives to read.
pub mod read {
    use super::{Infallible, PathBuf, Read, io};

    /// A file of an archive, of which there is none.
    pub struct ZipFile(Infallible);

    impl ZipFile {
        /// Its name.
        pub fn name(&self) -> &str {
            match self.0 {}
        }

        /// Its name as a path within the archive.
        pub fn mangled_name(&self) -> PathBuf {
            match self.0 {}
        }

        /// Its size in bytes.
        pub fn size(&self) -> u64 {
            match self.0 {}
        }
    }

    impl Read for ZipFile {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            match self.0 {}
        }
    }
}

/// An archive to write, which takes no file.
pub struct ZipWriter<W>(std::marker::PhantomData<W>);

impl<W: Write + Seek> ZipWriter<W> {
    /// A writer that refuses every file.
    pub fn new(_: W) -> Self {
        Self(std::marker::PhantomData)
    }

    /// Refuses a file.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn start_file(&mut self, _: impl Into<String>, _: write::FileOptions) -> ZipResult<()> {
        Err(ZipError)
    }
}

impl<W> Write for ZipWriter<W> {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::Error::other(ZipError))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
