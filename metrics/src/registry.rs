//! All metrics of a peer, and their text format.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::proto::LabelPair;
use prometheus::{Registry, TextEncoder};

use crate::groups::{Checkpoints, Coordination, Links, Machine, Memory, Node, Run};
use crate::registrar::Registrar;
use crate::table::Spec;

/// The label with the run's id.
const RUN: &str = "run";

/// The version of the process, known at compile time.
const BUILD: Spec = Spec::info(
    "shoal_build_info",
    "Always 1; the label holds the version of the program.",
    &["version"],
);

/// A failure of the metrics registry.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// A metric's name or label is taken or invalid.
    #[error("a metric cannot be registered: {0}; this is a bug, please report it")]
    Register(#[source] prometheus::Error),
    /// The metrics cannot be encoded as text.
    #[error("the metrics cannot be written as text: {0}; this is a bug, please report it")]
    Encode(#[source] prometheus::Error),
}

/// Every metric of a peer. All handles are cheap to clone and safe to use from any thread.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    name: Arc<Mutex<Option<String>>>,
    /// Progress of the run.
    pub run: Run,
    /// Metrics of the coordinator.
    pub coordination: Coordination,
    /// State and activity of this peer.
    pub node: Node,
    /// Memory of this peer.
    pub memory: Memory,
    /// The machine of this peer.
    pub machine: Machine,
    /// Links of this peer.
    pub links: Links,
    /// Checkpoints of the run.
    pub checkpoints: Checkpoints,
}

impl Metrics {
    /// Creates all metrics with their initial values, in a registry of their own.
    ///
    /// # Errors
    /// [`MetricsError::Register`] if two metrics clash, which is a bug.
    pub fn new() -> Result<Self, MetricsError> {
        Self::register().map_err(MetricsError::Register)
    }

    fn register() -> prometheus::Result<Self> {
        let r = Registrar::new()?;
        r.info(&BUILD, env!("CARGO_PKG_VERSION"))?;
        Ok(Self {
            name: Arc::default(),
            run: Run::register(&r)?,
            coordination: Coordination::register(&r)?,
            node: Node::register(&r)?,
            memory: Memory::register(&r)?,
            machine: Machine::register(&r)?,
            links: Links::register(&r)?,
            checkpoints: Checkpoints::register(&r)?,
            registry: r.into_registry(),
        })
    }

    /// All metrics of Shoal, by group.
    #[must_use]
    pub fn table() -> [(&'static str, &'static [Spec]); 8] {
        [
            ("The process", &[BUILD]),
            ("The run", Run::TABLE),
            ("Coordination", Coordination::TABLE),
            ("A peer", Node::TABLE),
            ("Memory", Memory::TABLE),
            ("The machine", Machine::TABLE),
            ("Links", Links::TABLE),
            ("Checkpoints", Checkpoints::TABLE),
        ]
    }

    /// Sets the label `run` of every metric. A joining peer does not know its run before.
    pub fn name_run(&self, run: impl Into<String>) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = Some(run.into());
    }

    /// Encodes all metrics in Prometheus' text format, to be served as [`Self::CONTENT_TYPE`].
    ///
    /// # Errors
    /// [`MetricsError::Encode`] if a metric has no name or type, which is a bug.
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

    /// The content type of [`Self::encode`]'s text.
    pub const CONTENT_TYPE: &'static str = prometheus::TEXT_FORMAT;
}
