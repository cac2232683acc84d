//! How many microbatches a stage works on at once.

/// How many a stage takes in at first, `behind` stages from the end: enough for its engine to stay busy over links
/// of no latency. [`crate::peer`] widens it by one whenever the engine falls idle while the window keeps work out,
/// so that over a slow link more are in flight.
pub(crate) fn first_window(behind: usize) -> usize {
    2 * (behind + 1) + 1
}
