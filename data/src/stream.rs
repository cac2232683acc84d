//! Streamed data: rows are made while a run reads them, of one file of a repository at a time.
//!
//! The index of streamed data lists a repository's files in place of shards, each with its SHA-256. A host of the first
//! stage downloads a file when its rows are due, makes a shard of it, and removes both once the run is past them. Which
//! rows a step reads must not depend on what the files turn out to hold, so each file gives the same number of rows: as
//! many as the smallest is expected to have, by the rows of the first one. What a file has beyond that is not read; of
//! one that has fewer, rows are read again.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use shoal_protocol::ids::ContentHash;

use crate::pack::Packing;
use crate::prepare::{PrepareError, PrepareOptions, prepare};
use crate::prepared::{
    Index, MILLION, Shard, ShardEntry, ShardError, Stream, StreamedFile, TOKENIZER_FILES,
    TokenizerFile, Totals, WriteError, rename, write_index,
};
use crate::source::Split;

/// Name of the folder with the tokenizer's files in that of streamed data.
pub const TOKENIZER_FOLDER: &str = "tokenizer";

/// How much of the rows that are expected of the smallest file each file gives: files differ a little.
const EXPECTED: u64 = 950_000;

/// A shard of one file is not cut into several.
const SHARD_BYTES: u64 = 1 << 34;

/// Why data cannot be streamed.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// A file cannot become rows.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The rows of a file cannot be read again.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A file cannot be written.
    #[error("{0}; make room or mend it")]
    Write(#[from] WriteError),
    /// A file of the tokenizer's folder cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// Pairs, whose log-probabilities belong to finished data.
    #[error("rows with `chosen` and `rejected` cannot be streamed: leave --stream out")]
    Pairs,
    /// One file.
    #[error("{origin} has {count} files to read, and streaming needs two: leave --stream out")]
    FewFiles {
        /// The repository.
        origin: String,
        /// Its files.
        count: usize,
    },
    /// A file whose rows do not fill one.
    #[error(
        "{path} has {rows} rows of {context} tokens, too few to stream by: leave --stream out, or lower --context"
    )]
    FewRows {
        /// The file.
        path: String,
        /// Its rows.
        rows: u64,
        /// Tokens of a row.
        context: u32,
    },
    /// More rows are held out than a shard has.
    #[error("{held_out} rows are held out, and a file has {rows}: give a smaller --held-out")]
    HeldOut {
        /// Rows that are held out.
        held_out: u64,
        /// Rows of a shard.
        rows: u64,
    },
    /// The file becomes other rows than those of the data.
    #[error("{path} becomes rows of another kind than those of the data: {what} differs")]
    Differs {
        /// The file.
        path: String,
        /// What differs.
        what: &'static str,
    },
}

/// What to stream, and how.
#[derive(Debug)]
pub struct StreamOptions {
    /// As for data that is prepared whole, without sources.
    pub prepare: PrepareOptions,
    /// The repository at a commit.
    pub origin: String,
    /// Its files, in order.
    pub files: Vec<StreamedFile>,
}

/// Writes streamed data to the folder `out`: the index, the rows that are held out, and the tokenizer's files.
/// `first` is the first file on this machine. Returns the index and the files that are left out because they are less
/// than half as large as most.
///
/// # Errors
/// If the first file cannot become rows, there are too few files or rows, or a file cannot be written.
pub fn begin_stream(
    options: &StreamOptions,
    first: &Path,
    out: &Path,
) -> Result<(Index, Vec<String>), StreamError> {
    let (files, left_out) = of_like_size(&options.files);
    let origin = options.origin.clone();
    if files.len() < 2 {
        return Err(StreamError::FewFiles { origin, count: files.len() });
    }
    let held_out_per_million = (options.prepare.held_out * MILLION as f64) as u64;
    let stream = Stream {
        origin,
        files: files.clone(),
        tokenizer: copy_tokenizer(&options.prepare.base, &out.join(TOKENIZER_FOLDER))?,
        format: options.prepare.format.to_string(),
        train_on: options.prepare.train_on.to_string(),
        date: options.prepare.date.map(|date| date.to_string()),
        line_bytes: options.prepare.line_bytes as u64,
        held_out_per_million,
    };
    let scratch = out.join("first");
    let whole = prepare_file(&stream, (0, first), &options.prepare, &scratch)?;
    if whole.packing == Packing::Pairs {
        return Err(StreamError::Pairs);
    }
    let path = || files[0].path.clone();
    let smallest = files.iter().map(|file| file.bytes).min().unwrap_or(0);
    let expected = u128::from(whole.train_totals.rows) * u128::from(smallest);
    let expected = expected / u128::from(files[0].bytes.max(1));
    let rows = (expected * u128::from(EXPECTED) / u128::from(MILLION)) as u64;
    let rows = rows.min(SHARD_BYTES / whole.layout().row_bytes() as u64);
    if rows == 0 {
        let (rows, context) = (whole.train_totals.rows, whole.context);
        return Err(StreamError::FewRows { path: path(), rows, context });
    }
    let held_out = whole.held_out_totals.rows;
    if held_out > rows {
        return Err(StreamError::HeldOut { held_out, rows });
    }
    for entry in &whole.held_out {
        let to = Shard::path_in(out, entry);
        let folder = to.parent().unwrap_or(out);
        fs::create_dir_all(folder).map_err(WriteError::at(folder))?;
        rename(&Shard::path_in(&scratch, entry), &to)?;
    }
    fs::remove_dir_all(&scratch).map_err(WriteError::at(&scratch))?;
    // What each label is shows when the rows are made.
    let targets = rows.saturating_mul(whole.context.into());
    let entry = ShardEntry { hash: whole.tokenizer, rows, targets, masked: 0, padded: 0 };
    let train = vec![entry; files.len()];
    let train_totals = Totals::of(&train);
    let mut index = Index { rows_per_shard: rows, train, train_totals, ..whole };
    for place in 0..files.len() {
        index.train[place].hash = stream.name_of(&index, place);
    }
    index.stream = Some(stream);
    write_index(out, &index)?;
    Ok((index, left_out))
}

