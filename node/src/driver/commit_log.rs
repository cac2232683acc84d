//! What the coordinator may not forget, on the disk before it is said.
//!
//! A file of records, each `length (u32) | first 8 bytes of its BLAKE3 | bytes`, little-endian,
//! flushed to the disk one by one. A process that dies while it writes leaves a torn last record, which
//! nobody was told of: it is cut off when the log is opened again.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use shoal_protocol::message::LogRecord;
use shoal_protocol::wire;
use tokio::sync::mpsc;

/// Records on their way to the disk; the coordinator has at most a few at a time.
const QUEUE: usize = 64;

/// Bytes before each record: its length and its check.
const HEAD: usize = 12;

/// A log that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    /// A record could not be written: the run cannot go on, since it could be forgotten.
    #[error("the commit log {path} cannot be written: {error}; free some space and start again",
            path = path.display())]
    Write {
        /// Which log.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// It cannot be read.
    #[error("the commit log {path} cannot be read: {error}", path = path.display())]
    Read {
        /// Which log.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// A record that others follow is not what was written.
    #[error("the commit log {path} is damaged at byte {at}: put back a copy of it, or start the run \
             anew with another data directory", path = path.display())]
    Damaged {
        /// Which log.
        path: PathBuf,
        /// Where the record begins.
        at: usize,
    },
}

/// Writes records on a thread of its own and gives each back once it is on the disk.
#[derive(Debug)]
pub(crate) struct CommitLog {
    records: mpsc::Sender<LogRecord>,
    written: mpsc::Receiver<Result<LogRecord, LogError>>,
}

impl CommitLog {
    /// Opens a log to be appended to, and reads what it holds.
    ///
    /// # Errors
    /// When it cannot be read or written, or is damaged.
    pub(crate) fn open(path: &Path) -> Result<(Self, Vec<LogRecord>), LogError> {
        let path = path.to_owned();
        let failed = |error| LogError::Write { path: path.clone(), error };
        let unread = |error| LogError::Read { path: path.clone(), error };
        let mut file =
            OpenOptions::new().create(true).read(true).append(true).open(&path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(unread)?;
        let (held, whole) =
            read_all(&bytes).map_err(|at| LogError::Damaged { path: path.clone(), at })?;
        if whole < bytes.len() {
            tracing::warn!(bytes = bytes.len() - whole, "a torn record is cut off the commit log");
            file.set_len(whole as u64).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        let (records, to_write) = mpsc::channel(QUEUE);
        let (done, written) = mpsc::channel(QUEUE);
        std::thread::Builder::new()
            .name("commit-log".into())
            .spawn({
                let path = path.clone();
                move || write_all(file, &path, to_write, &done)
            })
            .map_err(failed)?;
        Ok((Self { records, written }, held))
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

/// The records in these bytes and how many bytes they take up. What follows them is torn: it ends
/// before its record does. A wrong record that is whole, or has others after it, is an error: its place.
fn read_all(bytes: &[u8]) -> Result<(Vec<LogRecord>, usize), usize> {
    let mut records = Vec::new();
    let mut at = 0;
    while let Some((head, rest)) = bytes[at..].split_at_checked(HEAD) {
        let length = u32::from_le_bytes(*head.first_chunk().expect("a head has a length")) as usize;
        let Some(body) = rest.get(..length) else { break };
        let last = rest.len() == length;
        let right = blake3::hash(body).as_bytes()[..8] == head[4..];
        match wire::decode(body) {
            Ok(record) if right => records.push(record),
            // The length came to the disk before the rest did.
            _ if last => break,
            _ => return Err(at),
        }
        at += HEAD + length;
    }
    Ok((records, at))
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
            .map_err(|error| LogError::Write { path: path.to_owned(), error });
        let failed = outcome.is_err();
        if done.blocking_send(outcome).is_err() || failed {
            return;
        }
    }
}

fn write(file: &mut File, record: &LogRecord) -> io::Result<()> {
    let body = wire::encode(record).map_err(io::Error::other)?;
    let mut bytes = Vec::with_capacity(body.len() + HEAD);
    bytes.extend_from_slice(&u32::try_from(body.len()).map_err(io::Error::other)?.to_le_bytes());
    bytes.extend_from_slice(&blake3::hash(&body).as_bytes()[..8]);
    bytes.extend_from_slice(&body);
    file.write_all(&bytes)?;
    file.sync_data()
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Era, Step, Term};

    use super::*;

    fn records() -> Vec<LogRecord> {
        vec![
            LogRecord::Term(Term(1)),
            LogRecord::Rewind { era: Era(1), version: Step(5) },
            LogRecord::Term(Term(700)),
        ]
    }

    fn written() -> Vec<u8> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("commits");
        let mut file = File::create(&path).expect("made");
        for record in records() {
            write(&mut file, &record).expect("written");
        }
        std::fs::read(&path).expect("read")
    }

    #[test]
    fn a_log_cut_at_any_byte_keeps_what_was_whole() {
        let bytes = written();
        let ends: Vec<usize> =
            (0..=bytes.len()).map(|end| read_all(&bytes[..end]).expect("torn at most").1).collect();
        for (end, whole) in ends.iter().enumerate() {
            assert!(*whole <= end && read_all(&bytes[..*whole]).expect("whole").1 == *whole);
        }
        assert_eq!(ends.last(), Some(&bytes.len()));
        assert_eq!(read_all(&bytes).expect("whole").0, records());
    }

    #[test]
    fn a_changed_byte_before_the_last_record_is_damage() {
        let bytes = written();
        for place in [4, HEAD] {
            let mut changed = bytes.clone();
            changed[place] ^= 1;
            assert_eq!(read_all(&changed), Err(0));
        }
        let mut changed = bytes.clone();
        *changed.last_mut().expect("not empty") ^= 1;
        assert_eq!(read_all(&changed).expect("torn").0, records()[..2]);
    }

    #[test]
    fn an_opened_log_is_cut_and_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("commits");
        let bytes = written();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
        let (log, held) = CommitLog::open(&path).expect("torn at most");
        assert_eq!(held, records()[..2]);
        drop(log);
        let length = std::fs::metadata(&path).expect("there").len() as usize;
        assert_eq!(read_all(&bytes[..length]).expect("whole").1, length);
    }
}
