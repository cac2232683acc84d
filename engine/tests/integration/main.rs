//! The engine as its driver uses it: one program, so that libtorch is linked once.

mod audits;
mod balance;
mod balance_loss;
mod checkpoints;
mod common;
mod configs;
mod damage;
mod data;
mod device_memory;
mod experts;
mod families;
mod generation;
mod islands;
mod lora;
mod packing;
mod pipelined_workers;
mod preferences;
mod reshape;
mod slices;
mod stages;
mod staleness;
mod stand_in;
mod subspace;
mod swapping;
mod transformers;
mod workers;
