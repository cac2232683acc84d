//! The progress of a process in an open step.

use serde::{Deserialize, Serialize};

/// How far a process is in an open step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenStep {
    /// The step's number.
    pub step: u64,
    /// Microbatches that the process has done. With several replicas each does a part of them.
    pub done: u32,
    /// Microbatches of the step.
    pub microbatches: u32,
}
