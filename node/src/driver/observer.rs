//! The observers of a run, as the driver needs them.

use crate::events::RunEvent;
use crate::status::StatusWatch;

/// Receives everything that the driver reports. The driver knows no screen and no file of events:
/// those are behind this trait.
pub trait Observer {
    /// Takes in the next event of the run.
    fn note(&mut self, event: &RunEvent);

    /// Returns the place of the run's latest status.
    fn status_watch(&self) -> &StatusWatch;
}
