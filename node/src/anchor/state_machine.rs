//! The run's history, built from the log's entries as they commit, and its snapshots.

use std::io::Cursor;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use openraft::storage::{RaftStateMachine, Snapshot};
use openraft::{EntryPayload, RaftSnapshotBuilder};
use shoal_formats::anchor::encoding::{Image, SNAPSHOT};
use shoal_formats::anchor::frame;
use shoal_formats::anchor::types::{
    Entries, Entry, LogId, Outcome, SnapshotMeta, StorageError, StoredMembership, Types, disk_error,
};
use shoal_protocol::history::History;
use shoal_protocol::ids::{Step, Term};
use tokio::sync::{oneshot, watch};

use super::AnchorError;
use super::disk::Disk;

/// A snapshot and its metadata.
#[derive(Clone)]
struct StoredSnapshot {
    meta: SnapshotMeta,
    bytes: Arc<Vec<u8>>,
}

struct State {
    image: Image,
    stored: Option<StoredSnapshot>,
}

/// Applies committed entries to the run's history.
#[derive(Clone)]
pub(super) struct StateMachine {
    state: Arc<Mutex<State>>,
    /// The newest term whose first entry was applied: everything that earlier terms committed was
    /// applied before.
    opened: Arc<watch::Sender<Term>>,
    disk: Disk,
}

/// Reads a snapshot's file.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Image, AnchorError> {
    let damaged = |at| AnchorError::Damaged { path: path.to_owned(), at };
    match frame::read_all(bytes, SNAPSHOT).map_err(damaged)? {
        // The file was renamed into place whole.
        (pieces, whole) if pieces.len() == 1 && whole == bytes.len() => {
            Image::decode(pieces[0]).map_err(|_| damaged(0))
        }
        (_, whole) => Err(damaged(whole)),
    }
}

impl StateMachine {
    /// With the snapshot that the disk has, or the empty history of a run that begins at version `first`.
    pub(super) fn new(opened: Option<Image>, first: Step, disk: Disk) -> Self {
        let stored = opened.as_ref().map(StoredSnapshot::of);
        let image = opened.unwrap_or_else(|| Image {
            history: History::beginning_at(first),
            last: None,
            anchors: StoredMembership::default(),
        });
        let state = Arc::new(Mutex::new(State { image, stored }));
        Self { state, opened: Arc::new(watch::Sender::new(Term(0))), disk }
    }

    pub(super) fn history(&self) -> History {
        self.state().image.history.clone()
    }

    /// The number of the run's history; `None` while the log is empty.
    pub(super) fn number(&self) -> Option<u16> {
        let state = self.state();
        let history = &state.image.history;
        (*history != History::default()).then_some(history.number)
    }

    /// The newest term whose first entry was applied, as it changes.
    pub(super) fn opened(&self) -> watch::Receiver<Term> {
        self.opened.subscribe()
    }

    /// The last applied entry.
    pub(super) fn applied(&self) -> Option<LogId> {
        self.state().image.last
    }

    /// The last entry that the newest snapshot covers.
    pub(super) fn snapshot_end(&self) -> Option<LogId> {
        self.state().stored.as_ref().and_then(|stored| stored.meta.last_log_id)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while it holds the history")
    }

    fn apply_one(&self, image: &mut Image, entry: Entry) -> Outcome {
        image.last = Some(entry.log_id);
        let term = entry.log_id.leader_id.term;
        match entry.payload {
            EntryPayload::Blank => {
                self.opened.send_replace(Term(term));
            }
            EntryPayload::Membership(membership) => {
                image.anchors = StoredMembership::new(Some(entry.log_id), membership);
            }
            EntryPayload::Normal(proposal) if proposal.term != Term(term) => {
                tracing::debug!(meant = %proposal.term, term, "dropped a record of an earlier term");
                return Outcome::Stale;
            }
            EntryPayload::Normal(proposal) => {
                if let Err(error) = image.history.apply(&proposal.record) {
                    tracing::warn!(%error, term, "dropped a record that does not follow the history");
                    return Outcome::Refused(error.to_string());
                }
            }
        }
        Outcome::Applied
    }

