//! What anchors write to their disks and say to each other, as bytes: records of openraft's log in a journal, votes, images of
//! the state, and the questions and answers of its protocol.

pub mod decoders;
pub mod encoding;
pub mod error;
pub mod frame;
pub mod journal;
pub mod rpc;
pub mod types;
