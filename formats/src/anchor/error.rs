//! Errors that end an anchor.

use std::io;
use std::path::PathBuf;

use shoal_protocol::ids::PeerId;

/// Why an anchor cannot open or continue.
#[derive(Debug, thiserror::Error)]
pub enum AnchorError {
    /// A write failed. The anchor ends, because it could forget the record.
    #[error("cannot write {path}: {error}; free disk space and start the peer again", path = path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// Part of a file was changed after it was written.
    #[error("{path} is damaged at byte {at}: restore the folder from a copy, or let another anchor \
             replace this one", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The offset of the damage.
        at: usize,
    },
    /// A file is missing.
    #[error("{path} is missing or older than the files beside it: restore the folder from a copy, or \
             let another anchor replace this one", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The files belong to another anchor, which may still use them.
    #[error("{path} is the log of {owner}: use another data directory", path = path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The anchor that it belongs to.
        owner: PeerId,
    },
    /// A newer version of the program wrote the files.
    #[error("{path} has format {format}, which this version of shoal does not support; install a \
             newer one", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format version.
        format: u32,
    },
    /// A record exceeds the size limit.
    #[error("a record of the run's log is too large to be sent")]
    TooLarge,
    /// The leader's record does not follow the history.
    #[error("the run's log refused its leader's record: {reason}")]
    Refused {
        /// The cause.
        reason: String,
    },
    /// Raft stopped on its own.
    #[error("the run's log stopped: {reason}")]
    Stopped {
        /// The cause.
        reason: String,
    },
}
