//! The types that `openraft` is instantiated with.

use std::fmt;
use std::io::Cursor;

use openraft::{EmptyNode, OptionalSend};
use shoal_protocol::ids::{PeerId, Term};
use shoal_protocol::message::LogRecord;

openraft::declare_raft_types!(
    /// The log's contents and the identifiers of its replicas.
    pub(super) Types:
        D = Proposal,
        R = Outcome,
        NodeId = AnchorId,
        Node = EmptyNode,
        SnapshotData = Cursor<Vec<u8>>,
);

pub(super) type LogId = openraft::LogId<AnchorId>;
pub(super) type Vote = openraft::Vote<AnchorId>;
pub(super) type Entry = openraft::Entry<Types>;
pub(super) type Membership = openraft::Membership<AnchorId, EmptyNode>;
pub(super) type StoredMembership = openraft::StoredMembership<AnchorId, EmptyNode>;
pub(super) type SnapshotMeta = openraft::SnapshotMeta<AnchorId, EmptyNode>;
pub(super) type ServerMetrics = openraft::metrics::RaftServerMetrics<AnchorId, EmptyNode>;
pub(super) type StorageError = openraft::StorageError<AnchorId>;
pub(super) type Raft = openraft::Raft<Types>;

/// An anchor's identifier in Raft.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct AnchorId(pub(super) PeerId);

/// A placeholder for log identifiers, in which Raft names no leader.
impl Default for AnchorId {
    fn default() -> Self {
        Self(PeerId([0; 32]))
    }
}

impl fmt::Display for AnchorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for AnchorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// A record to append, and the term that it is for. A leader that loses its term and is elected again
/// must not append records of the earlier term.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Proposal {
    pub(super) term: Term,
    pub(super) record: LogRecord,
}

/// The effect of applying an entry, the same at every anchor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The record is part of the history, or the entry held no record.
    Applied,
    /// The record was for an earlier term and changed nothing.
    Stale,
    /// The record does not follow the history and changed nothing.
    Refused(String),
}

/// A log identifier from its parts. The term stands for its leader.
pub(super) fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(openraft::CommittedLeaderId::new(term, AnchorId::default()), index)
}

/// A storage error in Raft's form. It ends the anchor.
pub(super) fn disk_error(error: impl fmt::Display) -> StorageError {
    openraft::StorageIOError::write(openraft::AnyError::error(error)).into()
}

/// Entries as Raft passes them.
pub(super) trait Entries:
    IntoIterator<Item = Entry, IntoIter: OptionalSend> + OptionalSend
{
}
impl<T: IntoIterator<Item = Entry, IntoIter: OptionalSend> + OptionalSend> Entries for T {}
