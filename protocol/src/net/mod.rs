//! The modules that use sockets: the peer's identity ([`identity`]), admission of other peers
//! ([`admission`]), discovery of peers ([`discovery`]), and the transport of control messages,
//! tensors and files ([`transport`]).

pub mod admission;
mod connection_limits;
pub mod discovery;
pub mod identity;
pub mod transport;

pub use connection_limits::host_of;
pub use identity::Identity;
pub use transport::{Transport, TransportConfig, TransportEvent};
