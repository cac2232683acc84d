//! Memory of the machine, or of the container that this process runs in.

use anyhow::Context;
use shoal_protocol::units::Bytes;
use sysinfo::System;

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
        let (mut total, mut available) = (system.total_memory(), system.available_memory());
        if let Some(container) = system.cgroup_limits() {
            total = total.min(container.total_memory);
            available = available.min(container.free_memory);
        }
        Ok(Self { total: Bytes(total), available: Bytes(available) })
    }
}
