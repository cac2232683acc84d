//! Which devices host which stage, where the network between them is known.
//!
//! The cost model and the search are those of DT-FM (Yuan et al. 2022, Decentralized Training of Foundation
//! Models in Heterogeneous Environments, arXiv 2206.01288): devices are divided into groups of equal
//! size, a group hosts a stage, and the order of the groups is the pipeline. What a step costs is how long
//! its tensors are on their way:
//!
//! - data parallel: in its group a device exchanges its part of the gradient with every other, there and
//!   back. The stage waits for its slowest device, the step for its slowest stage.
//! - pipeline: a device passes activations on to one of the next stage and gets gradients back. Devices of two
//!   stages are paired such that the slowest pair is as fast as can be ([`matching`]), and the stages are
//!   ordered such that the sum over all boundaries is the smallest ([`route`]).
//!
//! Devices compute equally fast here; what they compute is the same whoever is where.

mod advice;
pub mod cases;
mod cost;
mod matching;
mod network;
mod route;
mod search;
#[cfg(test)]
mod tests;

pub use self::advice::{Advice, Work, advise};
pub use self::cost::{Boundary, Busiest, Cost, CostModel, Placement, Traffic};
pub use self::network::{Device, Link, MAX_DEVICES, Network};
pub use self::route::MAX_STAGES;
pub use self::search::{Effort, random_groups, search};

/// Why devices cannot be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// More than the matrices have room for.
    #[error(
        "{devices} devices are more than the {MAX_DEVICES} that are placed at once: plan for islands"
    )]
    TooManyDevices {
        /// How many there are.
        devices: usize,
    },
    /// Nothing can travel.
    #[error(
        "the link from device {} to device {} carries nothing: give it a rate, or leave one of them out",
        from.0, to.0
    )]
    DeadLink {
        /// Where it begins.
        from: Device,
        /// Where it ends.
        to: Device,
    },
    /// None, or more than are ordered.
    #[error("a pipeline that is planned has from 1 to {MAX_STAGES} stages, not {stages}")]
    Stages {
        /// How many were asked for.
        stages: usize,
    },
    /// Stages would have different numbers of replicas.
    #[error(
        "{devices} devices are not the same number for each of {stages} stages: leave {} out, or take another \
         number of stages",
        devices % stages
    )]
    Uneven {
        /// How many there are.
        devices: usize,
        /// How many stages there are.
        stages: usize,
    },
    /// There is nothing to place.
    #[error("there are no devices: name some")]
    NoDevices,
}
