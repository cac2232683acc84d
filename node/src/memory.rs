//! The memory of the machine, or of the container that this process is in.

use anyhow::Context;
use shoal_protocol::units::Bytes;
use sysinfo::System;

/// How much there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostMemory {
    /// In all.
    pub(crate) total: Bytes,
    /// That can still be given out.
    pub(crate) available: Bytes,
}

impl HostMemory {
    /// As it is now.
    ///
    /// # Errors
    /// Where the system does not say.
    pub(crate) fn now() -> anyhow::Result<Self> {
        let mut system =
            System::new().context("this machine does not say how much memory is free")?;
        system.refresh_memory();
        let (mut total, mut available) = (system.total_memory(), system.available_memory());
        if let Some(container) = system.cgroup_limits() {
            total = total.min(container.total_memory);
            available = available.min(container.free_memory);
        }
        Ok(Self { total: Bytes(total), available: Bytes(available) })
    }
}
