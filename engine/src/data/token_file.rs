//! Converts text on disk into a token file.
//!
//! A token file contains only tokens, each little-endian in the manifest's width. A second file,
//! with `.json` appended to the name, describes it: the manifest's `tokens` section.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::inside::holds;
use shoal_protocol::manifest::{TokenWidth, Tokenizer, Tokens};

use crate::data::tokenizer;

/// Why text cannot be used for training.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file system failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// A file of a folder is a link to a file elsewhere.
    #[error(
        "{path} is a link to {target}, which is not in {folder}: remove the link, or copy the file there if it is training text", path = path.display(), target = target.display(), folder = folder.display()
    )]
    Link {
        /// The link.
        path: PathBuf,
        /// The file that it leads to.
        target: PathBuf,
        /// The folder with the text.
        folder: PathBuf,
    },
    /// There is no text.
    #[error("{path} holds no text", path = path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
    },
    /// The token file differs from the one in the manifest.
    #[error("{path} is not the token file of this run: {reason}", path = path.display())]
    WrongFile {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
}

impl DataError {
    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Separator between two files of a folder.
const SEPARATOR: &[u8] = b"\n";

/// Reads the text of a file, or of all files of a folder and its subfolders in the byte order of
/// their paths, separated by newlines. Files and folders whose names start with a dot are skipped. A
/// link is followed to a file of the same folder, and refused where it leads out of it.
///
/// # Errors
/// If a file cannot be read, or there is no text.
pub fn read_text(path: &Path) -> Result<Vec<u8>, DataError> {
    let mut files = Vec::new();
    if fs::metadata(path).map_err(DataError::io(path))?.is_dir() {
        collect_files(path, &mut files)?;
        let folder = fs::canonicalize(path).map_err(DataError::io(path))?;
        for link in files.iter().filter(|file| file.is_symlink()) {
            let target = fs::canonicalize(link).map_err(DataError::io(link))?;
            if !holds(&folder, &target) {
                return Err(DataError::Link { path: link.clone(), target, folder });
            }
        }
    } else {
        files.push(path.to_owned());
    }
    let mut text = Vec::new();
    for (index, file) in files.iter().enumerate() {
        if index > 0 {
            text.extend_from_slice(SEPARATOR);
        }
        text.extend(fs::read(file).map_err(DataError::io(file))?);
    }
    if text.iter().all(u8::is_ascii_whitespace) {
        return Err(DataError::Empty { path: path.to_owned() });
    }
    Ok(text)
}

/// Adds the files under `folder` in the byte order of their paths.
fn collect_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder).map_err(DataError::io(&folder))? {
            let entry = entry.map_err(DataError::io(&folder))?;
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            let kind = entry.file_type().map_err(DataError::io(&folder))?;
            // A symbolic link is followed to a file but not to a folder, so that there is no cycle.
            if hidden {
            } else if kind.is_dir() {
                pending.push(entry.path());
            } else if entry.path().is_file() {
                files.push(entry.path());
            }
        }
    }
    files.sort_by(|one, other| {
        one.as_os_str().as_encoded_bytes().cmp(other.as_os_str().as_encoded_bytes())
    });
    Ok(())
}

/// Writes the tokens of `text` to `path`, and their description beside it.
///
/// # Errors
/// If the file system fails.
pub fn write_tokens(text: &[u8], tokenizer: Tokenizer, path: &Path) -> Result<Tokens, DataError> {
    let width = match tokenizer.vocabulary() {
        0..=0x100 => TokenWidth::U8,
        0x101..=0x1_0000 => TokenWidth::U16,
        _ => TokenWidth::U32,
    };
    let unfinished = path.with_extension("unfinished");
    // The text may be private: its tokens are for this user alone.
    let file = create_private(&unfinished)?;
    let mut file = BufWriter::new(file);
    let mut hasher = blake3::Hasher::new();
    let mut count = 0;
    for block in text.chunks(1 << 16) {
        for token in tokenizer::encode(tokenizer, block) {
            let bytes = &token.to_le_bytes()[..width.size()];
            hasher.update(bytes);
            file.write_all(bytes).map_err(DataError::io(&unfinished))?;
            count += 1;
        }
    }
    file.flush().map_err(DataError::io(&unfinished))?;
    let tokens = Tokens { hash: hasher.finalize().into(), count, width, tokenizer };
    let description = description_path(path);
    let text = serde_json::to_string_pretty(&tokens).expect("it has only string keys");
    let mut described = create_private(&description)?;
    described.write_all((text + "\n").as_bytes()).map_err(DataError::io(&description))?;
    fs::rename(&unfinished, path).map_err(DataError::io(path))?;
    Ok(tokens)
}

/// Creates a file that only its owner can read.
fn create_private(path: &Path) -> Result<File, DataError> {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path);
    file.map_err(DataError::io(path))
}

fn description_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".json");
    PathBuf::from(name)
}

/// A token file in memory.
#[derive(Debug)]
pub struct TokenFile {
    map: Mmap,
    tokens: Tokens,
}

impl TokenFile {
    /// Opens the file that a manifest names and checks its hash.
    ///
    /// # Errors
    /// If it cannot be read or differs.
    pub fn open(path: &Path, tokens: &Tokens) -> Result<Self, DataError> {
        let wrong = |reason| DataError::WrongFile { path: path.to_owned(), reason };
        let file = File::open(path).map_err(DataError::io(path))?;
        let found = file.metadata().map_err(DataError::io(path))?.len();
        let expected = tokens.count.checked_mul(tokens.width.size() as u64);
        if expected != Some(found) || found == 0 {
            return Err(wrong(format!(
                "it has {found} bytes instead of {} tokens of {}",
                tokens.count,
                tokens.width.size()
            )));
        }
        // SAFETY: token files are written elsewhere and renamed into place, never changed.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io(path))?;
        if ContentHash::of(&map) != tokens.hash {
            return Err(wrong("it has another hash".to_owned()));
        }
        Ok(Self { map, tokens: tokens.clone() })
    }

    /// Reads the description of a token file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn describe(path: &Path) -> Result<Tokens, DataError> {
        let beside = description_path(path);
        let text = fs::read_to_string(&beside).map_err(DataError::io(&beside))?;
        serde_json::from_str(&text)
            .map_err(|error| DataError::WrongFile { path: beside, reason: error.to_string() })
    }

    /// The description of the file.
    #[must_use]
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// The whole file, to be sent to a peer.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Reads `count` tokens from `start`.
    ///
    /// # Panics
    /// If the file ends before.
    pub(crate) fn read(&self, start: u64, count: u64) -> impl Iterator<Item = u32> + '_ {
        let width = self.tokens.width.size();
        let start = start as usize * width;
        let bytes = &self.map[start..start + count as usize * width];
        bytes.chunks_exact(width).map(|token| {
            let mut word = [0; 4];
            word[..token.len()].copy_from_slice(token);
            u32::from_le_bytes(word)
        })
    }
}
