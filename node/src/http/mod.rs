//! A node's HTTP server, for people, Prometheus and supervisors, and its client.
//!
//! Every route is read-only.

pub mod client;
mod connection;
mod hosts;
mod machine;
mod places;
mod routes;
mod server;

pub use self::machine::Machine;
pub(crate) use self::routes::STATES;
pub use self::server::{HttpServer, Shown};
