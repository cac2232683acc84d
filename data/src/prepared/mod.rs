//! Prepared data on disk: a folder with `index.json` and `shards/HASH.shard`.
//!
//! A shard is exactly `rows * row_bytes` bytes. A row has N + 1 tokens, little-endian in the
//! index's width, then `ceil((N + 1) / 4)` bytes with the classes of the tokens, two bits each, the
//! lowest bits first; spare bits are zero. Where the index names a reference, the log-probabilities of the row's chosen
//! and rejected completion follow, as little-endian f32.

mod index;
mod layout;
mod shard;
mod stream;
mod writer;

pub use index::{Documents, FORMAT, Index, IndexError, Reference, ShardEntry, Totals};
pub use layout::{Layout, RowError};
pub use shard::{Shard, ShardError};
pub(crate) use stream::MILLION;
pub use stream::{Stream, StreamedFile, TOKENIZER_FILES, TokenizerFile};
pub use writer::WriteError;
pub(crate) use writer::{ListState, ShardWriter, rename, write_index};

/// Name of the index in the folder.
pub const INDEX_FILE: &str = "index.json";

/// Name of the folder with the shards.
pub const SHARDS_FOLDER: &str = "shards";
