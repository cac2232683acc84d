//! The log's entries and votes for Raft, in memory and in a file.
//!
//! When the file holds more obsolete bytes than [`WASTE`], a file without them replaces it.

use std::fmt::Debug;
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard};

use openraft::storage::{LogFlushed, RaftLogStorage};
use openraft::{LogState, RaftLogReader};
use shoal_formats::anchor::encoding::{self, Item};
use shoal_formats::anchor::journal::{self, Event, Held};
use shoal_formats::anchor::types::{Entries, Entry, LogId, StorageError, Types, Vote, disk_error};
use shoal_protocol::ids::PeerId;
use tokio::sync::oneshot;

use super::disk::{Disk, Done};

/// Obsolete bytes of the file that trigger its replacement.
const WASTE: u64 = 1 << 20;

/// Bytes of entries in one message to another anchor, unless a single entry is larger.
const BATCH: u64 = 64 << 10;

/// The log of one anchor.
#[derive(Clone)]
pub(super) struct Log {
    anchor: PeerId,
    held: Arc<Mutex<Held>>,
    disk: Disk,
}

impl Log {
    pub(super) fn new(anchor: PeerId, held: Held, disk: Disk) -> Self {
        Self { anchor, held: Arc::new(Mutex::new(held)), disk }
    }

    /// The number of entries after a log identifier, and their bytes.
    pub(super) fn after(&self, last: Option<LogId>) -> (usize, u64) {
        let next = last.map_or(0, |last| last.index + 1);
        let held = self.held();
        let after = held.entries.range(next..).map(|(_, kept)| kept.size);
        after.fold((0, 0), |(count, size), more| (count + 1, size + more))
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("nothing panics while it holds the log")
    }

    /// Writes the events of the latest change to `held`. The caller holds its lock, which keeps the
    /// file in order.
    fn write(&self, held: &mut Held, mut events: Vec<Event>, done: Done) {
        if held.file_size > held.entries_size + WASTE {
            let bytes = journal::pieces(&held.events(self.anchor));
            held.file_size = bytes.len() as u64;
            held.agreed_unwritten = false;
            return self.disk.replace_log(bytes, done);
        }
        if std::mem::take(&mut held.agreed_unwritten) {
            events.extend(held.agreed.map(|id| Event::Agreed(id.into())));
        }
        let bytes = journal::pieces(&events);
        held.file_size += bytes.len() as u64;
        self.disk.append(bytes, done);
    }

    async fn written(
        &self,
        change: impl FnOnce(&mut Held) -> Vec<Event>,
    ) -> Result<(), StorageError> {
        let (done, written) = oneshot::channel();
        {
            let mut held = self.held();
            let events = change(&mut held);
            let done = Box::new(move |outcome| drop(done.send(outcome)));
            self.write(&mut held, events, done);
        }
        let closed = |_| io::Error::other("the anchor's log is closed");
        written.await.map_err(closed).flatten().map_err(disk_error)
    }
}

impl RaftLogReader<Types> for Log {
    async fn try_get_log_entries<R: RangeBounds<u64> + Clone + Debug + Send>(
        &mut self,
        range: R,
    ) -> Result<Vec<Entry>, StorageError> {
        Ok(self.held().entries.range(range).map(|(_, kept)| kept.entry.clone()).collect())
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<Entry>, StorageError> {
        let mut size = 0;
        let held = self.held();
        let fitting = held.entries.range(start..end).take_while(|(index, kept)| {
            size += kept.size;
            **index == start || size <= BATCH
        });
        let entries: Vec<Entry> = fitting.map(|(_, kept)| kept.entry.clone()).collect();
        // Raft relies on at least one entry.
        if entries.is_empty() && start < end {
            return Err(disk_error(format!("the log lacks entry {start}")));
        }
        Ok(entries)
    }
}

impl RaftLogStorage<Types> for Log {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<Types>, StorageError> {
        let held = self.held();
        let last = held.entries.last_key_value().map(|(_, kept)| kept.entry.log_id);
        Ok(LogState { last_purged_log_id: held.purged, last_log_id: last.or(held.purged) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), StorageError> {
        self.written(|held| {
            held.vote = Some(*vote);
            vec![Event::Voted((*vote).into())]
        })
        .await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, StorageError> {
        Ok(self.held().vote)
    }

    /// Not worth a flush of its own: the leader sends the commit index again.
    async fn save_committed(&mut self, agreed: Option<LogId>) -> Result<(), StorageError> {
        let mut held = self.held();
        held.agreed = agreed;
        held.agreed_unwritten = true;
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, StorageError> {
        Ok(self.held().agreed)
    }

    async fn append<I: Entries>(
        &mut self,
        entries: I,
        flushed: LogFlushed<Types>,
    ) -> Result<(), StorageError>
    where
        I::IntoIter: Send,
    {
        let mut held = self.held();
        let mut events = Vec::new();
        for entry in entries {
            let item = Item::from(&entry);
            let size = encoding::encode(&item).len() as u64;
            held.add(entry, size);
            events.push(Event::Added(item));
        }
        let done = Box::new(move |outcome| flushed.log_io_completed(outcome));
        self.write(&mut held, events, done);
        Ok(())
    }

    async fn truncate(&mut self, since: LogId) -> Result<(), StorageError> {
        if self.held().agreed.is_some_and(|agreed| agreed.index >= since.index) {
            return Err(disk_error(format!(
                "entry {since} is committed and must not be truncated"
            )));
        }
        self.written(|held| {
            held.cut_from(since.index);
            vec![Event::CutFrom(since.index)]
        })
        .await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), StorageError> {
        self.written(|held| {
            held.purge(upto);
            vec![Event::Purged(upto.into())]
        })
        .await
    }
}
