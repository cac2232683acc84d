//! Arithmetic whose bits are the same everywhere: on slices of numbers, without a model.
//!
//! Gradients as integers (`fixed_point`), random numbers (`normal`), formats of few bits (`nf4`, `codec`, `distance`), products
//! and norms in a fixed order, and the loops of fused operations.

pub(crate) mod codec;
pub(crate) mod distance;
pub(crate) mod fixed_point;
pub(crate) mod fused;
pub(crate) mod nf4;
pub(crate) mod normal;
pub(crate) mod normal_stream;
pub(crate) mod product;
pub(crate) mod projection;
pub(crate) mod square_norm;
