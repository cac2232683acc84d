//! The initial number of microbatches in flight at a stage.

/// Initial window of a stage that is followed by `behind` stages: enough to keep its engine busy
/// over links without latency. [`crate::peer`] widens it by one whenever the engine is idle while
/// the window keeps work out, so that more microbatches are in flight over slow links.
pub(crate) fn first_window(behind: usize) -> usize {
    2 * (behind + 1) + 1
}
