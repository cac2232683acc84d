//! Plans which devices host which stage, given the network between them.
//!
//! The cost model and the search are those of DT-FM (Yuan et al. 2022, Decentralized Training of
//! Foundation Models in Heterogeneous Environments, arXiv 2206.01288). Devices are divided into
//! groups of equal size, a group hosts a stage, and the order of the groups is the pipeline. The
//! cost of a step is the time that its tensors are in transit:
//!
//! - data parallel: a device exchanges its part of the gradient with every other device of its
//!   group, in both directions. The stage waits for its slowest device, the step for its slowest
//!   stage.
//! - pipeline: a device sends activations to one of the next stage and gets gradients back. Devices
//!   of two stages are paired so that the slowest pair is as fast as possible ([`matching`]), and
//!   the stages are ordered so that the sum over all boundaries is minimal ([`route`]).
//!
//! Devices compute equally fast here; the computation does not depend on the placement.

mod advice;
pub mod cases;
mod cost;
mod machine;
mod matching;
mod network;
mod route;
mod search;
mod slices;
mod spans;
#[cfg(test)]
mod tests;

pub use self::advice::{Advice, Work, advise};
pub use self::cost::{Boundary, Busiest, Cost, CostModel, Placement, Traffic};
pub use self::machine::{
    Machine, MachineAdvice, MachineOutcome, Obstacle, Parallelism, Waits, advise_machine, fastest,
};
pub use self::network::{Device, Link, MAX_DEVICES, Network};
pub use self::route::MAX_STAGES;
pub use self::search::{Effort, random_groups, search};
pub use self::spans::{Cut, SpanAdvice, Tier, advise_span};

/// Why devices cannot be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Too many devices for the matrices.
    #[error(
        "{devices} devices are more than the {MAX_DEVICES} that are placed at once: plan for islands"
    )]
    TooManyDevices {
        /// Number of devices.
        devices: usize,
    },
    /// A link has no rate.
    #[error(
        "the link from device {} to device {} carries nothing: give it a rate, or leave one of them out",
        from.0, to.0
    )]
    DeadLink {
        /// The sender.
        from: Device,
        /// The receiver.
        to: Device,
    },
    /// No stages, or more than can be ordered.
    #[error("a pipeline that is planned has from 1 to {MAX_STAGES} stages, not {stages}")]
    Stages {
        /// Requested number of stages.
        stages: usize,
    },
    /// The stages would have different numbers of replicas.
    #[error(
        "{devices} devices are not the same number for each of {stages} stages: leave {} out, or take another \
         number of stages",
        devices % stages
    )]
    Uneven {
        /// Number of devices.
        devices: usize,
        /// Number of stages.
        stages: usize,
    },
    /// There are no devices.
    #[error("there are no devices: name some")]
    NoDevices,
}
