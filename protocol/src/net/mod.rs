//! Everything that touches a socket: who we are ([`identity`]), who may talk to us ([`admission`]), how peers
//! find one another ([`discovery`]), and what carries control messages, tensors and files between them
//! ([`transport`]).

pub mod admission;
mod connection_limits;
pub mod discovery;
pub mod identity;
pub mod transport;

pub use identity::Identity;
pub use transport::{Transport, TransportConfig, TransportEvent};
