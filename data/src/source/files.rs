//! Finds the files of sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use shoal_protocol::inside;

use super::SourceError;
use super::compressed::{Bounded, Counted, MOST_RATIO, RatioExceeded, WINDOW_LOG};
use super::glob;
use super::split::Split;

/// Buffer between a file and its reader, in bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// The mark before a text in UTF-8, which is no part of it.
pub(super) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Files of JSON that describe a folder and have no rows.
const DESCRIPTIONS: [&str; 4] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// Refuses a file that begins as one in UTF-16.
pub(super) fn refuse_encoding(path: &Path, beginning: &[u8]) -> Result<(), SourceError> {
    let marked = beginning.starts_with(&[0xff, 0xfe]) || beginning.starts_with(&[0xfe, 0xff]);
    let has_zeros = beginning.first_chunk::<4>().is_some_and(|bytes| {
        let zeros = bytes.map(|byte| byte == 0);
        zeros == [true, false, true, false] || zeros == [false, true, false, true]
    });
    match marked || has_zeros {
        true => Err(SourceError::Encoding { path: path.to_owned() }),
        false => Ok(()),
    }
}

/// How a file holds rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    /// The whole file is a document.
    Text,
    /// Each line is a row of JSON.
    Lines,
    /// A Parquet table.
    Parquet,
}

/// The compression of a whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not compressed.
    None,
    /// gzip, also of several members.
    Gzip,
    /// Zstandard, also of several frames.
    Zstd,
}

/// A file with rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// The file.
    pub path: PathBuf,
    /// How it holds rows.
    pub container: Container,
    /// Its compression.
    pub compression: Compression,
    /// Its size.
    pub bytes: u64,
}

impl SourceFile {
    /// Describes a file by its name.
    fn of(path: &Path) -> Result<Option<Self>, SourceError> {
        let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
        let name = name.unwrap_or_default();
        let (stem, compression) = if let Some(stem) = name.strip_suffix(".gz") {
            (stem, Compression::Gzip)
        } else if let Some(stem) = name.strip_suffix(".zst") {
            (stem, Compression::Zstd)
        } else {
            (name.as_str(), Compression::None)
        };
        let ends = |endings: &[&str]| endings.iter().any(|ending| stem.ends_with(ending));
        let container = if ends(&[".txt", ".md"]) {
            Container::Text
        } else if ends(&[".jsonl", ".ndjson", ".json-lines", ".json"]) {
            Container::Lines
        } else if ends(&[".parquet"]) && compression == Compression::None {
            Container::Parquet
        } else {
            return Ok(None);
        };
        let bytes = fs::metadata(path).map_err(read_error(path))?.len();
        Ok(Some(Self { path: path.to_owned(), container, compression, bytes }))
    }

    /// Opens the file and decompresses it.
    pub(super) fn reader(&self, counter: &Arc<AtomicU64>) -> Result<Box<dyn Read>, SourceError> {
        let file = fs::File::open(&self.path).map_err(read_error(&self.path))?;
        let file = BufReader::with_capacity(BUFFER_BYTES, file);
        let packed = Arc::new(AtomicU64::new(0));
        let file = Counted { inner: file, of_file: packed.clone(), of_all: counter.clone() };
        let unpacked: Box<dyn Read> = match self.compression {
            Compression::None => return Ok(Box::new(file)),
            Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(file)),
            Compression::Zstd => {
                let error = || read_error(&self.path);
                let mut decoder = zstd::stream::read::Decoder::new(file).map_err(error())?;
                decoder.window_log_max(WINDOW_LOG).map_err(error())?;
                Box::new(decoder)
            }
        };
        Ok(Box::new(Bounded { inner: unpacked, packed, unpacked: 0 }))
    }
}

/// Adds the path to an error of the file system.
pub(super) fn read_error(path: &Path) -> impl FnOnce(io::Error) -> SourceError {
    let path = path.to_owned();
    move |source| match source.get_ref().is_some_and(|error| error.is::<RatioExceeded>()) {
        true => SourceError::Ratio { path, most: MOST_RATIO },
        false => SourceError::Read { path, source },
    }
}

/// The files of sources.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The files to read, in order.
    pub files: Vec<SourceFile>,
    /// The split that is taken of a folder that has several.
    pub split: Option<Split>,
    /// Files of other splits, which are left out, by split.
    pub left_out: BTreeMap<String, u64>,
}

