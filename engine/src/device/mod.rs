//! Where tensors lie and what computes them: libtorch, beneath all else in this crate.
//!
//! `setup` opens a device, `shim` has the functions of libtorch that tch lacks, `cuda` the kernels for GPUs. `exchange` and
//! `collectives` add up what the devices of a peer computed.

#[cfg(not(fuzzing))]
mod allocator;
pub(crate) mod card;
pub(crate) mod collectives;
pub(crate) mod cuda;
pub(crate) mod exchange;
pub(crate) mod kernel;
pub(crate) mod mkl;
pub(crate) mod setup;
pub(crate) mod shim;
pub(crate) mod streams;
pub(crate) mod tensor;
