//! Memory of the machine, or of the control groups that this process runs in.

use std::path::{Path, PathBuf};

use anyhow::Context;
use shoal_protocol::units::Bytes;
use sysinfo::System;

/// Memory of a control group that is left to libtorch and to what is not planned: the libraries, copies for snapshots,
/// and the page cache of checkpoints. A process over the limit is killed.
const RESERVE: u64 = 256 << 20;

/// The part of a control group's free memory that is left in addition.
const RESERVED_PART: u64 = 8;

/// A version of control groups: its folder, the column of `/proc/self/cgroup` that names it, and its files.
struct Version {
    root: &'static str,
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The entry of `memory.stat` with page cache that the system takes back when memory runs short.
    cache: &'static str,
}

const VERSIONS: [Version; 2] = [
    Version {
        root: "/sys/fs/cgroup",
        controller: "",
        limit: "memory.max",
        used: "memory.current",
        cache: "inactive_file",
    },
    Version {
        root: "/sys/fs/cgroup/memory",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        cache: "total_inactive_file",
    },
];

/// Amounts of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostMemory {
    /// All memory.
    pub(crate) total: Bytes,
    /// Memory that can still be allocated.
    pub(crate) available: Bytes,
}

impl HostMemory {
    /// The current amounts.
    ///
    /// # Errors
    /// If the system does not report them.
    pub(crate) fn now() -> anyhow::Result<Self> {
        let mut system = System::new().context("cannot read how much memory is free")?;
        system.refresh_memory();
        let host = Self {
            total: Bytes(system.total_memory()),
            available: Bytes(system.available_memory()),
        };
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let limits = VERSIONS
            .iter()
            .filter_map(|version| version.tightest(Path::new(version.root), &groups, host.total));
        Ok(limits.fold(host, |host, group| Self {
            total: host.total.min(group.total),
            available: host.available.min(group.available),
        }))
    }
}

impl Version {
    /// The tightest limit among the group of this process and all above it; `None` without a limit below the machine's
    /// memory. A container sees its own group as the root.
    fn tightest(&self, root: &Path, groups: &str, machine: Bytes) -> Option<HostMemory> {
        let own = groups.lines().find_map(|line| {
            let mut columns = line.splitn(3, ':').skip(1);
            let controllers = columns.next()?;
            let path = columns.next()?;
            controllers.split(',').any(|one| one == self.controller).then_some(path)
        })?;
        // A path outside of the mounted tree has no folders here.
        let own = root.join(own.trim_start_matches('/'));
        let above = own.ancestors().take_while(|folder| folder.starts_with(root));
        let limits = above.filter_map(|folder| self.limit_of(folder, machine));
        limits.reduce(|one, other| HostMemory {
            total: one.total.min(other.total),
            available: one.available.min(other.available),
        })
    }

    fn limit_of(&self, folder: &Path, machine: Bytes) -> Option<HostMemory> {
        let number = |path: PathBuf| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        // `max`, or a number beyond all memory, stands for no limit.
        let limit = number(folder.join(self.limit)).filter(|limit| *limit < machine.0)?;
        let used = number(folder.join(self.used)).unwrap_or(0);
        let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let cache = stat.lines().find_map(|line| {
            let (name, bytes) = line.split_once(' ')?;
            (name == self.cache).then(|| bytes.trim().parse::<u64>().ok())?
        });
        let free = limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0)));
        let planned = (free - free / RESERVED_PART).saturating_sub(RESERVE);
        Some(HostMemory { total: Bytes(limit), available: Bytes(planned) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn group(root: &Path, path: &str, limit: &str, used: u64) {
        let folder = root.join(path);
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("memory.max"), limit).expect("written");
        std::fs::write(folder.join("memory.current"), used.to_string()).expect("written");
        let stat = format!("anon 5\ninactive_file {}\nactive_file 7\n", 8 * MIB);
        std::fs::write(folder.join("memory.stat"), stat).expect("written");
    }

    #[test]
    fn the_tightest_limit_above_the_process_counts() {
        let root = tempfile::tempdir().expect("a folder");
        let (root, version, machine) = (root.path(), &VERSIONS[0], Bytes(32 << 30));
        let tightest = |groups: &str| version.tightest(root, groups, machine);
        assert_eq!(tightest("0::/job/task/step\n"), None, "no such group");
        group(root, "job", "max\n", 0);
        group(root, "job/task", &format!("{}\n", 1024 * MIB), 108 * MIB);
        group(root, "job/task/step", "max\n", 0);
        let found = tightest("4:memory:/else\n0::/job/task/step\n").expect("a limit");
        assert_eq!(found.total, Bytes(1024 * MIB));
        // What is used but not page cache is gone; a part and the reserve are left alone.
        let free = 924 * MIB;
        assert_eq!(found.available, Bytes(free - free / RESERVED_PART - RESERVE));
        group(root, "job", &format!("{}\n", 420 * MIB), 300 * MIB);
        let found = tightest("0::/job/task/step\n").expect("a limit");
        assert_eq!((found.total, found.available), (Bytes(420 * MIB), Bytes(0)));
        group(root, "job", &(64_u64 << 30).to_string(), 0);
        let found = tightest("0::/job/task/step\n").expect("a limit");
        assert_eq!(found.total, Bytes(1024 * MIB), "more than the machine has is no limit");
        assert_eq!(tightest("0::/../job\n").map(|it| it.total), None);
    }

    #[test]
    fn the_machine_reports_its_memory() {
        let memory = HostMemory::now().expect("reported");
        assert!(memory.total > Bytes(0) && memory.available <= memory.total);
    }
}
