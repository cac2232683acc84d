//! A decoder: what its layers compute, and which weights they have.
//!
//! `parameters` and `layer_table` list the weights, `layer` has them as tensors, `decoder` puts `norm`, `attention` and
//! `experts` together, `loss` and `preference` end a pass. `sliced` and its neighbours compute layers in slices.

pub(crate) mod adapter;
pub(crate) mod attention;
pub(crate) mod balance_loss;
pub(crate) mod boundary;
pub(crate) mod cache;
pub(crate) mod decoder;
pub(crate) mod documents;
pub(crate) mod expert_loads;
pub(crate) mod experts;
pub(crate) mod factor;
pub(crate) mod latent;
pub(crate) mod layer;
pub(crate) mod layer_table;
pub(crate) mod loss;
pub(crate) mod microbatch;
pub(crate) mod norm;
pub(crate) mod own_slices;
pub(crate) mod parameters;
pub(crate) mod preference;
pub(crate) mod rotary;
pub(crate) mod routing;
pub(crate) mod sliced;
pub(crate) mod sliced_loss;
pub(crate) mod sliced_norm;
pub(crate) mod token_groups;
pub(crate) mod visibility;
