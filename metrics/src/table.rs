//! The table of all metrics, one group for each topic. A row defines the handle in the code, the
//! help text in Prometheus, and the name for dashboards and rules.

use prometheus::{Counter, Gauge, Histogram, IntCounter, IntGauge, Result};

use crate::by_device::{OfDevices, TensorMemory};
use crate::by_name::ByName;
use crate::by_stage::{Hosted, OfStages, StagePeers};
use crate::family::Family;
use crate::labels::Label;
use crate::peer_info::PeerInfo;
use crate::registrar::Registrar;

/// The static description of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    /// Its name in the exposition.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Its labels besides `run`.
    pub labels: &'static [&'static str],
    help: &'static str,
}

impl Spec {
    pub(crate) const fn of<M: Metric>(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: M::KIND, labels: M::LABELS, help }
    }

    /// Describes a gauge that is always 1, with a label that holds the information.
    pub(crate) const fn info(
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str],
    ) -> Self {
        Self { name, kind: Kind::Gauge, labels, help }
    }

    /// Whether a sample of this name belongs to the metric.
    #[must_use]
    pub fn is_sampled_by(&self, name: &str) -> bool {
        match (self.kind, name.strip_prefix(self.name)) {
            (Kind::Histogram, Some(suffix)) => ["_bucket", "_sum", "_count"].contains(&suffix),
            (Kind::Counter | Kind::Gauge, Some(suffix)) => suffix.is_empty(),
            (_, None) => false,
        }
    }

    /// Its help text.
    #[must_use]
    pub fn help(&self) -> &'static str {
        self.help.trim()
    }
}

/// The kinds of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Never decreases.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// Counts observations by their size.
    Histogram,
}

impl Kind {
    /// Its name in Prometheus.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A handle that can be created from a row of the table.
pub(crate) trait Metric: Sized {
    /// Its kind.
    const KIND: Kind;
    /// The names of its labels.
    const LABELS: &'static [&'static str] = &[];

    /// Creates and registers the metric. Histograms have doubling buckets, the first up to `first`.
    fn register(registrar: &Registrar, spec: &Spec, first: f64) -> Result<Self>;
}

/// Metrics that can be created for each value of a label.
pub(crate) trait Each: Sized {
    /// Their kind.
    const KIND: Kind;

    /// Creates and registers one metric for each of these values, in their order.
    fn register(
        registrar: &Registrar,
        spec: &Spec,
        values: &[&'static str],
        first: f64,
    ) -> Result<Vec<Self>>;
}

impl<L: Label, M: Each> Metric for Family<L, M> {
    const KIND: Kind = M::KIND;
    const LABELS: &'static [&'static str] = &[L::NAME];

    fn register(registrar: &Registrar, spec: &Spec, first: f64) -> Result<Self> {
        let values: Vec<_> = L::ALL.iter().map(|label| label.value()).collect();
        Ok(Self::new(M::register(registrar, spec, &values, first)?))
    }
}

macro_rules! metric {
    ($type:ty, $kind:ident, $labels:expr, $make:ident $(, $first:ident)?) => {
        impl Metric for $type {
            const KIND: Kind = Kind::$kind;
            const LABELS: &'static [&'static str] = $labels;

            fn register(registrar: &Registrar, spec: &Spec, _first: f64) -> Result<Self> {
                registrar.$make(spec $(, { let $first = _first; $first })?)
            }
        }
    };
}

metric!(IntCounter, Counter, &[], counter);
metric!(Counter, Counter, &[], fractions);
metric!(IntGauge, Gauge, &[], gauge);
metric!(Gauge, Gauge, &[], unknown);
metric!(Histogram, Histogram, &[], histogram, first);
metric!(StagePeers, Gauge, StagePeers::LABELS, peers_by_stage);
metric!(PeerInfo, Gauge, PeerInfo::LABELS, peer_info);
metric!(ByName, Gauge, ByName::LABELS, by_name);
metric!(Hosted, Gauge, Hosted::LABELS, hosted);
metric!(OfStages, Gauge, OfStages::LABELS, of_stages);
metric!(OfDevices, Gauge, OfDevices::LABELS, of_devices);
metric!(TensorMemory, Gauge, TensorMemory::LABELS, tensor_memory);

macro_rules! each {
    ($type:ty, $kind:ident, $make:ident) => {
        impl Each for $type {
            const KIND: Kind = Kind::$kind;

            fn register(
                registrar: &Registrar,
                spec: &Spec,
                values: &[&'static str],
                first: f64,
            ) -> Result<Vec<Self>> {
                registrar.$make(spec, values, first)
            }
        }
    };
}

each!(IntCounter, Counter, counters);
each!(Counter, Counter, counters_of_fractions);
each!(IntGauge, Gauge, gauges);
each!(Histogram, Histogram, histograms);

/// Defines a group of rows of the table. The help text is the documentation of the field, up to its
/// last full stop. `from` is the limit of a histogram's first bucket.
macro_rules! group {
    (
        $(#[$attribute:meta])*
        pub struct $group:ident {
            $($(#[doc = $help:literal])+ $field:ident: $type:ty = $name:literal $(from $first:literal)?;)+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone)]
        pub struct $group {
            $($(#[doc = $help])+ pub $field: $type,)+
        }

        impl $group {
            pub(crate) const TABLE: &'static [$crate::table::Spec] =
                &[$($crate::table::Spec::of::<$type>($name, concat!($($help),+))),+];

            pub(crate) fn register(registrar: &$crate::registrar::Registrar) -> prometheus::Result<Self> {
                $(
                    let first: &[f64] = &[$($first)?];
                    let spec = $crate::table::Spec::of::<$type>($name, concat!($($help),+));
                    let $field = <$type as $crate::table::Metric>::register(
                        registrar, &spec, first.first().copied().unwrap_or(1.0),
                    )?;
                )+
                Ok(Self { $($field),+ })
            }
        }
    };
}
pub(crate) use group;
