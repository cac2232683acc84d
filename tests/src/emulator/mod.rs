//! Links as between clouds, in user space: machines with limited rates, queues, delays and random
//! loss, that any program can use, whatever it speaks.
//!
//! Each machine is a network namespace with a device whose packets a thread of this process carries
//! ([`network`]); when each arrives is decided by a model without a clock ([`link`]). Needs root and
//! `/dev/net/tun`; no module of the kernel's own.

pub mod link;
pub mod network;
