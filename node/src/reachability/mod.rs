//! Finds out whether other peers can reach this peer's own UDP port. It asks connected peers to
//! probe the port from an address that this peer never sent to. The results of two peers on the
//! internet suffice.

mod classify;
mod client;

pub(crate) use classify::judge;
pub(crate) use client::{Action, Input, Scout};
