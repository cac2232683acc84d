//! What a node says over HTTP, to people, Prometheus and supervisors, and who asks it.
//!
//! It only ever answers, and changes nothing: whoever reaches it can read, and no more.

pub mod client;
mod connection;
mod machine;
mod routes;
mod server;

pub use self::machine::Machine;
pub use self::server::{HttpServer, Shown};
