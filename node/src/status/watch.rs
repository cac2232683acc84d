//! The latest status of a run, shared with all readers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use shoal_protocol::message;

use super::event_log::EventLog;
use super::{Observation, Status, SurvivalStatus};
use crate::events::RunEvent;

/// A driver that has published nothing for this long is stalled. It publishes about once a second,
/// and repeats unanswered requests every few seconds.
const STANDSTILL: Duration = Duration::from_secs(60);

/// The latest status of a run, shared between threads.
#[derive(Debug, Clone, Default)]
pub struct StatusWatch {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    event_log: EventLog,
    /// When the driver last published, while there is one.
    looked: Option<Instant>,
}

/// A node's health, as `/livez` and `/readyz` report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// The driver is not stalled.
    pub live: bool,
    /// The node serves the role that it has in the run.
    pub ready: bool,
}

impl StatusWatch {
    /// Records an event of the run.
    pub fn note(&self, event: &RunEvent) {
        self.lock().event_log.note(now(), event);
    }

    /// Records that a step began in the run that this peer coordinates.
    pub(crate) fn opened(&self) {
        self.lock().event_log.opened();
    }

    /// Records the driver's observation.
    pub(crate) fn see(&self, observation: Observation) {
        let mut shared = self.lock();
        shared.event_log.see(now(), observation);
        shared.looked = Some(Instant::now());
    }

    /// Records that the driver has ended.
    pub(crate) fn clear(&self) {
        let mut shared = self.lock();
        shared.event_log.clear();
        shared.looked = None;
    }

    /// The current status.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut status = self.lock().event_log.status(now());
        status.node.resident_bytes = resident_bytes();
        status
    }

    /// The curves, for a peer that joined later.
    pub(crate) fn history(&self) -> message::Curves {
        self.lock().event_log.history()
    }

    /// The first step of the curves, if a step was committed.
    pub(crate) fn curves_begin(&self) -> Option<u64> {
        self.lock().event_log.curves_begin()
    }

    /// Takes in another peer's curves of steps before those that this one has seen.
    pub(crate) fn add_earlier(&self, curves: message::Curves) {
        self.lock().event_log.add_earlier(curves);
    }

    /// The deaths that the run survives.
    pub(crate) fn survival(&self) -> Option<SurvivalStatus> {
        self.lock().event_log.current_survival()
    }

    /// The node's current health.
    #[must_use]
    pub fn health(&self) -> Health {
        self.health_at(Instant::now())
    }

    fn health_at(&self, now: Instant) -> Health {
        let shared = self.lock();
        let live =
            shared.looked.is_none_or(|looked| now.saturating_duration_since(looked) < STANDSTILL);
        Health { live, ready: live && shared.event_log.is_ready() }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The current time, in milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Resident memory of this process in bytes, from `/proc` on Linux.
fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::NodeStatus;

    #[test]
    fn a_stalled_driver_is_not_alive() {
        let watch = StatusWatch::default();
        let node = NodeStatus { ready: true, ..NodeStatus::default() };
        watch.see(Observation { node, ..Observation::default() });
        let later = Instant::now() + STANDSTILL;
        assert_eq!(watch.health(), Health { live: true, ready: true });
        assert_eq!(watch.health_at(later), Health { live: false, ready: false });
        // Between two incarnations there is no driver that could stall.
        watch.clear();
        assert_eq!(watch.health_at(later), Health { live: true, ready: false });
    }

    #[test]
    fn a_process_knows_its_memory() {
        assert!(
            StatusWatch::default()
                .status()
                .node
                .resident_bytes
                .is_some_and(|bytes| bytes > 1 << 20)
        );
    }
}
