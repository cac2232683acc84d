//! Shoal's protocol: message types and how bytes travel between peers.
//!
//! The pure part uses no socket and no clock: identifiers ([`ids`]), amounts with units
//! ([`units`]), size limits ([`limits`]), the description of a run ([`manifest`]), messages
//! ([`message`]), the run's log ([`history`]), and their encodings ([`wire`] for control messages,
//! [`frame`] and [`codec`] for tensors). The feature `net` adds identity, discovery and transport.

pub mod codec;
#[doc(hidden)]
pub mod decoder;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod decoders;
pub mod frame;
pub mod history;
pub mod ids;
pub mod inside;
pub mod label;
pub mod limits;
pub mod manifest;
pub mod message;
#[cfg(feature = "net")]
pub mod net;
pub mod permutation;
pub mod pieces;
pub mod plain_name;
pub mod stays;
pub mod units;
pub mod wire;
