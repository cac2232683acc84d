//! Control groups: a limit on the memory of a process and its page cache, and the most that they used.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The folder of a version of control groups, and its files with the limit and with the most used.
struct Version {
    root: &'static str,
    limit: &'static str,
    peak: &'static str,
}

const VERSIONS: [Version; 2] = [
    Version { root: "/sys/fs/cgroup", limit: "memory.max", peak: "memory.peak" },
    Version {
        root: "/sys/fs/cgroup/memory",
        limit: "memory.limit_in_bytes",
        peak: "memory.max_usage_in_bytes",
    },
];

/// A group of processes with a memory limit, which drop removes.
#[derive(Debug)]
pub struct MemoryGroup {
    folder: PathBuf,
    peak: &'static str,
}

impl MemoryGroup {
    /// Creates a group whose processes may use so many bytes.
    ///
    /// # Errors
    /// The reason, where the machine lacks support or the user is not root.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let mut reasons = Vec::new();
        for version in VERSIONS {
            match Self::of_version(&version, bytes) {
                Ok(group) => return Ok(group),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join("; "))
    }

    fn of_version(version: &Version, bytes: u64) -> Result<Self, String> {
        // The tests of a process run concurrently.
        static GROUPS: AtomicUsize = AtomicUsize::new(0);
        let number = GROUPS.fetch_add(1, Ordering::Relaxed);
        let folder = Path::new(version.root).join(format!("shoal-{}-{number}", std::process::id()));
        let reason = |path: &Path, error| format!("{}: {error}", path.display());
        fs::create_dir(&folder).map_err(|error| reason(&folder, error))?;
        let group = Self { folder, peak: version.peak };
        let limit = group.folder.join(version.limit);
        fs::write(&limit, bytes.to_string()).map_err(|error| reason(&limit, error))?;
        let peak = group.folder.join(version.peak);
        fs::read(&peak).map_err(|error| reason(&peak, error))?;
        Ok(group)
    }

    /// Puts the process that a command starts into the group.
    ///
    /// # Panics
    /// When the group is gone.
    pub fn hold(&self, command: &mut Command) {
        let mut processes = self.processes();
        // SAFETY: between fork and exec it makes one system call and allocates nothing.
        unsafe {
            // The process that writes 0 enters the group.
            command.pre_exec(move || processes.write_all(b"0"));
        }
    }

    /// The most bytes that the processes and the page cache of their files have used at once.
    ///
    /// # Panics
    /// When the group is gone.
    #[must_use]
    pub fn peak(&self) -> u64 {
        let text = fs::read_to_string(self.folder.join(self.peak)).expect("the group has it");
        text.trim().parse().expect("a number")
    }

    fn processes(&self) -> File {
        let path = self.folder.join("cgroup.procs");
        OpenOptions::new().write(true).open(path).expect("the group has processes")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // A group with a process that still ends stays; it is empty soon.
        let _ = fs::remove_dir(&self.folder);
    }
}
