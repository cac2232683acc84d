//! The history in the folder of an anchor that does not run.

use std::path::Path;

use openraft::EntryPayload;
use shoal_formats::anchor::journal;
use shoal_protocol::history::History;
use shoal_protocol::ids::{PeerId, Step};

use super::disk::Paths;
use super::state_machine;

/// Reads the history in an anchor's folder, and changes nothing. `first` is the version that the run begins with. The
/// newest records may lack the other anchors' agreement. `None` if there is no log, or it cannot be read.
pub(crate) fn kept_history(folder: &Path, anchor: PeerId, first: Step) -> Option<History> {
    let paths = Paths::new(folder);
    let bytes = std::fs::read(paths.log()).ok()?;
    let held = journal::read(&paths.log(), &bytes, anchor).ok()?.held;
    let image = match std::fs::read(paths.snapshot()) {
        Ok(bytes) => Some(state_machine::read(&paths.snapshot(), &bytes).ok()?),
        Err(_) => None,
    };
    let covered = image.as_ref().and_then(|image| image.last).map(|last| last.index);
    let mut history = image.map_or_else(|| History::beginning_at(first), |image| image.history);
    for (index, kept) in held.entries {
        if covered.is_none_or(|covered| index > covered)
            && let EntryPayload::Normal(proposal) = kept.entry.payload
        {
            // What does not follow was of no effect when it came, either.
            let _ = history.apply(&proposal.record);
        }
    }
    Some(history)
}
