//! The index of prepared data.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::limits;
use shoal_protocol::manifest::{Dtype, TokenWidth};

use super::INDEX_FILE;
use super::layout::Layout;
use super::stream::Stream;
use crate::pack::{Counts, Packing};
use crate::template::SOURCE_BYTES;

/// The version of the format that this crate reads and writes.
pub const FORMAT: u32 = 1;

/// Most shards of one list.
const MAX_SHARDS: usize = 1 << 18;
/// Longest row.
const MAX_CONTEXT: u32 = 1 << 24;
/// Largest vocabulary.
const MAX_VOCABULARY: u32 = 1 << 24;
/// Largest shard, in bytes.
const MAX_SHARD_BYTES: u64 = 1 << 40;

/// Why an index cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    /// The file cannot be read.
    #[error("{path}: {source}; name a folder that `shoal data prepare` has finished", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// More bytes than an index has.
    #[error("the index has more than {} bytes: fetch it again", limits::DATA_INDEX.0)]
    TooLarge,
    /// The bytes are not an index.
    #[error("not an index of prepared data: {0}; fetch it again")]
    Json(#[from] serde_json::Error),
    /// A version that this program does not know.
    #[error(
        "the index has format {found}, this program reads {FORMAT}: prepare the data again, or use another version of shoal"
    )]
    Format {
        /// The version found.
        found: u32,
    },
    /// A value that contradicts another or is out of range.
    #[error("the index is invalid: {0}; fetch it again")]
    Invalid(String),
}

/// One shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// BLAKE3 hash of the shard's bytes, which is also its name.
    pub hash: ContentHash,
    /// Rows of the shard.
    pub rows: u64,
    /// Labels that are targets.
    pub targets: u64,
    /// Labels that are context only.
    pub masked: u64,
    /// Labels that are padding.
    pub padded: u64,
}

impl ShardEntry {
    /// The labels of the shard, by class.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        Counts { targets: self.targets, masked: self.masked, padded: self.padded }
    }
}

/// The sums of a list of shards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Totals {
    /// Rows.
    pub rows: u64,
    /// Labels that are targets.
    pub targets: u64,
    /// Labels that are context only.
    pub masked: u64,
    /// Labels that are padding.
    pub padded: u64,
}

impl Totals {
    /// The sums of these shards.
    #[must_use]
    pub fn of(shards: &[ShardEntry]) -> Self {
        let mut counts = Counts::default();
        let mut rows = 0u64;
        for shard in shards {
            rows = rows.saturating_add(shard.rows);
            counts.add(&shard.counts());
        }
        let Counts { targets, masked, padded } = counts;
        Self { rows, targets, masked, padded }
    }
}

/// The documents that the data was made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Documents {
    /// Documents in the training shards.
    pub train: u64,
    /// Documents in the held-out shards.
    pub held_out: u64,
    /// Documents without text, which were skipped.
    pub empty: u64,
    /// Documents of both lists from which nothing is learnt: none of their tokens is a target.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub without_target: u64,
}

const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The base whose log-probabilities follow the rows of pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Hash of the base's index.
    pub base: ContentHash,
    /// Number format in which its passes were computed.
    pub dtype: Dtype,
    /// Hash of the index of the same data without log-probabilities.
    pub data: ContentHash,
}

/// The description of prepared data: `index.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Version of the format: [`FORMAT`].
    pub format: u32,
    /// Inputs of a row, N; a row has N + 1 tokens.
    pub context: u32,
    /// Size of a stored token: u16 if the vocabulary fits, else u32.
    pub token_width: TokenWidth,
    /// Token ids are below this number: the size of the model's vocabulary.
    pub vocabulary: u32,
    /// BLAKE3 hash of `tokenizer.json`.
    pub tokenizer: ContentHash,
    /// The token that ends a document; `None` if the tokenizer has none.
    pub eos: Option<u32>,
    /// The token that fills rows.
    pub pad: u32,
    /// The way in which documents were put into rows.
    pub packing: Packing,
    /// Rows of every shard but the last of each list.
    pub rows_per_shard: u64,
    /// Shards to train on.
    pub train: Vec<ShardEntry>,
    /// Shards that are never trained on.
    pub held_out: Vec<ShardEntry>,
    /// Sums of the training shards.
    pub train_totals: Totals,
    /// Sums of the held-out shards.
    pub held_out_totals: Totals,
    /// The documents that the data was made of.
    pub documents: Documents,
    /// The source of the chat template that the documents were written with, if it is not the one of the
    /// model: a model that learnt from this data is used with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// The base whose log-probabilities the rows have; only rows of pairs have some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// Where the rows come from, if a run makes them as it reads them. The training shards are then files of a
    /// repository: each has the same number of rows, and a name in place of a hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
}

