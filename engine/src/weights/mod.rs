//! The weights of a stage in memory, and how passes see them.
//!
//! A flat vector at one `version`, drawn by `init` or read from files. `cutter` cuts it into the views of `blocks`; `held`,
//! `share` and `place` say which part a device has. `gradient` has what comes back.

pub(crate) mod blocks;
pub(crate) mod cutter;
pub(crate) mod expert_biases;
pub(crate) mod gradient;
pub(crate) mod held;
pub(crate) mod image;
pub(crate) mod init;
pub(crate) mod leaves;
pub(crate) mod packed;
pub(crate) mod pass_groups;
pub(crate) mod place;
pub(crate) mod share;
pub(crate) mod version;
