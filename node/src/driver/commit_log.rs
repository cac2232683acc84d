//! What the coordinator may not forget, on the disk before it is said.
//!
//! A file of records, each `length (u32) | first 8 bytes of its BLAKE3 | bytes`, little-endian,
//! flushed to the disk one by one.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use shoal_protocol::message::LogRecord;
use shoal_protocol::wire;
use tokio::sync::mpsc;

/// Records on their way to the disk; the coordinator has at most a few at a time.
const QUEUE: usize = 64;

/// A record that could not be written: the run cannot go on, since it could be forgotten.
#[derive(Debug, thiserror::Error)]
#[error("the commit log {path} cannot be written: {error}; free some space and start again",
        path = path.display())]
pub(crate) struct LogError {
    path: PathBuf,
    error: io::Error,
}

/// Writes records on a thread of its own and gives each back once it is on the disk.
#[derive(Debug)]
pub(crate) struct CommitLog {
    records: mpsc::Sender<LogRecord>,
    written: mpsc::Receiver<Result<LogRecord, LogError>>,
}

impl CommitLog {
    /// Opens a log to be appended to.
    pub(crate) fn open(path: &Path) -> Result<Self, LogError> {
        let path = path.to_owned();
        let failed = |error| LogError { path: path.clone(), error };
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
        let (records, to_write) = mpsc::channel(QUEUE);
        let (done, written) = mpsc::channel(QUEUE);
        std::thread::Builder::new()
            .name("commit-log".into())
            .spawn({
                let path = path.clone();
                move || write_all(file, &path, to_write, &done)
            })
            .map_err(failed)?;
        Ok(Self { records, written })
    }

    /// Begins to write a record.
    pub(crate) fn append(&self, record: LogRecord) {
        self.records.try_send(record).expect("the coordinator waits for its records");
    }

    /// The next record that is down, in the order in which they were given.
    pub(crate) async fn written(&mut self) -> Result<LogRecord, LogError> {
        self.written.recv().await.expect("the log's thread ends after its owner")
    }
}

/// Ends when the log is dropped, or after the first failure.
fn write_all(
    mut file: File,
    path: &Path,
    mut records: mpsc::Receiver<LogRecord>,
    done: &mpsc::Sender<Result<LogRecord, LogError>>,
) {
    while let Some(record) = records.blocking_recv() {
        let outcome = write(&mut file, &record)
            .map(|()| record)
            .map_err(|error| LogError { path: path.to_owned(), error });
        let failed = outcome.is_err();
        if done.blocking_send(outcome).is_err() || failed {
            return;
        }
    }
}

fn write(file: &mut File, record: &LogRecord) -> io::Result<()> {
    let body = wire::encode(record).map_err(io::Error::other)?;
    let mut bytes = Vec::with_capacity(body.len() + 12);
    bytes.extend_from_slice(&u32::try_from(body.len()).map_err(io::Error::other)?.to_le_bytes());
    bytes.extend_from_slice(&blake3::hash(&body).as_bytes()[..8]);
    bytes.extend_from_slice(&body);
    file.write_all(&bytes)?;
    file.sync_data()
}
