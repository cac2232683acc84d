//! What makes a file no valid fleet.

use shoal_protocol::limits;
use shoal_scheduler::planner::MAX_STAGES;

/// Limits on a fleet. With this many devices the search takes half a minute.
pub const DEVICES: usize = 256;
/// The most regions.
pub const REGIONS: usize = 64;

/// Limit on the layers of a model.
pub const LAYERS: usize = 100_000;

/// Why a file describes no valid fleet.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// It is not TOML, or has unknown keys.
    #[error(transparent)]
    Malformed(#[from] toml::de::Error),
    /// There are no devices, or too many.
    #[error("a fleet has 1 to {REGIONS} regions and 1 to {DEVICES} devices in all")]
    Devices,
    /// The list of stages is empty or invalid.
    #[error("stages is a list of 1 to {MAX_STAGES} numbers, each from 1 to {MAX_STAGES}")]
    Stages,
    /// Two regions have the same name.
    #[error("there are two regions {0}: rename one of them")]
    SameRegion(String),
    /// A link names an unknown region.
    #[error("a link names {0}, which is no region: add it under [[region]]")]
    NoSuchRegion(String),
    /// A pair has two links, or a link connects a region with itself.
    #[error(
        "the link between {0} and {1} is given twice, or is within one region: use `within` for that"
    )]
    SameLink(String, String),
    /// A pair of regions has no link.
    #[error(
        "there is no link between {0} and {1}: add a [[link]] for them, or [between] for all pairs"
    )]
    NoLink(String, String),
    /// A link's delay or bandwidth is out of range.
    #[error(
        "a link has a delay from 0 to 1000 seconds and a bandwidth from 1 to 1e12 bytes per second"
    )]
    Link,
    /// The devices of a region's machines, or the link between them.
    #[error(
        "region {0}: devices_per_machine is from 2 to {DEVICES} and divides the region's devices, and comes together \
         with `inside`, the link between two devices of a machine"
    )]
    Machine(String),
    /// The price of what leaves a region, or the death rate of its devices.
    #[error(
        "region {0}: `egress` is the price of 1e9 bytes that leave the region, from 0 to 1e9, and `deaths` are those of \
         one device in an hour, from 0 to 1000"
    )]
    Region(String),
    /// The time until another device replaces one that died.
    #[error("`replacement` is a time from 0 to 86400 seconds")]
    Replacement,
    /// A value of `[training]`, or a price, is out of range.
    #[error(
        "[training] has from 1 to 2^40 tokens, a sequence of at most as many, times up to 1000 seconds, sizes up to \
         1e18 bytes, a host_link of at least 1 byte a second, from 1 to {LAYERS} layers, a budget and prices of at \
         least 0, and a staleness from 0 to {}",
        limits::STALENESS
    )]
    Training,
    /// A key is missing.
    #[error(
        "`{0}` is missing: add it, or name a run with --for run.toml and describe its devices in [device]"
    )]
    Missing(&'static str),
    /// A key is that of a fleet without a run.
    #[error("`{0}` follows from the run of --for: remove it")]
    Derived(&'static str),
    /// There is a run, and nothing about the devices; or the other way round.
    #[error(
        "[device], with the `flops` that a device reaches in a second, comes together with --for run.toml"
    )]
    Device,
    /// The speed of the devices is out of range.
    #[error("[device] flops are operations a second, from 1e6 to 1e20")]
    Flops,
    /// Frozen weights below a device.
    #[error(
        "[device] host_link is not for adapters: the plan does not count swapped frozen weights"
    )]
    SwappedAdapters,
    /// An amount of traffic is out of range.
    #[error("activations and gradient are numbers of bytes from 0 to 1e18")]
    Traffic,
}
