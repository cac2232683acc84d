//! What a Shoal peer does next: pure decisions.
//!
//! Nothing here has a clock, a socket, a thread or randomness of its own. A [`peer::Peer`] and, on
//! the peer that keeps the ledger, a [`coordinator::Coordinator`] are told what happened and when
//! ([`action::PeerInput`], [`action::CoordinatorInput`]) and answer with what to do
//! ([`action::PeerAction`], [`action::CoordinatorAction`]). Tensors are opaque handles. The node
//! drives these types over real links, [`sim`] drives the same types over modelled ones.

pub mod action;
mod anchors;
pub mod coordinator;
mod deadline;
mod ledger;
pub mod locality;
mod membership;
mod paging;
pub mod peer;
pub mod placement;
pub mod planner;
pub mod rebalance;
pub mod rng;
mod robust_average;
mod round;
pub mod router;
pub mod schedule;
pub mod sim;
pub mod stage_exchange;
pub mod throughput;