    /// Makes a snapshot the newest, and writes it before everything that is written later.
    fn keep(
        &self,
        state: &mut State,
        stored: StoredSnapshot,
    ) -> oneshot::Receiver<std::io::Result<()>> {
        let (done, written) = oneshot::channel();
        let done = Box::new(move |outcome| drop(done.send(outcome)));
        self.disk.replace_snapshot(frame::seal(&stored.bytes), done);
        state.stored = Some(stored);
        written
    }
}

impl StoredSnapshot {
    fn of(image: &Image) -> Self {
        let id = image.last.map(|last| last.to_string()).unwrap_or_default();
        let meta = SnapshotMeta {
            last_log_id: image.last,
            last_membership: image.anchors.clone(),
            snapshot_id: id,
        };
        Self { meta, bytes: Arc::new(image.encode()) }
    }

    fn snapshot(&self) -> Snapshot<Types> {
        let data = Cursor::new(self.bytes.to_vec());
        Snapshot { meta: self.meta.clone(), snapshot: Box::new(data) }
    }
}

async fn written(written: oneshot::Receiver<std::io::Result<()>>) -> Result<(), StorageError> {
    let closed = |_| std::io::Error::other("the anchor's log is closed");
    written.await.map_err(closed).flatten().map_err(disk_error)
}

impl RaftSnapshotBuilder<Types> for StateMachine {
    async fn build_snapshot(&mut self) -> Result<Snapshot<Types>, StorageError> {
        let (stored, kept) = {
            let mut state = self.state();
            let stored = StoredSnapshot::of(&state.image);
            if stored.bytes.len() > SNAPSHOT {
                return Err(disk_error("the run's history is too long for a snapshot"));
            }
            let kept = self.keep(&mut state, stored.clone());
            (stored, kept)
        };
        written(kept).await?;
        Ok(stored.snapshot())
    }
}

impl RaftStateMachine<Types> for StateMachine {
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), StorageError> {
        let state = self.state();
        Ok((state.image.last, state.image.anchors.clone()))
    }

    async fn apply<I: Entries>(&mut self, entries: I) -> Result<Vec<Outcome>, StorageError>
    where
        I::IntoIter: Send,
    {
        let mut state = self.state();
        Ok(entries.into_iter().map(|entry| self.apply_one(&mut state.image, entry)).collect())
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<Cursor<Vec<u8>>>, StorageError> {
        Ok(Box::default())
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: Box<Cursor<Vec<u8>>>,
    ) -> Result<(), StorageError> {
        let image = Image::decode(snapshot.get_ref()).map_err(disk_error)?;
        let kept = {
            let mut state = self.state();
            let stored =
                StoredSnapshot { meta: meta.clone(), bytes: Arc::new(snapshot.into_inner()) };
            state.image = image;
            self.keep(&mut state, stored)
        };
        written(kept).await
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<Types>>, StorageError> {
        Ok(self.state().stored.as_ref().map(StoredSnapshot::snapshot))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use shoal_formats::anchor::types::{Proposal, log_id};
    use shoal_protocol::message::LogRecord;

    use super::super::store::Store;
    use super::*;

    fn entry(term: u64, index: u64, meant_for: u64, record: LogRecord) -> Entry {
        let proposal = Proposal { term: Term(meant_for), record };
        Entry { log_id: log_id(term, index), payload: EntryPayload::Normal(proposal) }
    }

    #[tokio::test]
    async fn a_record_applies_only_in_its_term_and_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let me = shoal_protocol::ids::PeerId([1; 32]);
        let mut machine =
            Store::open(folder.path(), me, Step(0), &BTreeSet::new()).expect("opened").machine;
        let entries = vec![
            entry(3, 0, 3, LogRecord::Term(Term(3))),
            entry(5, 1, 3, LogRecord::Term(Term(4))),
            entry(5, 2, 5, LogRecord::Term(Term(2))),
            entry(5, 3, 5, LogRecord::Term(Term(5))),
        ];
        let outcomes = machine.apply(entries).await.expect("applied");
        assert!(matches!(
            outcomes[..],
            [Outcome::Applied, Outcome::Stale, Outcome::Refused(_), Outcome::Applied]
        ));
        assert_eq!(machine.history().term, Term(5));
        assert_eq!(machine.applied(), Some(log_id(5, 3)));
    }
}