/// The files of `sources`, in order. Of a folder with splits it is those of `split`, or of `train`. A source is a file, a folder, or a pattern with `*`, `?`,
/// `[...]` or `**`.
///
/// Files of a folder or pattern are in the byte order of their paths; hidden ones and those of
/// unknown kinds are left out. A folder with tables (JSON lines or Parquet) yields only these: its
/// texts describe them.
///
/// A link in a folder or behind a pattern is followed to a file of the same folder. One that leads out
/// of the folder is refused: the folder may be a download, and its author does not choose what is read
/// here. A link that is itself the source is followed anywhere.
///
/// # Errors
/// If a source cannot be read, is of no known kind, has no file, or has not the split.
pub fn find(sources: &[String], split: Option<&Split>) -> Result<Found, SourceError> {
    let mut all = Found::default();
    for source in sources {
        let path = Path::new(source);
        if path.is_dir() {
            let mut found = describe(path, &walk(path)?)?;
            if found.iter().any(|file| file.container != Container::Text) {
                found.retain(|file| file.container != Container::Text);
            }
            if found.is_empty() {
                return Err(SourceError::NoFile(source.clone()));
            }
            all.take(path, found, split)?;
        } else if glob::is_pattern(source) && !path.exists() {
            let folder = glob::fixed_folder(source);
            let mut paths = walk(&folder)?;
            let wanted = glob::Paths::matching(source);
            paths.retain(|path| wanted.has(&path.to_string_lossy()));
            let found = describe(&folder, &paths)?;
            if found.is_empty() {
                return Err(SourceError::NoFile(source.clone()));
            }
            all.files.extend(found);
        } else {
            fs::metadata(path).map_err(read_error(path))?;
            let file = SourceFile::of(path)?;
            all.files.push(file.ok_or_else(|| SourceError::Kind { path: path.to_owned() })?);
        }
    }
    Ok(all)
}

impl Found {
    /// Takes the files of a folder that belong to a split.
    fn take(
        &mut self,
        folder: &Path,
        found: Vec<SourceFile>,
        split: Option<&Split>,
    ) -> Result<(), SourceError> {
        let of =
            |file: &SourceFile| Split::of(file.path.strip_prefix(folder).unwrap_or(&file.path));
        let splits: BTreeSet<Option<Split>> = found.iter().map(of).collect();
        let chosen = match split {
            Some(Split::All) => None,
            Some(split) => Some(Some(*split)),
            None if splits.len() < 2 => None,
            None if splits.contains(&Some(Split::Train)) => Some(Some(Split::Train)),
            // Other files than those of a named split are to train on, if there are any.
            None => Some(None),
        };
        let Some(chosen) = chosen else {
            self.files.extend(found);
            return Ok(());
        };
        if !splits.contains(&chosen) {
            let names = splits.into_iter().map(|split| split.map_or("unnamed", Split::name));
            return Err(SourceError::NoSplit {
                folder: folder.to_owned(),
                split: chosen.map_or("train", Split::name),
                found: names.collect::<Vec<_>>().join(", "),
            });
        }
        self.split = chosen.or(self.split);
        for file in found {
            match of(&file) {
                own if own == chosen => self.files.push(file),
                own => {
                    let name = own.map_or("unnamed", Split::name).to_owned();
                    *self.left_out.entry(name).or_default() += 1;
                }
            }
        }
        Ok(())
    }
}

/// Describes the files of a folder that are of a known kind.
fn describe(folder: &Path, paths: &[PathBuf]) -> Result<Vec<SourceFile>, SourceError> {
    let mut files = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default();
        if DESCRIPTIONS.iter().any(|own| name == *own) {
            continue;
        }
        if let Some(file) = SourceFile::of(path)? {
            refuse_outside(folder, path)?;
            files.push(file);
        }
    }
    Ok(files)
}

/// Refuses a file of a folder that is a link to a file elsewhere.
fn refuse_outside(folder: &Path, path: &Path) -> Result<(), SourceError> {
    if !fs::symlink_metadata(path).map_err(read_error(path))?.is_symlink() {
        return Ok(());
    }
    let target = fs::canonicalize(path).map_err(read_error(path))?;
    let root = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let root = fs::canonicalize(root).map_err(read_error(root))?;
    if inside::holds(&root, &target) {
        return Ok(());
    }
    Err(SourceError::Link { path: path.to_owned(), target, folder: root })
}

/// The files under a folder in the byte order of their paths, without hidden ones.
fn walk(folder: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).map_err(read_error(&folder))? {
            let entry = entry.map_err(read_error(&folder))?;
            let kind = entry.file_type().map_err(read_error(&folder))?;
            let path = match folder.as_os_str().is_empty() || folder.as_os_str() == "." {
                true => PathBuf::from(entry.file_name()),
                false => entry.path(),
            };
            // A symbolic link is followed to a file but not to a folder, so that there is no cycle.
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
            } else if kind.is_dir() {
                pending.push(path);
            } else if path.is_file() {
                files.push(path);
            }
        }
    }
    files.sort_by(|one, other| {
        one.as_os_str().as_encoded_bytes().cmp(other.as_os_str().as_encoded_bytes())
    });
    Ok(files)
}
