//! The files of `node::anchor` that decode bytes.

#[path = "../../node/src/anchor/decoders.rs"]
pub(crate) mod decoders;
#[path = "../../node/src/anchor/encoding.rs"]
mod encoding;
#[path = "../../node/src/anchor/error.rs"]
mod error;
#[path = "../../node/src/anchor/frame.rs"]
mod frame;
#[path = "../../node/src/anchor/journal.rs"]
mod journal;
#[path = "../../node/src/anchor/rpc.rs"]
mod rpc;
#[path = "../../node/src/anchor/types.rs"]
mod types;
