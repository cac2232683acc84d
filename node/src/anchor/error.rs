//! Why an anchor is over.

use std::io;
use std::path::PathBuf;

use shoal_protocol::ids::PeerId;

/// An anchor that cannot be, or not go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnchorError {
    /// A record could not be written: the anchor cannot go on, since it could be forgotten.
    #[error("{path} cannot be written: {error}; free some space and start again", path = path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A file cannot be read.
    #[error("{path} cannot be read: {error}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// Part of a file is not what was written.
    #[error("{path} is damaged at byte {at}: put back a copy of its folder, or let another anchor \
             take this one's place", path = path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Where the damaged part begins.
        at: usize,
    },
    /// One of the files is gone.
    #[error("{path} is missing or older than the files beside it: put back a copy of its folder, or \
             let another anchor take this one's place", path = path.display())]
    Missing {
        /// Which.
        path: PathBuf,
    },
    /// The files are another anchor's, which may still use them.
    #[error("{path} is the log of {owner}: use another folder", path = path.display())]
    Foreign {
        /// Which.
        path: PathBuf,
        /// Whose.
        owner: PeerId,
    },
    /// The files are of a newer program.
    #[error("{path} has the form {format}, which this program does not know", path = path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Its form.
        format: u32,
    },
    /// A record is larger than one may be.
    #[error("a record of the run's log is too large to be sent")]
    TooLarge,
    /// The leader's record does not follow the history that it was told of.
    #[error("the run's log refused its leader's record: {reason}")]
    Refused {
        /// Why.
        reason: String,
    },
    /// It ended by itself.
    #[error("the run's log stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}
