//! Which member hosts which stages.
//!
//! [`throughput`] measures, [`placement`] gives a newcomer its stages, [`rebalance`] and [`stage_exchange`] move members
//! where that makes the swarm faster, `span_length` and `era_spans` choose how many stages a member hosts, `places` and
//! [`locality`] keep pipelines within regions, and [`anchors`] are those that keep the log.

pub mod anchors;
pub(crate) mod era_spans;
pub mod locality;
pub mod placement;
pub(crate) mod places;
pub mod rebalance;
pub(crate) mod span_length;
pub mod stage_exchange;
pub mod throughput;
