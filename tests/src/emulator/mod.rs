//! An emulated network in user space: machines with limited rates, queues, delays and random loss, for any
//! program and protocol.
//!
//! Each machine is a network namespace with a device whose packets a thread of this process carries
//! ([`network`]). A model without a clock decides when each packet arrives ([`link`]). Needs root and
//! `/dev/net/tun`, and no kernel module.

pub mod link;
pub mod network;
