//! What training takes, by formula: memory of a device, and floating-point operations of a pass.

pub(crate) mod flops;
pub(crate) mod frozen_memory;
pub(crate) mod gpu_memory;
#[cfg(test)]
mod graph_memory;
pub(crate) mod memory;
