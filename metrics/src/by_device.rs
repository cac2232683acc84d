//! Metrics by device of a peer. Only its flags define how many there are; the first one always exists.

use prometheus::{GaugeVec, IntGaugeVec};

use crate::labels::{Label, TensorKind};

/// The number of a device among those of its peer.
const DEVICE: &str = "device";

/// A figure of each device, NaN until it is first set.
#[derive(Debug, Clone)]
pub struct OfDevices(GaugeVec);

impl OfDevices {
    pub(crate) const LABELS: &'static [&'static str] = &[DEVICE];

    pub(crate) fn new(gauges: GaugeVec) -> Self {
        let all = Self(gauges);
        all.set(0, f64::NAN);
        all
    }

    /// Sets the figure of a device.
    pub fn set(&self, device: usize, value: f64) {
        self.0.with_label_values(&[device.to_string().as_str()]).set(value);
    }

    /// The figure of a device.
    #[must_use]
    pub fn get(&self, device: usize) -> f64 {
        self.0.with_label_values(&[device.to_string().as_str()]).get()
    }
}

/// What tensors take, of each device and kind.
#[derive(Debug, Clone)]
pub struct TensorMemory(IntGaugeVec);

impl TensorMemory {
    pub(crate) const LABELS: &'static [&'static str] = &[DEVICE, TensorKind::NAME];

    pub(crate) fn new(gauges: IntGaugeVec) -> Self {
        let all = Self(gauges);
        TensorKind::ALL.iter().for_each(|kind| all.set(0, *kind, 0));
        all
    }

    /// Sets what the tensors of a kind take, in bytes.
    pub fn set(&self, device: usize, kind: TensorKind, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0.with_label_values(&[device.to_string().as_str(), kind.value()]).set(bytes);
    }

    /// What the tensors of a kind take, in bytes.
    #[must_use]
    pub fn get(&self, device: usize, kind: TensorKind) -> i64 {
        self.0.with_label_values(&[device.to_string().as_str(), kind.value()]).get()
    }
}
