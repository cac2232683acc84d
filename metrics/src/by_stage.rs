//! Metrics for each pipeline stage. How many stages there are, only the run's manifest says.

use prometheus::IntGaugeVec;

use crate::labels::{Label, PeerState};

/// Not `stage`, which monitoring set-ups like to use for themselves.
const STAGE: &str = "pipeline_stage";

/// How many members host each stage.
#[derive(Debug, Clone)]
pub struct StagePeers(pub(crate) IntGaugeVec);

impl StagePeers {
    pub(crate) const LABELS: &'static [&'static str] = &[STAGE, PeerState::NAME];

    /// Says how many members in this state host a stage.
    pub fn set(&self, stage: u16, state: PeerState, peers: usize) {
        let peers = i64::try_from(peers).unwrap_or(i64::MAX);
        self.0.with_label_values(&[stage.to_string().as_str(), state.value()]).set(peers);
    }
}

/// Which stages this peer hosts.
#[derive(Debug, Clone)]
pub struct Hosted(pub(crate) IntGaugeVec);

impl Hosted {
    pub(crate) const LABELS: &'static [&'static str] = &[STAGE];

    /// Says whether this peer hosts a stage.
    pub fn set(&self, stage: u16, hosted: bool) {
        self.0.with_label_values(&[stage.to_string().as_str()]).set(hosted.into());
    }
}
