//! The decisions of a Shoal peer as pure state machines.
//!
//! This crate has no clock, no socket, no thread and no randomness of its own. A [`peer::Peer`]
//! and, on the coordinating peer, a [`coordinator::Coordinator`] receive timed inputs
//! ([`action::PeerInput`], [`action::CoordinatorInput`]) and return actions
//! ([`action::PeerAction`], [`action::CoordinatorAction`]). Tensors are opaque handles. The node
//! drives these types over real links, and [`sim`] drives the same types over modelled ones.

pub mod action;
pub mod coordinator;
pub mod office;
mod paging;
pub mod peer;
pub mod planner;
pub mod rng;
mod robust_average;
mod round;
pub mod router;
pub mod schedule;
pub mod sim;
