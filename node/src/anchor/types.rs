//! Raft's types as they are used here.

use std::fmt;
use std::io::Cursor;

use openraft::{EmptyNode, OptionalSend};
use shoal_protocol::ids::{PeerId, Term};
use shoal_protocol::message::LogRecord;

openraft::declare_raft_types!(
    /// What the log holds and who keeps it.
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

/// A peer that keeps the log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct AnchorId(pub(super) PeerId);

/// Nobody: Raft wants one where it names no leader.
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

/// A record on its way into the log, and the term it is meant for: one that was given to a leader
/// which lost its office and won it again belongs to the office before.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Proposal {
    pub(super) term: Term,
    pub(super) record: LogRecord,
}

/// What an entry did when its turn came; the same at every anchor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The record is part of the history (or the entry held none).
    Applied,
    /// It was meant for an earlier term: nothing changed.
    Stale,
    /// It does not follow those before it: nothing changed.
    Refused(String),
}

/// A log id by its parts; the leader is named by the term alone.
pub(super) fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(openraft::CommittedLeaderId::new(term, AnchorId::default()), index)
}

/// An error of the disk as Raft takes it: whatever it says, the anchor is over.
pub(super) fn disk_error(error: impl fmt::Display) -> StorageError {
    openraft::StorageIOError::write(openraft::AnyError::error(error)).into()
}

/// Entries as Raft hands them over.
pub(super) trait Entries:
    IntoIterator<Item = Entry, IntoIter: OptionalSend> + OptionalSend
{
}
impl<T: IntoIterator<Item = Entry, IntoIter: OptionalSend> + OptionalSend> Entries for T {}
