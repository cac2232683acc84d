//! Metrics by pipeline stage. Only the run's manifest defines the number of stages.

use prometheus::{GaugeVec, IntGaugeVec};

use crate::labels::{Label, PeerState};

/// The label is not `stage`, which monitoring systems often use themselves.
const STAGE: &str = "pipeline_stage";

/// Number of members that host each stage.
#[derive(Debug, Clone)]
pub struct StagePeers(pub(crate) IntGaugeVec);

impl StagePeers {
    pub(crate) const LABELS: &'static [&'static str] = &[STAGE, PeerState::NAME];

    /// Sets the number of members in this state that host a stage.
    pub fn set(&self, stage: u16, state: PeerState, peers: usize) {
        let peers = i64::try_from(peers).unwrap_or(i64::MAX);
        self.0.with_label_values(&[stage.to_string().as_str(), state.value()]).set(peers);
    }
}

/// The stages that this peer hosts.
#[derive(Debug, Clone)]
pub struct Hosted(pub(crate) IntGaugeVec);

impl Hosted {
    pub(crate) const LABELS: &'static [&'static str] = &[STAGE];

    /// Sets whether this peer hosts a stage.
    pub fn set(&self, stage: u16, hosted: bool) {
        self.0.with_label_values(&[stage.to_string().as_str()]).set(hosted.into());
    }
}

/// A figure of some stages.
#[derive(Debug, Clone)]
pub struct OfStages(pub(crate) GaugeVec);

impl OfStages {
    pub(crate) const LABELS: &'static [&'static str] = &[STAGE];

    /// Sets the figure of a stage.
    pub fn set(&self, stage: u16, value: f64) {
        self.0.with_label_values(&[stage.to_string().as_str()]).set(value);
    }
}
