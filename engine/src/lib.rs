//! The tensor work of a Shoal peer; the only crate that depends on libtorch.
//!
//! A peer opens a [`Device`], builds an [`Engine`] for its span of stages, and calls it from one
//! dedicated thread. Tensors are passed as little-endian bytes; no type of libtorch is public. The
//! sequence of a step:
//!
//! 1. [`Samples::batch`] returns a microbatch's tokens and labels.
//! 2. [`Engine::forward`] and [`Engine::backward`] run one stage on it.
//! 3. [`Engine::accumulate`] adds its weight gradients in fixed point, or [`Engine::discard`]
//!    drops them; the scheduler decides which.
//! 4. [`Engine::export`] reads the sums, and [`AllReduce`] computes the mean gradient from those of
//!    all replicas.
//! 5. [`Engine::apply`] computes the next version of the weights.
//!
//! ```text
//! data ─► train (model, weights) ─► optimizer ─► checkpoint ─► text
//! ```
//!
//! Models come in and go out through `base` and `family`. `engine` has the stages of one device, `island` several devices,
//! `swap` stages that memory does not hold. `numeric` and `device` are beneath all of these, `cost` predicts what they take.

pub mod base;
mod base_error;
pub mod checkpoint;
mod checkpoint_error;
mod cost;
pub mod data;
#[cfg(test)]
mod decoders;
mod device;
mod engine;
mod error;
pub mod family;
mod island;
mod model;
mod numeric;
mod optimizer;
mod subspace;
mod swap;
#[cfg(test)]
mod testing;
mod text;
mod train;
mod weights;

pub use base::{BaseFiles, BaseIndex};
pub use base_error::BaseError;
pub use checkpoint::{Checkpoint, CheckpointError, CheckpointFile, StageState, StartFiles};
pub use cost::flops::{PassFlops, pass_flops, peak_flops};
pub use cost::gpu_memory::gpu_overhead;
pub use cost::memory::{
    DeviceFloor, SwappingFloor, device_floor, island_overhead, memory_floor, pass_overhead,
    swapped_bytes, swapping_floor,
};
pub use data::samples::{Batch, Samples};
pub use data::token_file::{DataError, TokenFile};
pub use data::tokenizer;
pub use device::collectives::DeviceLinks;
pub use device::kernel::instruction_set;
pub use device::mkl::MklDispatch;
pub use device::setup::{Device, DeviceChoice, Devices};
pub use device::shim::torch_version;
pub use engine::Engine;
pub use engine::fingerprint::fingerprint;
pub use engine::footprint::Footprint;
pub use engine::origin::Origin;
pub use error::{EngineError, GradientProblem, Result};
pub use island::{Island, threads_of_each};
pub use model::expert_loads::StageRouting;
pub use model::loss::Preferences;
pub use model::parameters::{
    Parameter, frozen_count, group_elements, parameter_count, parameters, summed_elements,
};
pub use numeric::fixed_point::FixedPoint;
pub use numeric::projection::Projected;
pub use numeric::square_norm::square_norm;
pub use optimizer::{Slot, Update, clip_scale, learning_rate, optimizer_elements};
pub use swap::{LowerTier, SwapStats, Tiers, copy_rate, swap_rate};
pub use text::generate::{Ending, Generation, Generator};
pub use text::sampling::Sampling;
pub use text::scorer::Scorer;
pub use train::all_reduce::AllReduce;
pub use train::stage::{ForwardOutput, WorkerForward};
pub use train::token_counts::group_square_norm;
pub use weights::init::initial_weights;
pub use weights::pass_groups::passes_at_once;
