//! One typed handle for each metric of a Shoal peer, and the text format of Prometheus.
//!
//! Names start with `shoal_` and end in their unit; the operating system's data on the process
//! (memory, processor time, open files) has the usual `process_` names. A label holds a peer id in
//! `shoal_peer_info` alone, which each peer has of itself: elsewhere its values would grow with the swarm. [`groups`] is the table of all metrics; the example
//! `monitoring` generates the reference and the dashboards from it.

mod by_device;
mod by_name;
mod by_stage;
mod family;
pub mod groups;
mod labels;
mod peer_info;
mod registrar;
mod registry;
mod table;

pub use by_device::{OfDevices, TensorMemory};
pub use by_name::ByName;
pub use by_stage::{Hosted, OfStages, StagePeers};
pub use family::Family;
pub use labels::{
    AuditResult, Direction, Fault, Label, LinkPacking, MoveCause, NodeState, OutlierReason, Path,
    PeerState, Phase, PortState, Preemption, Queue, Refusal, RefusedConnection, Repeat,
    RoundFailure, Severity, Swap, TensorKind, TrafficKind,
};
pub use peer_info::PeerInfo;
pub use prometheus::{Counter, Gauge, Histogram, IntCounter, IntGauge};
pub use registry::{Metrics, MetricsError};
pub use table::{Kind, Spec};
