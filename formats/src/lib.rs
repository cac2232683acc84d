//! What a peer reads from files, and what it writes and says outside of the protocol: run configurations ([`config`]), the
//! journal of an anchor ([`anchor`]), the status that other programs ask for ([`snapshot`]).
//!
//! Nothing here waits, draws or knows of a device, so that every decoder can be tried with any bytes. Those that people write are
//! refused by file, key and value, with what would do ([`near_name`]).

pub mod anchor;
pub mod config;
#[cfg(test)]
mod decoders;
pub mod epochs;
pub mod near_name;
pub mod open_step;
pub mod own_port;
pub mod scores;
pub mod snapshot;
pub mod words;
