//! Makes metrics and registers each as it is made.

use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Counter, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, Result, exponential_buckets,
};

use crate::family::Family;
use crate::labels::Label;

/// Not `stage`, which monitoring set-ups like to use for themselves.
const STAGE_LABEL: &str = "pipeline_stage";

/// A registry that is being filled.
pub(crate) struct Registrar(Registry);

impl Registrar {
    /// Starts with what the operating system knows of the process, and what the process is.
    pub(crate) fn new() -> Result<Self> {
        let registrar = Self(Registry::new());
        registrar.0.register(Box::new(ProcessCollector::for_self()))?;
        let build = Opts::new("shoal_build_info", "Always 1; the label says what is running.")
            .const_label("version", env!("CARGO_PKG_VERSION"));
        registrar.add(IntGauge::with_opts(build))?.set(1);
        Ok(registrar)
    }

    pub(crate) fn into_registry(self) -> Registry {
        self.0
    }

    fn add<C: Collector + Clone + 'static>(&self, metric: Result<C>) -> Result<C> {
        let metric = metric?;
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    pub(crate) fn counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.add(IntCounter::new(name, help))
    }

    pub(crate) fn seconds(&self, name: &str, help: &str) -> Result<Counter> {
        self.add(Counter::new(name, help))
    }

    pub(crate) fn gauge(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.add(IntGauge::new(name, help))
    }

    /// A gauge that has no value before it is first set.
    pub(crate) fn unknown(&self, name: &str, help: &str) -> Result<Gauge> {
        let gauge = self.add(Gauge::new(name, help))?;
        gauge.set(f64::NAN);
        Ok(gauge)
    }

    /// From a small model's tenths of a second to a large one's half an hour.
    pub(crate) fn duration(&self, name: &str, help: &str) -> Result<Histogram> {
        self.doubling(name, help, 0.125)
    }

    /// Of fifteen buckets, each as large as all before it, the first up to so much.
    pub(crate) fn doubling(&self, name: &str, help: &str, first: f64) -> Result<Histogram> {
        let buckets = exponential_buckets(first, 2.0, 15)?;
        self.add(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets)))
    }

    pub(crate) fn counters<L: Label>(
        &self,
        name: &str,
        help: &str,
    ) -> Result<Family<L, IntCounter>> {
        let vector = self.add(IntCounterVec::new(Opts::new(name, help), &[L::NAME]))?;
        Ok(Family::new(|value| vector.with_label_values(&[value])))
    }

    pub(crate) fn gauges<L: Label>(&self, name: &str, help: &str) -> Result<Family<L, IntGauge>> {
        let vector = self.add(IntGaugeVec::new(Opts::new(name, help), &[L::NAME]))?;
        Ok(Family::new(|value| vector.with_label_values(&[value])))
    }

    pub(crate) fn by_stage(&self, name: &str, help: &str) -> Result<IntGaugeVec> {
        self.add(IntGaugeVec::new(Opts::new(name, help), &[STAGE_LABEL]))
    }
}
