//! A step of training at one stage: passes, sums of gradients, and updates.
//!
//! `stage` computes passes of microbatches and `accumulator` adds their gradients in integers. `all_reduce` adds those of
//! replicas, and `stage` applies the mean. `inner` and its neighbours are virtual workers, `frozen` the weights beside adapters.

pub(crate) mod accumulator;
pub(crate) mod all_reduce;
pub(crate) mod carried;
pub(crate) mod frozen;
pub(crate) mod inner;
pub(crate) mod pipelined_worker;
pub(crate) mod stage;
pub(crate) mod together;
pub(crate) mod token_counts;
