//! What a run of the simulator came to.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use shoal_protocol::ids::{ContentHash, Step};
use shoal_protocol::units::Moment;

use crate::action::Fault;

/// What a run of the simulator came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Hash of all events in order: equal for equal runs.
    pub trace: u64,
    /// When the last thing happened.
    pub end: Moment,
    /// Things that happened.
    pub events: u64,
    /// Steps committed.
    pub commits: u64,
    /// Done reports that came again.
    pub repeated: u64,
    /// Offers that were answered busy.
    pub turned_away: u64,
    /// Offers that were sent on to a claim's holder.
    pub redirected: u64,
    /// The widest window of any stage.
    pub widest_window: usize,
    /// How long all engines ran passes, together.
    pub busy: Duration,
    /// When passes of each step ran.
    pub steps: BTreeMap<Step, StepTime>,
    /// Hash of the newest checkpoint.
    pub checkpoint: Option<ContentHash>,
    /// Why the run could not go on, if it could not.
    pub stopped: Option<String>,
    /// What peers found that must not be.
    pub faults: Vec<Fault>,
}

/// When the passes of a step ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTime {
    /// The first one began.
    pub first: Moment,
    /// The last one ended.
    pub last: Moment,
    /// Their durations, of all engines together.
    pub busy: Duration,
}

impl Report {
    /// Notes a pass of a step.
    pub(super) fn ran(&mut self, step: Step, from: Moment, to: Moment) {
        let new = StepTime { first: from, last: to, busy: Duration::ZERO };
        let time = self.steps.entry(step).or_insert(new);
        time.last = time.last.max(to);
        time.busy += to.since(from);
    }
}

/// Hash of everything written to it (FNV-1a over words of eight bytes).
#[derive(Debug, Default)]
pub(super) struct Trace(u64);

impl Trace {
    pub(super) fn hash(&self) -> u64 {
        self.0
    }
}

impl fmt::Write for Trace {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for bytes in text.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.0 = (self.0 ^ u64::from_le_bytes(word)).wrapping_mul(0x0000_0100_0000_01b3);
            self.0 ^= self.0 >> 32;
        }
        Ok(())
    }
}
