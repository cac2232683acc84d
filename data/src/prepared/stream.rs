//! Where the rows of streamed data come from: a part of its index.

use std::path::{Component, Path};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::ContentHash;

use super::index::{Index, ShardEntry};
use crate::document::TrainOn;
use crate::source::Format;
use crate::template::{Date, TRAINED_FILE};

/// The files of a model's folder that say how its tokenizer and its chat template work.
pub const TOKENIZER_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    TRAINED_FILE,
];

/// The largest file of a tokenizer.
const LARGEST_TOKENIZER_FILE: u64 = 256 << 20;

/// Parts in a million.
pub(crate) const MILLION: u64 = 1_000_000;

/// Where the rows of streamed data come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// The repository at a commit, as `hf:datasets/OWNER/NAME@COMMIT`.
    pub origin: String,
    /// The file of each training shard.
    pub files: Vec<StreamedFile>,
    /// The files of the tokenizer.
    pub tokenizer: Vec<TokenizerFile>,
    /// Kind of the rows.
    pub format: String,
    /// Targets in chats and prompts.
    pub train_on: String,
    /// The date that the chat template sees as today.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// Most bytes of a line of JSON.
    pub line_bytes: u64,
    /// Documents of the first file that are held out, in a million.
    pub held_out_per_million: u64,
}

/// A file of the repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamedFile {
    /// The path in the repository.
    pub path: String,
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256.
    pub sha256: ContentHash,
}

/// A file of the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerFile {
    /// The file's name.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
    /// BLAKE3 hash.
    pub hash: ContentHash,
}

impl Stream {
    /// What is wrong with it as part of this index.
    pub(crate) fn problem(&self, index: &Index) -> Option<String> {
        let is_inside = |path: &str| {
            let mut parts = Path::new(path).components().peekable();
            parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
        };
        if self.files.len() != index.train.len() {
            return Some("stream.files is not one file for each training shard".to_owned());
        }
        if let Some(file) = self.files.iter().find(|file| !is_inside(&file.path)) {
            return Some(format!(
                "stream.files has {:?}, which is no path in a repository",
                file.path
            ));
        }
        let is_known = |file: &TokenizerFile| {
            TOKENIZER_FILES.contains(&&*file.name) && file.bytes <= LARGEST_TOKENIZER_FILE
        };
        if let Some(file) = self.tokenizer.iter().find(|file| !is_known(file)) {
            return Some(format!("stream.tokenizer has {:?}, which is no file of one", file.name));
        }
        if self.held_out_per_million >= MILLION {
            return Some("stream.held_out_per_million is not below a million".to_owned());
        }
        let named = |(place, shard): (usize, &ShardEntry)| shard.hash == self.name_of(index, place);
        if !index.train.iter().enumerate().all(named) {
            return Some("a training shard has not the name of its file and settings".to_owned());
        }
        self.settings().err()
    }

    /// The name of the shard of a file: a hash of all that its rows follow from, as long as rows are made in this way.
    ///
    /// # Panics
    /// If there is no such file.
    pub(crate) fn name_of(&self, index: &Index, place: usize) -> ContentHash {
        let held_out = if place == 0 { self.held_out_per_million } else { 0 };
        let settings = (&self.format, &self.train_on, &self.date, self.line_bytes, held_out);
        let rows =
            (index.context, index.vocabulary, index.packing.to_string(), index.rows_per_shard);
        let tokenizer = (index.tokenizer, &self.tokenizer, &index.chat_template);
        let all = (self.files[place].sha256, settings, rows, tokenizer);
        let text = serde_json::to_vec(&all).expect("it has only text keys");
        blake3::Hasher::new_derive_key("shoal streamed shard v1").update(&text).finalize().into()
    }

    /// Format, targets and date.
    pub(crate) fn settings(&self) -> Result<(Format, TrainOn, Option<Date>), String> {
        let date = self.date.as_deref().map(Date::from_str).transpose();
        Ok((
            self.format.parse().map_err(|error| format!("stream.format: {error}"))?,
            self.train_on.parse().map_err(|error| format!("stream.train_on: {error}"))?,
            date.map_err(|error| format!("stream.date: {error}"))?,
        ))
    }
}
