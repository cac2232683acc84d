//! Disks that fail under a process, or have no room.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

/// A full disk is filled again so often.
const REFILL: Duration = Duration::from_millis(5);

/// A kind of call on the files of swapped stages and of the output log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Reads bytes.
    Read,
    /// Writes bytes.
    Write,
    /// Reserves room.
    Reserve,
}

impl Call {
    fn variable(self) -> &'static str {
        match self {
            Self::Read => "FAIL_READ",
            Self::Write => "FAIL_WRITE",
            Self::Reserve => "FAIL_RESERVE",
        }
    }
}

/// A library that lets the disk fail under the process that it is preloaded into.
#[derive(Debug)]
pub struct FailingDisk {
    folder: TempDir,
}

impl FailingDisk {
    /// Compiles the library.
    ///
    /// # Errors
    /// The reason, where the machine has no C compiler.
    ///
    /// # Panics
    /// When the source does not compile.
    pub fn new() -> Result<Self, String> {
        let folder = tempfile::tempdir().expect("room for a folder");
        let disk = Self { folder };
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/failing_disk.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", source, "-o"]).arg(disk.library());
        match compiler.status() {
            Ok(status) => assert!(status.success(), "{source} does not compile"),
            Err(error) => return Err(format!("no C compiler `cc`: {error}")),
        }
        Ok(disk)
    }

    /// Has the disk refuse every call of a kind in the process that a command starts, after so many that succeed.
    pub fn fail(&self, command: &mut Command, call: Call, after: u64, error: Errno) {
        command
            .env("LD_PRELOAD", self.library())
            .env(call.variable(), after.to_string())
            .env("FAIL_WITH", (error as i32).to_string());
    }

    fn library(&self) -> PathBuf {
        self.folder.path().join("failing_disk.so")
    }
}

/// A file system in memory with little room, which drop unmounts.
#[derive(Debug)]
pub struct SmallDisk {
    folder: TempDir,
}

impl SmallDisk {
    /// Mounts a file system with room for so many bytes.
    ///
    /// # Errors
    /// The reason, where the user is not root.
    ///
    /// # Panics
    /// When there is no room for a folder.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let folder = tempfile::tempdir().expect("room for a folder");
        let options = format!("size={bytes}");
        let kind = Some("tmpfs");
        mount(kind, folder.path(), kind, MsFlags::empty(), Some(options.as_str()))
            .map_err(|error| format!("no file system in memory: {error}"))?;
        Ok(Self { folder })
    }

    /// The folder at which it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Has another program take all room until the result is dropped, also what is freed meanwhile.
    ///
    /// # Panics
    /// When the disk fails otherwise.
    #[must_use]
    pub fn fill(&self) -> FullDisk {
        let path = self.path().join("filler");
        let mut file = File::create(&path).expect("room for a name");
        take_all(&mut file);
        let (ended, end) = mpsc::channel();
        let writer = std::thread::spawn(move || {
            while end.recv_timeout(REFILL) == Err(RecvTimeoutError::Timeout) {
                take_all(&mut file);
            }
        });
        FullDisk { path, writer: Some((ended, writer)) }
    }
}

fn take_all(file: &mut File) {
    let full = io::copy(&mut io::repeat(7), file).expect_err("it has an end");
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
}

/// A disk of which another program takes all room. When this is dropped, there is room again.
#[derive(Debug)]
pub struct FullDisk {
    path: PathBuf,
    writer: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        if let Some((ended, writer)) = self.writer.take() {
            drop(ended);
            let _ = writer.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Processes that still end keep their files.
        let _ = umount2(self.folder.path(), MntFlags::MNT_DETACH);
    }
}
