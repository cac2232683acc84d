//! What Shoal's peers say to each other and how the bytes travel.
//!
//! The pure part knows no socket and no clock: names ([`ids`]), amounts ([`units`]), caps
//! ([`limits`]), what a run is ([`manifest`]), what is said ([`message`]), what the
//! log says of a run ([`history`]), and how both become
//! bytes ([`wire`] for control messages, [`frame`] and [`codec`] for tensors). With the feature
//! `net` comes what touches sockets: identity, discovery and transport.

pub mod codec;
#[doc(hidden)]
pub mod decoder;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod decoders;
pub mod frame;
pub mod history;
pub mod ids;
pub mod limits;
pub mod manifest;
pub mod message;
#[cfg(feature = "net")]
pub mod net;
pub mod pieces;
pub mod units;
pub mod wire;
