//! All metrics of a peer, and their text.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::proto::LabelPair;
use prometheus::{Registry, TextEncoder};

use crate::groups::{Checkpoints, Coordination, Links, Machine, Memory, Node, Run};
use crate::registrar::Registrar;
use crate::table::Spec;

/// Says which run a metric is of.
const RUN: &str = "run";

/// What the process is, which is known beforehand.
const BUILD: Spec =
    Spec::info("shoal_build_info", "Always 1; the label says what is running.", &["version"]);

/// Why there are no metrics.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// A metric's name or label is taken or misspelt.
    #[error("a metric cannot be registered: {0}; this is a bug, please report it")]
    Register(#[source] prometheus::Error),
    /// The metrics cannot be written as text.
    #[error("the metrics cannot be written as text: {0}; this is a bug, please report it")]
    Encode(#[source] prometheus::Error),
}

/// Every metric of a peer. All handles are cheap to clone and safe to use from any thread.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    name: Arc<Mutex<Option<String>>>,
    /// How far the run is.
    pub run: Run,
    /// What who keeps the run knows.
    pub keeping: Coordination,
    /// What this peer is and does.
    pub node: Node,
    /// Its memory.
    pub memory: Memory,
    /// What it runs on.
    pub machine: Machine,
    /// Its links.
    pub links: Links,
    /// Its checkpoints.
    pub checkpoints: Checkpoints,
}

impl Metrics {
    /// Every metric at its start, in a registry of their own.
    ///
    /// # Errors
    /// [`MetricsError::Register`] where two metrics clash, which is a bug.
    pub fn new() -> Result<Self, MetricsError> {
        Self::register().map_err(MetricsError::Register)
    }

    fn register() -> prometheus::Result<Self> {
        let r = Registrar::new()?;
        r.info(&BUILD, env!("CARGO_PKG_VERSION"))?;
        Ok(Self {
            name: Arc::default(),
            run: Run::register(&r)?,
            keeping: Coordination::register(&r)?,
            node: Node::register(&r)?,
            memory: Memory::register(&r)?,
            machine: Machine::register(&r)?,
            links: Links::register(&r)?,
            checkpoints: Checkpoints::register(&r)?,
            registry: r.into_registry(),
        })
    }

    /// Every metric of ours, by what it is about.
    #[must_use]
    pub fn table() -> [(&'static str, &'static [Spec]); 8] {
        [
            ("The process", &[BUILD]),
            ("The run", Run::TABLE),
            ("Keeping the run", Coordination::TABLE),
            ("A peer", Node::TABLE),
            ("Memory", Memory::TABLE),
            ("The machine", Machine::TABLE),
            ("Links", Links::TABLE),
            ("Checkpoints", Checkpoints::TABLE),
        ]
    }

    /// Says which run this is. From here on every metric has it as the label `run`: before, a peer that
    /// joins does not know.
    pub fn name_run(&self, run: impl Into<String>) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = Some(run.into());
    }

    /// Everything in Prometheus' text format, to be served as [`Self::CONTENT_TYPE`].
    ///
    /// # Errors
    /// [`MetricsError::Encode`] where a metric has no name or type, which is a bug.
    pub fn encode(&self) -> Result<String, MetricsError> {
        let mut families = self.registry.gather();
        let name = self.name.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(name) = name {
            let mut label = LabelPair::default();
            label.set_name(RUN.to_owned());
            label.set_value(name);
            for metric in families.iter_mut().flat_map(|family| family.mut_metric()) {
                let mut labels = metric.take_label();
                labels.push(label.clone());
                metric.set_label(labels);
            }
        }
        TextEncoder::new().encode_to_string(&families).map_err(MetricsError::Encode)
    }

    /// The content type of what [`Self::encode`] gives.
    pub const CONTENT_TYPE: &'static str = prometheus::TEXT_FORMAT;
}
