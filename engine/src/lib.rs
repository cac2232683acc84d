//! The tensor work of a Shoal peer; the only crate that knows libtorch.
