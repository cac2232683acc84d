//! Prepares data: sources become a folder of shards with an index.
//!
//! The folder has `shards/`, and while the work is unfinished `unfinished/` with the shards that
//! grow and the file `state`. Each time a shard is complete the state is saved; a later run with
//! the same arguments goes on from there, and its result is the same as that of an uninterrupted
//! run. The index is written last, under a temporary name, and renamed.

mod held_out;
mod options;
mod pipeline;
mod state;

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::thread;

use shoal_protocol::ids::ContentHash;

use crate::document::{Document, DocumentError, Encoder};
use crate::pack::{Packer, Packing, Row, pair_of};
use crate::prepared::{
    Documents, FORMAT, INDEX_FILE, Index, Layout, SHARDS_FOLDER, ShardWriter, Totals, WriteError,
    write_index,
};
use crate::source::{ReadOptions, RowKind, SourceError, SourceFile, detect, find};
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{TextTokenizer, TokenizerError};

pub use held_out::{FEWEST, default_held_out};
pub use options::PrepareOptions;
use pipeline::{Encoded, EncodedBatch, Input};
pub use state::{LeftOut, Notes};
use state::{Place, Saved, SavedList};

/// Name of the folder of unfinished work.
pub const UNFINISHED_FOLDER: &str = "unfinished";

/// Why data cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// No source is given.
    #[error("no sources: name files, folders or patterns to prepare")]
    NoSource,
    /// An option outside its range.
    #[error("--{name} {value} is out of range: it must be {range}")]
    Option {
        /// The option.
        name: &'static str,
        /// The value.
        value: String,
        /// The range.
        range: &'static str,
    },
    /// The model's tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A source cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A row cannot become a document.
    #[error("{path}, row {row}: {source}", path = path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The line or row, from 1.
        row: u64,
        /// The error of the row.
        source: DocumentError,
    },
    /// Every row is empty.
    #[error("the sources have no text: all {0} documents are empty; name other sources")]
    Empty(u64),
    /// Every pair is left out.
    #[error(
        "no pair is left: {long} are longer than a row of {context} tokens, which takes both sequences, {same} have \
         equal completions, and {without_target} have one without a target; raise --context, or name other sources"
    )]
    NoPairs {
        /// Pairs that are longer than a row.
        long: u64,
        /// Pairs of equal completions.
        same: u64,
        /// Pairs with a completion without a target.
        without_target: u64,
        /// Tokens of a row.
        context: u32,
    },
    /// No training document has a label.
    #[error(
        "no training document has a target: {hint}use --train-on all, a smaller --held-out, or longer documents"
    )]
    NoTargets {
        /// What the chats without a target have in common.
        hint: String,
    },
    /// The folder holds finished data.
    #[error("{folder} holds prepared data: name another folder, or remove it", folder = folder.display())]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder holds unfinished data of other arguments.
    #[error(
        "{folder} was begun with {name} {before}, not {now}: repeat the first arguments, or remove the folder", folder = folder.display()
    )]
    Differs {
        /// The argument.
        name: String,
        /// Its value at the beginning.
        before: String,
        /// Its value now.
        now: String,
        /// The folder of unfinished work.
        folder: PathBuf,
    },
    /// Another process prepares data in the folder.
    #[error("{folder} is in use by another process: wait for it, or name another folder", folder = folder.display())]
    Busy {
        /// The folder of unfinished work.
        folder: PathBuf,
    },
    /// The state of an interrupted run is damaged.
    #[error("{folder} is damaged: remove the folder and prepare again", folder = folder.display())]
    Damaged {
        /// The folder of unfinished work.
        folder: PathBuf,
    },
    /// A file of the data's folder cannot be read.
    #[error("{path}: {source}; mend it, or name another folder", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// A file of the data's folder cannot be written.
    #[error("{0}; make room or mend it and run again: complete shards are kept")]
    Write(#[from] WriteError),
    /// The caller ended the work.
    #[error("interrupted: run again with the same arguments to go on")]
    Interrupted,
}

/// The progress of a preparation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the sources that have been read, before decompression.
    pub bytes_read: u64,
    /// Bytes of all sources.
    pub bytes_total: u64,
    /// Documents so far, of this run and those that it goes on from.
    pub documents: u64,
    /// Tokens so far.
    pub tokens: u64,
    /// Complete shards so far.
    pub shards: u64,
}

