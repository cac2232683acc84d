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
//! samples (data, tokenizer) ─► stage (model) ─► accumulator ─► optimizer ─► checkpoint ─► generate
//! ```

mod accumulator;
mod adapter;
mod all_reduce;
#[cfg(not(fuzzing))]
mod allocator;
mod attention;
mod balance_loss;
pub mod base;
mod base_error;
mod blocks;
mod boundary;
mod cache;
mod card;
mod carried;
pub mod checkpoint;
mod checkpoint_error;
mod codec;
mod collectives;
mod cuda;
mod cutter;
pub mod data;
#[cfg(test)]
mod decoders;
mod device;
mod distance;
mod documents;
mod engine;
mod error;
mod exchange;
mod experts;
mod factor;
pub mod family;
mod fingerprint;
mod fixed_point;
mod flops;
mod footprint;
mod frozen;
mod frozen_memory;
mod fused;
mod generate;
mod gpu_memory;
mod gradient;
#[cfg(test)]
mod graph_memory;
mod guard;
mod held;
mod image;
mod init;
mod inner;
mod island;
mod kernel;
mod language_model;
mod layer;
mod layer_table;
mod leaves;
mod loss;
mod memory;
mod microbatch;
mod mkl;
mod model;
mod nf4;
mod norm;
mod normal;
mod normal_stream;
mod optimizer;
mod origin;
mod own_slices;
mod packed;
mod parameters;
mod pass_groups;
mod pipelined_worker;
mod preference;
mod product;
mod projection;
mod rotary;
mod routing;
mod safetensors_file;
mod samples;
mod sampling;
mod scorer;
mod share;
mod shim;
mod sliced;
mod sliced_loss;
mod sliced_norm;
mod square_norm;
mod stage;
mod streams;
mod subspace;
mod swap;
mod tensor;
#[cfg(test)]
mod testing;
mod together;
mod token_counts;
mod token_groups;
pub mod tokenizer;
mod visibility;
mod weights;
mod weights_place;

pub use all_reduce::AllReduce;
pub use base::{BaseFiles, BaseIndex};
pub use base_error::BaseError;
pub use checkpoint::{Checkpoint, CheckpointError, CheckpointFile, StageState, StartFiles};
pub use collectives::DeviceLinks;
pub use data::{DataError, TokenFile};
pub use device::{Device, DeviceChoice, Devices};
pub use engine::Engine;
pub use error::{EngineError, GradientProblem, Result};
pub use fingerprint::fingerprint;
pub use fixed_point::FixedPoint;
pub use flops::{PassFlops, pass_flops, peak_flops};
pub use footprint::Footprint;
pub use generate::{Ending, Generation, Generator};
pub use gpu_memory::gpu_overhead;
pub use init::initial_weights;
pub use island::{Island, threads_of_each};
pub use kernel::instruction_set;
pub use loss::Preferences;
pub use memory::{
    DeviceFloor, SwappingFloor, device_floor, island_overhead, memory_floor, pass_overhead,
    swapped_bytes, swapping_floor,
};
pub use mkl::MklDispatch;
pub use optimizer::{Slot, Update, clip_scale, learning_rate, optimizer_elements};
pub use origin::Origin;
pub use parameters::{
    Parameter, frozen_count, group_elements, parameter_count, parameters, summed_elements,
};
pub use pass_groups::passes_at_once;
pub use projection::Projected;
pub use samples::{Batch, Samples};
pub use sampling::Sampling;
pub use scorer::Scorer;
pub use shim::torch_version;
pub use square_norm::square_norm;
pub use stage::{ForwardOutput, WorkerForward};
pub use swap::{LowerTier, SwapStats, Tiers, copy_rate, swap_rate};
pub use token_counts::group_square_norm;
