//! Where what is known of a run hangs for whoever asks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::event_log::EventLog;
use super::{Sight, Status};
use crate::events::RunEvent;

/// A driver that has not looked for this long stands still: it looks about once a second, and says
/// again every few seconds what has no answer.
const STANDSTILL: Duration = Duration::from_secs(60);

/// What is known of a run, for all threads.
#[derive(Debug, Clone, Default)]
pub struct StatusWatch {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    event_log: EventLog,
    /// When the driver last looked, where there is one.
    looked: Option<Instant>,
}

/// Whether a node is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    /// Nothing in it stands still.
    pub live: bool,
    /// It does for the run what it is there for.
    pub ready: bool,
}

impl StatusWatch {
    /// Notes an event of the run.
    pub fn note(&self, event: &RunEvent) {
        self.lock().event_log.note(now(), event);
    }

    /// Notes that a step of the run that this peer keeps began.
    pub(crate) fn opened(&self) {
        self.lock().event_log.opened();
    }

    /// Notes what the driver sees.
    pub(crate) fn see(&self, sight: Sight) {
        let mut shared = self.lock();
        shared.event_log.see(now(), sight);
        shared.looked = Some(Instant::now());
    }

    /// The driver is gone.
    pub(crate) fn look_away(&self) {
        let mut shared = self.lock();
        shared.event_log.look_away();
        shared.looked = None;
    }

    /// Everything as it is now.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut status = self.lock().event_log.status(now());
        status.node.resident_bytes = resident_bytes();
        status
    }

    /// Whether the node is well.
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

/// Milliseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Memory that this process uses, as Linux tells it.
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
    fn a_driver_that_no_longer_looks_is_not_alive() {
        let board = StatusWatch::default();
        let node = NodeStatus { ready: true, ..NodeStatus::default() };
        board.see(Sight { node, ..Sight::default() });
        let later = Instant::now() + STANDSTILL;
        assert_eq!(board.health(), Health { live: true, ready: true });
        assert_eq!(board.health_at(later), Health { live: false, ready: false });
        // Between two lives there is no driver that could stand still.
        board.look_away();
        assert_eq!(board.health_at(later), Health { live: true, ready: false });
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
