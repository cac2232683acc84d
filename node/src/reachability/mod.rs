//! Finds out whether others get through to this peer's own UDP port: by asking peers that it talks to anyway to
//! ring there from where it never sent to. Most are not asked: two that see it from everywhere are enough.

mod classify;
mod client;
mod state;

pub(crate) use classify::judge;
pub(crate) use client::{Action, Input, Scout};
pub(crate) use state::Scope;
pub use state::{Mapping, OwnPort};
