//! Creates and registers metrics.

use prometheus::core::Collector;
use prometheus::process_collector::ProcessCollector;
use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, Result, exponential_buckets,
};

use crate::by_device::{OfDevices, TensorMemory};
use crate::by_name::ByName;
use crate::by_stage::{Hosted, OfStages, StagePeers};
use crate::peer_info::PeerInfo;
use crate::table::Spec;

/// Number of buckets of a histogram. The limit of each is twice that of the previous one.
const BUCKETS: usize = 16;

/// A registry under construction.
pub(crate) struct Registrar(Registry);

impl Registrar {
    /// Creates a registry with the operating system's data on the process.
    pub(crate) fn new() -> Result<Self> {
        let registrar = Self(Registry::new());
        registrar.0.register(Box::new(ProcessCollector::for_self()))?;
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

    /// Registers a gauge that is always 1, with a label that holds the information.
    pub(crate) fn info(&self, spec: &Spec, value: &str) -> Result<()> {
        let options = Opts::new(spec.name, spec.help()).const_label(spec.labels[0], value);
        self.add(IntGauge::with_opts(options))?.set(1);
        Ok(())
    }

    pub(crate) fn counter(&self, spec: &Spec) -> Result<IntCounter> {
        self.add(IntCounter::new(spec.name, spec.help()))
    }

    pub(crate) fn fractions(&self, spec: &Spec) -> Result<Counter> {
        self.add(Counter::new(spec.name, spec.help()))
    }

    pub(crate) fn gauge(&self, spec: &Spec) -> Result<IntGauge> {
        self.add(IntGauge::new(spec.name, spec.help()))
    }

    /// Registers a gauge that is NaN until it is first set.
    pub(crate) fn unknown(&self, spec: &Spec) -> Result<Gauge> {
        let gauge = self.add(Gauge::new(spec.name, spec.help()))?;
        gauge.set(f64::NAN);
        Ok(gauge)
    }

    pub(crate) fn histogram(&self, spec: &Spec, first: f64) -> Result<Histogram> {
        self.add(Histogram::with_opts(doubling(spec, first)?))
    }

    pub(crate) fn peers_by_stage(&self, spec: &Spec) -> Result<StagePeers> {
        self.add(IntGaugeVec::new(options(spec), spec.labels)).map(StagePeers)
    }

    pub(crate) fn peer_info(&self, spec: &Spec) -> Result<PeerInfo> {
        self.add(IntGaugeVec::new(options(spec), spec.labels)).map(PeerInfo)
    }

    pub(crate) fn by_name(&self, spec: &Spec) -> Result<ByName> {
        self.add(GaugeVec::new(options(spec), spec.labels)).map(ByName)
    }

    pub(crate) fn hosted(&self, spec: &Spec) -> Result<Hosted> {
        self.add(IntGaugeVec::new(options(spec), spec.labels)).map(Hosted)
    }

    pub(crate) fn of_stages(&self, spec: &Spec) -> Result<OfStages> {
        self.add(GaugeVec::new(options(spec), spec.labels)).map(OfStages)
    }

    pub(crate) fn of_devices(&self, spec: &Spec) -> Result<OfDevices> {
        self.add(GaugeVec::new(options(spec), spec.labels)).map(OfDevices::new)
    }

    pub(crate) fn tensor_memory(&self, spec: &Spec) -> Result<TensorMemory> {
        self.add(IntGaugeVec::new(options(spec), spec.labels)).map(TensorMemory::new)
    }

    pub(crate) fn counters(&self, spec: &Spec, values: &[&str], _: f64) -> Result<Vec<IntCounter>> {
        let vector = self.add(IntCounterVec::new(options(spec), spec.labels))?;
        Ok(values.iter().map(|value| vector.with_label_values(&[*value])).collect())
    }

    pub(crate) fn counters_of_fractions(
        &self,
        spec: &Spec,
        values: &[&str],
        _: f64,
    ) -> Result<Vec<Counter>> {
        let vector = self.add(CounterVec::new(options(spec), spec.labels))?;
        Ok(values.iter().map(|value| vector.with_label_values(&[*value])).collect())
    }

    pub(crate) fn gauges(&self, spec: &Spec, values: &[&str], _: f64) -> Result<Vec<IntGauge>> {
        let vector = self.add(IntGaugeVec::new(options(spec), spec.labels))?;
        Ok(values.iter().map(|value| vector.with_label_values(&[*value])).collect())
    }

    pub(crate) fn histograms(
        &self,
        spec: &Spec,
        values: &[&str],
        first: f64,
    ) -> Result<Vec<Histogram>> {
        let vector = self.add(HistogramVec::new(doubling(spec, first)?, spec.labels))?;
        Ok(values.iter().map(|value| vector.with_label_values(&[*value])).collect())
    }
}

fn options(spec: &Spec) -> Opts {
    Opts::new(spec.name, spec.help())
}

fn doubling(spec: &Spec, first: f64) -> Result<HistogramOpts> {
    let buckets = exponential_buckets(first, 2.0, BUCKETS)?;
    Ok(HistogramOpts::new(spec.name, spec.help()).buckets(buckets))
}
