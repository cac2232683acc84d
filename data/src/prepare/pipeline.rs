//! Threads that read rows and encode them, and hand over the documents in order.
//!
//! One thread reads and cuts the rows into batches. Batch `i` goes to worker `i % T`, through a
//! bounded queue, and comes back through the queue of that worker, so that the receiver takes the
//! results in the order of the batches without sorting. An error is a result like any other: the
//! first in the order of the sources is the one that is reported, whatever the number of threads.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;

use super::PrepareError;
use super::state::Place;
use crate::document::{Document, Encoder, OddRole, ROLE_CHARACTERS};
use crate::source::{self, RawContent, RawRow, ReadOptions, Row, RowKind, SourceFile};

/// Bytes of a batch, about.
const BATCH_BYTES: usize = 1 << 18;
/// Most rows of a batch.
const BATCH_ROWS: usize = 1 << 10;
/// Most roles that are named.
pub(super) const MOST_ROLES: usize = 8;
/// Batches that wait before and behind each worker.
const QUEUE: usize = 2;

/// A row on its way to a worker.
struct Job {
    row: RawRow,
    place: Place,
}

/// A batch of rows, and the error that ended the reading.
struct Batch {
    file: usize,
    jobs: Vec<Job>,
    failure: Option<PrepareError>,
}

/// A row that has become a document.
pub(super) struct Encoded {
    /// The tokens; `None` if the row is empty.
    pub(super) document: Option<Document>,
    /// Number of the document.
    pub(super) number: u64,
    /// Whether the document begins with this row.
    pub(super) starts: bool,
    /// The place behind the row.
    pub(super) place: Place,
    /// The roles of a chat that has no target.
    pub(super) roles: Vec<String>,
    /// Messages whose role the chat template does not know.
    pub(super) odd: Vec<OddRole>,
}

/// The documents of a batch, and the error behind them.
pub(super) struct EncodedBatch {
    pub(super) documents: Vec<Encoded>,
    pub(super) failure: Option<PrepareError>,
}

/// The input of the threads.
pub(super) struct Input<'a> {
    pub(super) files: &'a [SourceFile],
    pub(super) kind: RowKind,
    pub(super) options: &'a ReadOptions,
    pub(super) encoder: &'a Encoder,
}

/// Starts the threads, and returns the batches in order. Dropping the iterator ends the threads.
pub(super) fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    input: &'scope Input<'scope>,
    from: Place,
    threads: usize,
) -> impl Iterator<Item = EncodedBatch> + use<'scope> {
    let mut jobs = Vec::new();
    let mut results: Vec<Receiver<EncodedBatch>> = Vec::new();
    for _ in 0..threads.max(1) {
        let (job, work) = sync_channel(QUEUE);
        let (done, result) = sync_channel(QUEUE);
        scope.spawn(move || encode(input, &work, &done));
        jobs.push(job);
        results.push(result);
    }
    scope.spawn(move || read(input, from, &jobs));
    let mut next = 0;
    std::iter::from_fn(move || {
        let batch = results[next].recv().ok()?;
        next = (next + 1) % results.len();
        Some(batch)
    })
}

/// Reads all rows from a place on.
fn read(input: &Input, from: Place, workers: &[SyncSender<Batch>]) {
    let mut next = (0..workers.len()).cycle();
    let mut send =
        |batch: Batch| next.next().is_some_and(|worker| workers[worker].send(batch).is_ok());
    let mut documents = from.documents;
    for number in from.file..input.files.len() {
        let mut batch = Batch { file: number, jobs: Vec::new(), failure: None };
        let mut size = 0;
        let skip = if number == from.file { from.rows } else { 0 };
        let rows = source::open(&input.files[number], input.kind, skip, input.options);
        let rows = rows.unwrap_or_else(|error| Box::new(std::iter::once(Err(error))));
        for row in rows {
            let row = match row {
                Ok(row) => row,
                Err(error) => {
                    batch.failure = Some(error.into());
                    send(batch);
                    return;
                }
            };
            size += row.size();
            let whole = !matches!(row.content, RawContent::Block { ends: false, .. });
            documents += u64::from(whole);
            let place = Place { file: number, rows: row.number, documents };
            batch.jobs.push(Job { row, place });
            if size >= BATCH_BYTES || batch.jobs.len() >= BATCH_ROWS {
                size = 0;
                let empty = Batch { file: number, jobs: Vec::new(), failure: None };
                if !send(std::mem::replace(&mut batch, empty)) {
                    return;
                }
            }
        }
        if !batch.jobs.is_empty() && !send(batch) {
            return;
        }
    }
}

/// Encodes batches until there are no more, or the receiver of the results is gone.
fn encode(input: &Input, work: &Receiver<Batch>, done: &SyncSender<EncodedBatch>) {
    // A regular expression has room for one thread without a lock: each worker has its own.
    let encoder = input.encoder.clone();
    while let Ok(batch) = work.recv() {
        let Batch { file, jobs, mut failure } = batch;
        let mut documents = Vec::with_capacity(jobs.len());
        for job in jobs {
            match encode_row((input, &encoder), file, job) {
                Ok(document) => documents.push(document),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        if done.send(EncodedBatch { documents, failure }).is_err() {
            return;
        }
    }
}

fn encode_row(
    (input, encoder): (&Input, &Encoder),
    file: usize,
    job: Job,
) -> Result<Encoded, PrepareError> {
    let path = &input.files[file].path;
    let Job { row, place } = job;
    let line = row.number;
    let row = Row::parse(row, input.kind, path)?;
    let (starts, ends) = match &row {
        Row::Text { starts, ends, .. } => (*starts, *ends),
        Row::Messages { .. } | Row::Prompt { .. } | Row::PromptMessages { .. } | Row::Pair(_) => {
            (true, true)
        }
    };
    let number = if ends { place.documents - 1 } else { place.documents };
    let (document, odd) = if row.is_empty() {
        (None, Vec::new())
    } else {
        let encoded = encoder.encode_noting(&row);
        let error = |source| PrepareError::Row { path: path.clone(), row: line, source };
        let (document, odd) = encoded.map_err(error)?;
        (Some(document), odd)
    };
    let untaught = document.as_ref().is_some_and(Document::has_no_target);
    let roles = if untaught { roles(&row) } else { Vec::new() };
    Ok(Encoded { document, number, starts, place, roles, odd })
}

/// The roles of a chat, shortened.
fn roles(row: &Row) -> Vec<String> {
    let Row::Messages { messages, .. } = row else { return Vec::new() };
    let texts = messages.iter().filter_map(|message| message.get("role")?.as_text());
    let mut roles: Vec<String> = Vec::new();
    for role in texts {
        let role: String = role.chars().take(ROLE_CHARACTERS).collect();
        if roles.len() < MOST_ROLES && !roles.contains(&role) {
            roles.push(role);
        }
    }
    roles
}
