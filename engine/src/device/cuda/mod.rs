//! Kernels of this crate for NVIDIA's GPUs (`kernels/`).
//!
//! They are compiled by the NVRTC that comes with CUDA's libtorch, at the first use of a device, and run on the stream on
//! which libtorch computes. Where there is no NVRTC, the same is computed by several of libtorch's operators.

mod compiler;
mod launch;
#[cfg(test)]
mod resources;

pub(crate) use launch::{Argument, Kernels};

#[cfg(test)]
pub(crate) mod tests;
