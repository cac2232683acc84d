//! Numbers whose names are known only while the process runs.

use prometheus::GaugeVec;

/// A gauge for each name that the newest result has.
#[derive(Debug, Clone)]
pub struct ByName(pub(crate) GaugeVec);

impl ByName {
    pub(crate) const LABELS: &'static [&'static str] = &["name"];

    /// Sets the numbers; names that are not among them are gone. The caller bounds their number.
    pub fn set<'a>(&self, numbers: impl IntoIterator<Item = (&'a str, f64)>) {
        self.0.reset();
        for (name, number) in numbers {
            self.0.with_label_values(&[name]).set(number);
        }
    }
}
