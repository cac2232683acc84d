//! The file of `node::reachability` that decodes bytes.

#[path = "../../node/src/reachability/state.rs"]
mod state;

pub(crate) use state::OwnPort;
