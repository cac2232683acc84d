//! The types that `openraft` is instantiated with.

use std::fmt;
use std::io::Cursor;

use openraft::{EmptyNode, OptionalSend};
use shoal_protocol::ids::{PeerId, Term};
use shoal_protocol::message::LogRecord;

openraft::declare_raft_types!(
    /// The log's contents and the identifiers of its replicas.
    pub Types:
        D = Proposal,
        R = Outcome,
        NodeId = AnchorId,
        Node = EmptyNode,
        SnapshotData = Cursor<Vec<u8>>,
);

/// The place of an entry in the log.
pub type LogId = openraft::LogId<AnchorId>;
/// A vote of an anchor.
pub type Vote = openraft::Vote<AnchorId>;
/// An entry of the log.
pub type Entry = openraft::Entry<Types>;
/// The anchors of a group.
pub type Membership = openraft::Membership<AnchorId, EmptyNode>;
/// The anchors of a group, and the entry that named them.
pub type StoredMembership = openraft::StoredMembership<AnchorId, EmptyNode>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::SnapshotMeta<AnchorId, EmptyNode>;
/// What openraft tells of an anchor.
pub type ServerMetrics = openraft::metrics::RaftServerMetrics<AnchorId, EmptyNode>;
/// Why a disk could not be used.
pub type StorageError = openraft::StorageError<AnchorId>;
/// An anchor in openraft.
pub type Raft = openraft::Raft<Types>;

/// An anchor's identifier in Raft.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AnchorId(pub PeerId);

/// A placeholder for log identifiers, in which Raft names no leader.
impl Default for AnchorId {
    fn default() -> Self {
        Self(PeerId([0; 32]))
    }
}

/// The anchor whose key begins with this number, little-endian, and goes on with zeros.
impl From<u64> for AnchorId {
    fn from(number: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        Self(PeerId(key))
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
pub struct Proposal {
    /// The term.
    pub term: Term,
    /// The record.
    pub record: LogRecord,
}

/// The effect of applying an entry, the same at every anchor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The record is part of the history, or the entry held no record.
    Applied,
    /// The record was for an earlier term and changed nothing.
    Stale,
    /// The record does not follow the history and changed nothing.
    Refused(String),
}

/// A log identifier from its parts. The term stands for its leader.
pub fn log_id(term: u64, index: u64) -> LogId {
    LogId::new(openraft::CommittedLeaderId::new(term, AnchorId::default()), index)
}

/// A storage error in Raft's form. It ends the anchor.
pub fn disk_error(error: impl fmt::Display) -> StorageError {
    openraft::StorageIOError::write(openraft::AnyError::error(error)).into()
}

/// Entries as Raft passes them.
pub trait Entries: IntoIterator<Item = Entry, IntoIter: OptionalSend> + OptionalSend {}
impl<T: IntoIterator<Item = Entry, IntoIter: OptionalSend> + OptionalSend> Entries for T {}
