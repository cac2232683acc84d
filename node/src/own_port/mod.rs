//! Finds out whether others get through to this peer's own UDP port: by asking peers that it talks to anyway to
//! ring there from where it never sent to. Most are not asked: two that see it from everywhere are enough.

mod scout;
mod verdict;

pub(crate) use scout::{Action, Input, Scout};
pub(crate) use verdict::judge;
