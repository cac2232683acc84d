//! One typed handle for each metric of a Shoal peer, and the text that Prometheus reads.
//!
//! Names start with `shoal_` and end in their unit; what the operating system knows of the process
//! (memory, processor time, open files) has the usual `process_` names. No label holds a peer id:
//! its values would grow with the swarm.

mod family;
mod labels;
mod metrics;
mod registrar;

pub use family::Family;
pub use labels::{Direction, Label, LinkPacking, Queue, Refusal, TrafficKind};
pub use metrics::{Metrics, MetricsError};
pub use prometheus::{Counter, Gauge, Histogram, IntCounter, IntGauge};