/// Prepares data in the folder `out`, and returns its index. Calls `progress` after each batch of
/// rows and each complete shard; if it breaks, the work ends and can be resumed.
///
/// # Errors
/// If the arguments, a source, the tokenizer, the template or a row is invalid, a file cannot be
/// written, or `progress` breaks.
pub fn prepare(
    options: &PrepareOptions,
    out: &Path,
    progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Index, PrepareError> {
    Ok(prepare_noting(options, out, progress)?.0)
}

/// As [`prepare`]; also returns what is worth a word about the data.
///
/// # Errors
/// The errors of [`prepare`].
pub fn prepare_noting(
    options: &PrepareOptions,
    out: &Path,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<(Index, Notes), PrepareError> {
    options.check()?;
    if out.join(INDEX_FILE).exists() {
        return Err(PrepareError::Exists { folder: out.to_owned() });
    }
    let read = ReadOptions { line_bytes: options.line_bytes, ..ReadOptions::default() };
    let files = find(&options.sources, options.split.as_ref())?.files;
    let kind = detect(&files, options.format, &read)?;
    let options = &options.clone().of_rows(kind)?;
    let (encoder, arguments) = set_up(options, &files, kind)?;
    let mut work = Work::begin(options, out, &encoder, arguments)?;

    let bytes_total = files.iter().map(|file| file.bytes).sum();
    let mut report = |work: &Work| {
        let bytes_read = read.bytes_read.load(Ordering::Relaxed);
        let documents = work.documents.train + work.documents.held_out;
        let (tokens, shards) = (work.tokens, work.shards());
        match progress(Progress { bytes_read, bytes_total, documents, tokens, shards }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(PrepareError::Interrupted),
        }
    };
    let cores = || thread::available_parallelism().map_or(1, NonZero::get);
    let threads = options.threads.map_or_else(cores, NonZero::get);
    let input = Input { files: &files, kind, options: &read, encoder: &encoder };
    thread::scope(|scope| {
        for EncodedBatch { documents, failure } in
            pipeline::start(scope, &input, work.place, threads)
        {
            for document in documents {
                if work.take(document)? {
                    work.save()?;
                    report(&work)?;
                }
            }
            failure.map_or(Ok(()), Err)?;
            report(&work)?;
        }
        Ok::<(), PrepareError>(())
    })?;
    work.finish(&encoder)
}

/// Loads the tokenizer and the template, and lists everything that determines the result.
fn set_up(
    options: &PrepareOptions,
    files: &[SourceFile],
    kind: RowKind,
) -> Result<(Encoder, BTreeMap<String, String>), PrepareError> {
    let tokenizer = TextTokenizer::load(&options.base)?;
    let mut arguments = options.arguments();
    arguments.insert("tokenizer".to_owned(), tokenizer.hash().to_string());
    arguments.insert("vocabulary".to_owned(), tokenizer.vocabulary().to_string());
    arguments.insert("eos".to_owned(), format!("{:?}", tokenizer.eos()));
    arguments.insert("pad".to_owned(), format!("{:?}", tokenizer.pad()));
    arguments.insert("special tokens".to_owned(), format!("{:?}", tokenizer.special()));
    let found = match kind {
        RowKind::Text => None,
        RowKind::Messages
        | RowKind::Prompt
        | RowKind::Pair
        | RowKind::Conversations
        | RowKind::Instruction => {
            match ChatTemplate::find(&options.base, options.chat_template.as_deref()) {
                // A prompt may be a text.
                Err(TemplateError::Missing { .. })
                    if matches!(kind, RowKind::Prompt | RowKind::Pair) =>
                {
                    None
                }
                found => Some(found?),
            }
        }
    };
    let mut template = None;
    if let Some(source) = found {
        let hash = ContentHash::of(source.as_bytes()).to_string();
        arguments.insert("chat template".to_owned(), hash);
        template = Some(ChatTemplate::new(&source, tokenizer.special(), options.date)?);
    }
    let mut list = blake3::Hasher::new();
    for file in files {
        list.update(file.path.as_os_str().as_encoded_bytes());
        list.update(&[0]);
        list.update(&file.bytes.to_le_bytes());
    }
    let sources = format!("{} files, {}", files.len(), list.finalize().to_hex());
    arguments.insert("sources".to_owned(), sources);
    Ok((Encoder::new(tokenizer, template, options.train_on), arguments))
}

/// One list of rows in the making.
struct List {
    packer: Packer,
    writer: ShardWriter,
}

/// The work between the documents and the index.
struct Work<'a> {
    options: &'a PrepareOptions,
    out: PathBuf,
    unfinished: PathBuf,
    /// Held until the work ends.
    lock: File,
    arguments: BTreeMap<String, String>,
    layout: Layout,
    rows_per_shard: u64,
    pad: u32,
    place: Place,
    documents: Documents,
    tokens: u64,
    train: List,
    held_out: List,
    rows: Vec<Row>,
    notes: Notes,
}

impl<'a> Work<'a> {
    /// Begins at the first row, or at the state of an interrupted run.
    fn begin(
        options: &'a PrepareOptions,
        out: &Path,
        encoder: &Encoder,
        arguments: BTreeMap<String, String>,
    ) -> Result<Self, PrepareError> {
        let unfinished = out.join(UNFINISHED_FOLDER);
        for folder in [&unfinished, &out.join(SHARDS_FOLDER)] {
            fs::create_dir_all(folder).map_err(WriteError::at(folder))?;
        }
        let lock = lock(&unfinished)?;
        let tokenizer = encoder.tokenizer();
        let vocabulary = tokenizer.vocabulary();
        let width = Layout::width_of(vocabulary);
        let layout = Layout { context: options.context, width, vocabulary, has_reference: false };
        let rows_per_shard = (options.shard_bytes / layout.row_bytes() as u64).max(1);
        let pad = tokenizer.pad().or(tokenizer.eos()).unwrap_or(0);
        let saved = Saved::read(&unfinished)?;
        if let Some(saved) = &saved {
            saved.check(&arguments, &unfinished)?;
        }
        let (place, counts, lists) = saved.map_or_else(Default::default, |saved| {
            let lists = Some((saved.train, saved.held_out));
            (saved.place, (saved.documents, saved.tokens, saved.notes), lists)
        });
        let (documents, tokens, notes) = counts;
        let new = || SavedList {
            shards: Default::default(),
            packer: Packer::new(options.pack, options.context, pad),
        };
        let (train, held_out) = lists.unwrap_or_else(|| (new(), new()));
        let list = |name, saved: SavedList| {
            let (folders, shape) = ((out, unfinished.as_path()), (layout, rows_per_shard));
            let mut writer = ShardWriter::resume(folders, name, shape, saved.shards)?;
            writer.publish()?;
            Ok::<_, WriteError>(List { packer: saved.packer, writer })
        };
        let (train, held_out) = (list("train", train)?, list("held-out", held_out)?);
        let (out, rows) = (out.to_owned(), Vec::new());
        Ok(Self {
            options,
            out,
            unfinished,
            lock,
            arguments,
            layout,
            rows_per_shard,
            pad,
            place,
            documents,
            tokens,
            train,
            held_out,
            rows,
            notes,
        })
    }

    /// Complete shards so far.
    fn shards(&self) -> u64 {
        let finished = |list: &List| list.writer.state().finished.len() as u64;
        finished(&self.train) + finished(&self.held_out)
    }

    /// Packs and writes a document. Returns whether a shard became complete.
    fn take(&mut self, encoded: Encoded) -> Result<bool, WriteError> {
        let Encoded { document, number, starts, place, roles, odd } = encoded;
        self.place = place;
        odd.into_iter().for_each(|odd| self.notes.add(odd));
        let Some(document) = document else {
            self.documents.empty += 1;
            return Ok(false);
        };
        if self.options.pack == Packing::Pairs && self.leaves_out(&document) {
            return Ok(false);
        }
        self.tokens += document.tokens.len() as u64;
        if starts && document.has_no_target() {
            self.documents.without_target += 1;
            let room = pipeline::MOST_ROLES.saturating_sub(self.notes.untaught.len());
            self.notes.untaught.extend(roles.into_iter().take(room));
        }
        self.notes.cut += u64::from(document.tokens.len() > self.options.context as usize + 1);
        let (list, count) = if self.options.holds_out(number) {
            (&mut self.held_out, &mut self.documents.held_out)
        } else {
            (&mut self.train, &mut self.documents.train)
        };
        *count += u64::from(starts);
        list.packer.push(&document, &mut self.rows);
        list.write(&mut self.rows)
    }

    /// Whether a pair is left out, which is counted.
    fn leaves_out(&mut self, pair: &Document) -> bool {
        let left_out = &mut self.notes.pairs;
        let count = match pair_of(&pair.classes) {
            _ if pair.tokens.len() > self.options.context as usize + 1 => &mut left_out.long,
            None => &mut left_out.without_target,
            Some([chosen, rejected])
                if pair.tokens[chosen.clone()] == pair.tokens[rejected.clone()] =>
            {
                &mut left_out.same
            }
            Some(_) => return false,
        };
        *count += 1;
        true
    }

    /// Saves the state, then moves complete shards to their final names.
    fn save(&mut self) -> Result<(), WriteError> {
        for list in [&mut self.train, &mut self.held_out] {
            list.writer.sync()?;
        }
        let list = |list: &List| SavedList {
            shards: list.writer.state().clone(),
            packer: list.packer.clone(),
        };
        let saved = Saved {
            arguments: self.arguments.clone(),
            place: self.place,
            documents: self.documents,
            tokens: self.tokens,
            notes: self.notes.clone(),
            train: list(&self.train),
            held_out: list(&self.held_out),
        };
        saved.write(&self.unfinished)?;
        self.train.writer.publish()?;
        self.held_out.writer.publish()
    }

    /// Writes the remaining rows and the index.
    fn finish(mut self, encoder: &Encoder) -> Result<(Index, Notes), PrepareError> {
        let Documents { train, held_out, empty, .. } = self.documents;
        if train + held_out == 0 {
            let LeftOut { long, same, without_target } = self.notes.pairs;
            if long + same + without_target > 0 {
                let context = self.options.context;
                return Err(PrepareError::NoPairs { long, same, without_target, context });
            }
            return Err(PrepareError::Empty(empty));
        }
        for list in [&mut self.train, &mut self.held_out] {
            list.packer.finish(&mut self.rows);
            list.write(&mut self.rows)?;
            list.writer.close()?;
        }
        let [train, held_out] =
            [&self.train, &self.held_out].map(|list| list.writer.state().finished.clone());
        let train_totals = Totals::of(&train);
        if train_totals.targets == 0 {
            let roles: Vec<&str> = self.notes.untaught.iter().map(String::as_str).collect();
            let hint = match roles.is_empty() {
                true => String::new(),
                false => format!(
                    "the chats have the roles {}, and the chat template marks nothing that they say: \
                     rename them to those of the template (user and assistant), or give another with \
                     --chat-template FILE; or else ",
                    roles.join(", ")
                ),
            };
            return Err(PrepareError::NoTargets { hint });
        }
        self.save()?;
        let tokenizer = encoder.tokenizer();
        let index = Index {
            format: FORMAT,
            context: self.layout.context,
            token_width: self.layout.width,
            vocabulary: self.layout.vocabulary,
            tokenizer: tokenizer.hash(),
            eos: tokenizer.eos(),
            pad: self.pad,
            packing: self.options.pack,
            rows_per_shard: self.rows_per_shard,
            train_totals,
            held_out_totals: Totals::of(&held_out),
            train,
            held_out,
            documents: self.documents,
            chat_template: self.foreign_template(encoder),
            reference: None,
            stream: None,
        };
        self.end(&index)?;
        Ok((index, self.notes))
    }

    /// The source of the template that is in use, if the model has another or none.
    fn foreign_template(&self, encoder: &Encoder) -> Option<String> {
        let source = encoder.template()?.source();
        // One that cannot be read is none: the template in use is then kept.
        let own = ChatTemplate::find(&self.options.base, None).ok();
        (own.as_deref() != Some(source)).then(|| source.to_owned())
    }

    fn end(&self, index: &Index) -> Result<(), WriteError> {
        write_index(&self.out, index)?;
        fs::remove_dir_all(&self.unfinished).map_err(WriteError::at(&self.unfinished))?;
        self.lock.unlock().map_err(WriteError::at(&self.unfinished))
    }
}

/// Keeps other processes from preparing data in the same folder.
fn lock(unfinished: &Path) -> Result<File, PrepareError> {
    let path = unfinished.join("lock");
    // What the file holds stays: it may be a link, and only its lock is needed.
    let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(WriteError::at(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(PrepareError::Busy { folder: unfinished.to_owned() }),
        Err(TryLockError::Error(source)) => Err(WriteError { path, source }.into()),
    }
}

impl List {
    /// Writes rows. Returns whether a shard became complete.
    fn write(&mut self, rows: &mut Vec<Row>) -> Result<bool, WriteError> {
        let mut complete = false;
        for row in rows.drain(..) {
            complete |= self.writer.write(&row)?;
        }
        Ok(complete)
    }
}