/// The files that are at least half as large as the one in the middle, and the paths of the others.
fn of_like_size(files: &[StreamedFile]) -> (Vec<StreamedFile>, Vec<String>) {
    let mut sizes: Vec<u64> = files.iter().map(|file| file.bytes).collect();
    sizes.sort_unstable();
    let middle = sizes.get(sizes.len() / 2).copied().unwrap_or(0);
    let (kept, left_out): (Vec<_>, Vec<_>) =
        files.iter().cloned().partition(|file| file.bytes >= middle.div_ceil(2));
    (kept, left_out.into_iter().map(|file| file.path).collect())
}

/// Copies what a model's folder has of a tokenizer's files.
fn copy_tokenizer(base: &Path, out: &Path) -> Result<Vec<TokenizerFile>, StreamError> {
    fs::create_dir_all(out).map_err(WriteError::at(out))?;
    let mut copied = Vec::new();
    for name in TOKENIZER_FILES {
        let path = base.join(name);
        if !path.exists() {
            continue;
        }
        let bytes = fs::read(&path).map_err(|source| StreamError::Tokenizer { path, source })?;
        let to = out.join(name);
        fs::write(&to, &bytes).map_err(WriteError::at(&to))?;
        let (length, hash) = (bytes.len() as u64, ContentHash::of(&bytes));
        copied.push(TokenizerFile { name: name.to_owned(), bytes: length, hash });
    }
    Ok(copied)
}

/// Makes all rows of a file, in a folder of its own.
fn prepare_file(
    stream: &Stream,
    (place, source): (usize, &Path),
    like: &PrepareOptions,
    out: &Path,
) -> Result<Index, StreamError> {
    if out.exists() {
        fs::remove_dir_all(out).map_err(WriteError::at(out))?;
    }
    let held_out = match place {
        0 => stream.held_out_per_million as f64 / MILLION as f64,
        _ => 0.0,
    };
    let sources = vec![source.to_string_lossy().into_owned()];
    let options = PrepareOptions {
        sources,
        split: Some(Split::All),
        held_out,
        shard_bytes: SHARD_BYTES,
        ..like.clone()
    };
    Ok(prepare(&options, out, |_| ControlFlow::Continue(()))?)
}

/// Makes the shard of a file of streamed data. `source` is the file on this machine, `tokenizer` the folder with the
/// tokenizer's files, `scratch` a folder for rows on their way, and `to` the shard's path.
///
/// # Errors
/// If the file cannot become rows, becomes rows of another kind, or the shard cannot be written.
///
/// # Panics
/// If the index is not one of streamed data with such a file.
pub fn make_shard(
    index: &Index,
    (place, source): (usize, &Path),
    tokenizer: &Path,
    scratch: &Path,
    to: &Path,
) -> Result<(), StreamError> {
    let stream = index.stream.as_ref().expect("an index of streamed data");
    let (format, train_on, date) = stream.settings().expect("it was checked");
    let template = scratch.with_extension("jinja");
    if let Some(source) = &index.chat_template {
        fs::write(&template, source).map_err(WriteError::at(&template))?;
    }
    let like = PrepareOptions {
        format,
        train_on,
        date,
        pack: index.packing,
        line_bytes: stream.line_bytes as usize,
        chat_template: index.chat_template.is_some().then(|| template.clone()),
        ..PrepareOptions::new(Vec::new(), tokenizer.to_owned(), index.context)
    };
    let whole = prepare_file(stream, (place, source), &like, scratch)?;
    let path = || stream.files[place].path.clone();
    let unlike = [
        ("the tokenizer", whole.tokenizer != index.tokenizer),
        ("the vocabulary", whole.layout() != index.layout()),
        ("the packing", whole.packing != index.packing),
    ];
    if let Some((what, _)) = unlike.iter().find(|(_, differs)| *differs) {
        return Err(StreamError::Differs { path: path(), what });
    }
    let found = whole.train_totals.rows;
    if found == 0 {
        return Err(StreamError::FewRows { path: path(), rows: 0, context: index.context });
    }
    let shards =
        whole.train.iter().map(|entry| Shard::open(&Shard::path_in(scratch, entry), &whole, entry));
    let shards = shards.collect::<Result<Vec<Shard>, _>>()?;
    copy_rows(&shards, index.train[place].rows as usize * index.layout().row_bytes(), to)?;
    drop(shards);
    fs::remove_dir_all(scratch).map_err(WriteError::at(scratch))?;
    if index.chat_template.is_some() {
        fs::remove_file(&template).map_err(WriteError::at(&template))?;
    }
    Ok(())
}

/// Writes so many bytes of these shards' rows, from the first again after the last.
fn copy_rows(shards: &[Shard], mut bytes: usize, to: &Path) -> Result<(), WriteError> {
    let new = to.with_extension("new");
    let file = File::create(&new).map_err(WriteError::at(&new))?;
    let mut file = BufWriter::new(file);
    for shard in shards.iter().cycle() {
        let part = shard.bytes();
        let part = &part[..part.len().min(bytes)];
        file.write_all(part).map_err(WriteError::at(&new))?;
        bytes -= part.len();
        if bytes == 0 {
            break;
        }
    }
    let file =
        file.into_inner().map_err(|error| error.into_error()).map_err(WriteError::at(&new))?;
    file.sync_all().map_err(WriteError::at(&new))?;
    rename(&new, to)
}
