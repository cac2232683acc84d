//! What was swapped.

use std::ops::AddAssign;
use std::time::Duration;

use shoal_protocol::units::Bytes;

/// How much was moved, and how long the engine waited for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SwapStats {
    /// Bytes read from the file.
    pub read: Bytes,
    /// Bytes written to the file.
    pub written: Bytes,
    /// Time for which the engine waited.
    pub waited: Duration,
    /// The most bytes that were in memory at once.
    pub peak: Bytes,
    /// Bytes copied to the device.
    pub copied: Bytes,
    /// Bytes among them that were not there yet when a pass needed them.
    pub late: Bytes,
}

impl SwapStats {
    /// What was moved since earlier statistics of the same engine, and waited for; the peak is that of all
    /// time.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            read: self.read - earlier.read,
            written: self.written - earlier.written,
            waited: self.waited - earlier.waited,
            peak: self.peak,
            copied: self.copied - earlier.copied,
            late: self.late - earlier.late,
        }
    }

    /// Those of two tiers together.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self += other;
        self
    }

    /// Those of two devices that compute at the same time.
    pub(crate) fn beside(self, other: Self) -> Self {
        let peak = self.peak + other.peak;
        Self { peak, waited: self.waited.max(other.waited), ..self.and(other) }
    }
}

impl AddAssign for SwapStats {
    fn add_assign(&mut self, more: Self) {
        self.read += more.read;
        self.written += more.written;
        self.waited += more.waited;
        self.peak = self.peak.max(more.peak);
        self.copied += more.copied;
        self.late += more.late;
    }
}