impl Index {
    /// Decodes and validates the bytes of an index. Only the bytes that [`Index::bytes`] returns
    /// are accepted, so that an index has one hash.
    ///
    /// # Errors
    /// If the bytes are too many, not an index, of another format, or contradict themselves.
    pub fn parse(bytes: &[u8]) -> Result<Self, IndexError> {
        if bytes.len() as u64 > limits::DATA_INDEX.0 {
            return Err(IndexError::TooLarge);
        }
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let Version { format } = serde_json::from_slice(bytes)?;
        if format != FORMAT {
            return Err(IndexError::Format { found: format });
        }
        let index: Self = serde_json::from_slice(bytes)?;
        index.validate()?;
        if index.bytes() != bytes {
            let reason = "it is not formatted as shoal writes it".to_owned();
            return Err(IndexError::Invalid(reason));
        }
        Ok(index)
    }

    /// Reads the index of a folder.
    ///
    /// # Errors
    /// If the file cannot be read, or like [`Index::parse`].
    pub fn read(folder: &Path) -> Result<Self, IndexError> {
        let path = folder.join(INDEX_FILE);
        let size = fs::metadata(&path).map(|found| found.len());
        if size.as_ref().is_ok_and(|size| *size > limits::DATA_INDEX.0) {
            return Err(IndexError::TooLarge);
        }
        let bytes = fs::read(&path).map_err(|source| IndexError::Read { path, source })?;
        Self::parse(&bytes)
    }

    /// The bytes of the index's file.
    ///
    /// # Panics
    /// Never: an index has only text keys.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self).expect("it has only text keys");
        bytes.push(b'\n');
        bytes
    }

    /// The name of the data: the BLAKE3 hash of the file's bytes.
    #[must_use]
    pub fn hash(&self) -> ContentHash {
        ContentHash::of(&self.bytes())
    }

    /// The place of a training shard whose rows are made of a repository's file; `None` of any other shard.
    #[must_use]
    pub fn streamed(&self, entry: &ShardEntry) -> Option<usize> {
        self.stream.as_ref()?;
        self.train.iter().position(|one| one == entry)
    }

    /// The size and encoding of rows.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        Layout {
            context: self.context,
            width: self.token_width,
            vocabulary: self.vocabulary,
            has_reference: self.reference.is_some(),
        }
    }

    fn validate(&self) -> Result<(), IndexError> {
        let range = |key: &str, value: u64, most: u64| {
            if (1..=most).contains(&value) {
                return Ok(());
            }
            Err(IndexError::Invalid(format!("{key} = {value} is not between 1 and {most}")))
        };
        range("context", self.context.into(), MAX_CONTEXT.into())?;
        range("vocabulary", self.vocabulary.into(), MAX_VOCABULARY.into())?;
        let most_rows = MAX_SHARD_BYTES / self.layout().row_bytes() as u64;
        range("rows_per_shard", self.rows_per_shard, most_rows.max(1))?;
        range("the number of training shards", self.train.len() as u64, MAX_SHARDS as u64)?;
        if self.held_out.len() > MAX_SHARDS {
            return Err(IndexError::Invalid(format!("it has more than {MAX_SHARDS} shards")));
        }
        let template = self.chat_template.as_ref().map_or(1, |source| source.len() as u64);
        range("the bytes of chat_template", template, SOURCE_BYTES)?;
        if self.reference.is_some() && self.packing != Packing::Pairs {
            let reason = "only rows of pairs have log-probabilities of a base".to_owned();
            return Err(IndexError::Invalid(reason));
        }
        if self.token_width != Layout::width_of(self.vocabulary) {
            let reason = format!("a vocabulary of {} has another width", self.vocabulary);
            return Err(IndexError::Invalid(reason));
        }
        for token in self.eos.iter().chain([&self.pad]) {
            if *token >= self.vocabulary {
                let reason = format!("token {token} is outside the vocabulary");
                return Err(IndexError::Invalid(reason));
            }
        }
        if let Some(problem) = self.stream.as_ref().and_then(|stream| stream.problem(self)) {
            return Err(IndexError::Invalid(problem));
        }
        for (list, totals) in
            [(&self.train, self.train_totals), (&self.held_out, self.held_out_totals)]
        {
            self.validate_list(list)?;
            if Totals::of(list) != totals {
                let reason = "the totals are not the sums of the shards".to_owned();
                return Err(IndexError::Invalid(reason));
            }
        }
        Ok(())
    }

    fn validate_list(&self, list: &[ShardEntry]) -> Result<(), IndexError> {
        for (place, shard) in list.iter().enumerate() {
            let last = place + 1 == list.len();
            let invalid = |reason: &str| IndexError::Invalid(format!("shard {place} {reason}"));
            if shard.rows == 0 || shard.rows > self.rows_per_shard {
                return Err(invalid("has no rows, or more than rows_per_shard"));
            }
            if shard.rows < self.rows_per_shard && !last {
                return Err(invalid("has fewer rows than rows_per_shard and is not the last"));
            }
            if shard.counts().labels() != shard.rows.checked_mul(self.context.into()) {
                return Err(invalid("has other labels than its rows"));
            }
        }
        Ok(())
    }
}
