//! Adds a base's log-probabilities to prepared pairs: the rows again, with two numbers behind each.

use std::fs;
use std::path::{Path, PathBuf};

use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::Dtype;

use crate::pack::{Packing, PairLogProbs, Row};
use crate::prepare::UNFINISHED_FOLDER;
use crate::prepared::{
    INDEX_FILE, Index, IndexError, Layout, ListState, Reference, SHARDS_FOLDER, Shard, ShardEntry,
    ShardError, ShardWriter, Totals, WriteError, write_index,
};

/// Why log-probabilities cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError<E: std::error::Error + 'static> {
    /// The index cannot be used.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A shard cannot be used.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// The rows are no pairs.
    #[error(
        "{folder} holds no pairs: a reference is for rows with `chosen` and `rejected`", folder = folder.display()
    )]
    NoPairs {
        /// The folder.
        folder: PathBuf,
    },
    /// A row that is no pair.
    #[error("{path}, row {row} is no pair: prepare the data again", path = path.display())]
    NoPair {
        /// The shard.
        path: PathBuf,
        /// The row.
        row: u64,
    },
    /// The rows have log-probabilities already.
    #[error(
        "{folder} has the log-probabilities of a base already: name the data that it was made from", folder = folder.display()
    )]
    HasReference {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder holds finished data.
    #[error("{folder} holds prepared data: name another folder, or remove it", folder = folder.display())]
    Exists {
        /// The folder.
        folder: PathBuf,
    },
    /// A file cannot be written.
    #[error("{0}; make room or mend it and run again")]
    Write(#[from] WriteError),
    /// The base cannot compute a pair.
    #[error("{path}, row {row}: {source}", path = path.display())]
    Base {
        /// The shard.
        path: PathBuf,
        /// The row.
        row: u64,
        /// The error of the base.
        source: E,
    },
    /// Numbers that are none.
    #[error(
        "{path}, row {row}: the base gives its pair log-probabilities that are not finite: look for broken weights \
         with `shoal model check`", path = path.display()
    )]
    NotFinite {
        /// The shard.
        path: PathBuf,
        /// The row.
        row: u64,
    },
}

/// The log-probability of each sequence of tokens: of the tokens whose class is a target, given those before.
pub type LogProbs<'a, E> = &'a mut dyn FnMut(&Row) -> Result<[f64; 2], E>;

/// Writes the pairs in `folder` to the folder `out` with the log-probabilities of the base with this index, computed by
/// passes in `dtype`. Calls `log_probs` for each row.
///
/// # Errors
/// If the data is no pairs or damaged, the base cannot compute one, or a file cannot be written.
pub fn add_reference<E: std::error::Error + 'static>(
    folder: &Path,
    out: &Path,
    (base, dtype): (ContentHash, Dtype),
    log_probs: LogProbs<'_, E>,
) -> Result<Index, ReferenceError<E>> {
    let index = Index::read(folder)?;
    if index.packing != Packing::Pairs {
        return Err(ReferenceError::NoPairs { folder: folder.to_owned() });
    }
    if index.reference.is_some() {
        return Err(ReferenceError::HasReference { folder: folder.to_owned() });
    }
    if out.join(INDEX_FILE).exists() {
        return Err(ReferenceError::Exists { folder: out.to_owned() });
    }
    let unfinished = out.join(UNFINISHED_FOLDER);
    for folder in [&unfinished, &out.join(SHARDS_FOLDER)] {
        fs::create_dir_all(folder).map_err(WriteError::at(folder))?;
    }
    let mut copy =
        |name, list: &[ShardEntry]| copy_list((folder, out), (&index, name), list, &mut *log_probs);
    let train = copy("train", &index.train)?;
    let held_out = copy("held-out", &index.held_out)?;
    let reference = Some(Reference { base, dtype, data: index.hash() });
    let (train_totals, held_out_totals) = (Totals::of(&train), Totals::of(&held_out));
    let index = Index { train, held_out, train_totals, held_out_totals, reference, ..index };
    write_index(out, &index)?;
    fs::remove_dir_all(&unfinished).map_err(WriteError::at(&unfinished))?;
    Ok(index)
}

/// Copies the shards of a list, and returns the new ones.
fn copy_list<E: std::error::Error + 'static>(
    (folder, out): (&Path, &Path),
    (index, name): (&Index, &'static str),
    list: &[ShardEntry],
    log_probs: LogProbs<'_, E>,
) -> Result<Vec<ShardEntry>, ReferenceError<E>> {
    let layout = Layout { has_reference: true, ..index.layout() };
    let unfinished = out.join(UNFINISHED_FOLDER);
    let folders = (out, unfinished.as_path());
    let shape = (layout, index.rows_per_shard);
    let mut writer = ShardWriter::resume(folders, name, shape, ListState::default())?;
    for entry in list {
        let path = Shard::path_in(folder, entry);
        let shard = Shard::open(&path, index, entry)?;
        shard.check_hash()?;
        for number in 0..shard.rows() {
            let mut row = shard.row(number)?;
            let path = || path.clone();
            if row.pair().is_none() {
                return Err(ReferenceError::NoPair { path: path(), row: number });
            }
            let found = log_probs(&row);
            let found = found.map_err(|source| ReferenceError::Base {
                path: path(),
                row: number,
                source,
            })?;
            // A log-probability of 0 may be rounded to more. NaN stays what it is.
            let found = found.map(|number| if number > 0.0 { 0.0 } else { number as f32 });
            let reference = PairLogProbs::new(found);
            let not_finite = || ReferenceError::NotFinite { path: path(), row: number };
            row.reference = Some(reference.ok_or_else(not_finite)?);
            writer.write(&row)?;
        }
    }
    writer.close()?;
    writer.publish()?;
    Ok(writer.state().finished.clone())
}
