//! The files of a data directory that peers fetch from each other.
//!
//! A part of a checkpoint has a *label* beside it, a hidden file with the hash of its bytes. A token
//! file has its hash in its name, and a whole checkpoint has the hashes in its description.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shoal_engine::Checkpoint;
use shoal_protocol::ids::{ContentHash, RunId, Stage, Step};
use shoal_protocol::limits;
use shoal_protocol::net::transport::PARTIAL_SUFFIX;

use super::resume::{folders_in, paths_in, version_folders, version_of};

/// The end of a label's name.
const LABEL: &str = ".label";

/// The run and hash of the file beside the label, which may not be there yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Label {
    pub(crate) run: RunId,
    pub(crate) hash: ContentHash,
}

impl Label {
    /// Writes the label beside a file of this name.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn write(&self, folder: &Path, name: &str) -> io::Result<()> {
        let file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&file, self)?;
        file.persist(label_of(&folder.join(name)))?;
        Ok(())
    }

    /// Reads the label of a file; `None` where it has no readable one.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let text = File::open(label_of(path)).ok()?;
        let text = io::Read::take(text, limits::MANIFEST.0);
        serde_json::from_reader(text).ok()
    }
}

fn label_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{LABEL}"))
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(crate) enum Content {
    /// A token file.
    Text,
    /// A file of a stage, or of a whole checkpoint.
    Checkpoint {
        /// The run, if it is known.
        run: Option<RunId>,
        /// The version of the weights.
        version: Step,
        /// `None` for a file about all stages.
        stage: Option<Stage>,
    },
}

/// The completeness of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// Complete.
    Whole,
    /// Partly here: a fetch was interrupted and can go on.
    Partial,
    /// Listed, and not here.
    Missing,
}

/// A file of a data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Chunk {
    /// The expected hash, if it is written down.
    pub(crate) hash: Option<ContentHash>,
    /// Bytes on the disk.
    pub(crate) bytes: u64,
    pub(crate) state: State,
    #[serde(flatten)]
    pub(crate) content: Content,
    pub(crate) path: PathBuf,
}

impl Chunk {
    /// Describes the file at a path, without its hash.
    fn at(path: &Path, content: Content) -> Self {
        let partial = is_partial(path);
        let (state, bytes) = match std::fs::metadata(path) {
            // A file being fetched is sparse.
            Ok(about) if partial => (State::Partial, about.len().min(about.blocks() * 512)),
            Ok(about) => (State::Whole, about.len()),
            Err(_) => (State::Missing, 0),
        };
        Self { hash: None, bytes, state, content, path: path.to_owned() }
    }
}

/// Returns whether a file is being fetched.
pub(crate) fn is_partial(path: &Path) -> bool {
    path.to_string_lossy().ends_with(PARTIAL_SUFFIX)
}

/// Returns whether a file is complete, and no label.
pub(crate) fn is_whole(path: &Path) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    !hidden && !is_partial(path) && path.is_file()
}

/// Hashes a file's bytes.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn hash(path: &Path) -> io::Result<ContentHash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize().into())
}

/// Lists all files: token files, parts of checkpoints and whole checkpoints.
pub(crate) fn list(data_dir: &Path) -> Vec<Chunk> {
    let mut all = texts(&data_dir.join("tokens"));
    all.extend(version_folders(data_dir).flat_map(|folder| parts(&folder)));
    for run in folders_in(&data_dir.join("runs")) {
        let kept = folders_in(&run.join("checkpoints"));
        all.extend(kept.into_iter().chain([run.join("checkpoint")]).flat_map(|one| whole(&one)));
    }
    all.sort_by(|one, other| one.path.cmp(&other.path));
    all
}

fn texts(folder: &Path) -> Vec<Chunk> {
    let chunk = |path: PathBuf| {
        let name = path.file_name()?.to_str()?;
        let hash = name.trim_end_matches(PARTIAL_SUFFIX).strip_suffix(".tokens")?.parse().ok();
        Some(Chunk { hash, ..Chunk::at(&path, Content::Text) })
    };
    paths_in(folder).into_iter().filter_map(chunk).collect()
}

/// Lists the parts in a version's folder.
fn parts(folder: &Path) -> Vec<Chunk> {
    let Some(version) = version_of(folder) else { return Vec::new() };
    let chunk = |path: PathBuf| {
        if !is_whole(&path) && !is_partial(&path) {
            return None;
        }
        let name = path.file_name()?.to_str()?.trim_end_matches(PARTIAL_SUFFIX);
        let label = Label::read(&path.with_file_name(name));
        let run = label.as_ref().map(|label| label.run);
        let content = Content::Checkpoint { run, version, stage: stage_of(name) };
        Some(Chunk { hash: label.map(|label| label.hash), ..Chunk::at(&path, content) })
    };
    paths_in(folder).into_iter().filter_map(chunk).collect()
}

/// Lists the files of a whole checkpoint; none where there is no checkpoint.
fn whole(folder: &Path) -> Vec<Chunk> {
    let Ok(checkpoint) = Checkpoint::open(folder) else { return Vec::new() };
    let (run, version) = (Some(checkpoint.run()), checkpoint.step());
    let chunk = |name: &str, hash| {
        let content = Content::Checkpoint { run, version, stage: stage_of(name) };
        Chunk { hash: Some(hash), ..Chunk::at(&folder.join(name), content) }
    };
    checkpoint.files().iter().map(|file| chunk(&file.name, file.hash)).collect()
}

/// Returns the stage in a file's name, where stages count from 1.
fn stage_of(name: &str) -> Option<Stage> {
    let (_, rest) = name.split_once('-')?;
    let (number, _) = rest.split_once("-of-")?;
    number.parse::<u16>().ok()?.checked_sub(1).map(Stage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_listed_with_their_labels() {
        let home = tempfile::tempdir().expect("a folder");
        let (hash, run) = (ContentHash::of(b"bytes"), RunId::of(b"a run"));
        let folder = home.path().join(format!("kept/{run}/30"));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::create_dir_all(home.path().join("tokens")).expect("a folder");
        let name = "model-00002-of-00004.safetensors";
        Label { run, hash }.write(&folder, name).expect("written");
        std::fs::write(folder.join(name), b"bytes").expect("written");
        std::fs::write(folder.join("optimizer-00002-of-00004.safetensors.part"), b"by")
            .expect("written");
        std::fs::write(home.path().join(format!("tokens/{hash}.tokens")), b"bytes")
            .expect("written");
        let found = list(home.path());
        let told: Vec<_> = found.iter().map(|chunk| (chunk.hash, chunk.state)).collect();
        assert_eq!(
            told,
            [(Some(hash), State::Whole), (None, State::Partial), (Some(hash), State::Whole)]
        );
        let content =
            Content::Checkpoint { run: Some(run), version: Step(30), stage: Some(Stage(1)) };
        assert_eq!(found[0].content, content);
        assert_eq!(found[2].content, Content::Text);
        assert_eq!(super::hash(&found[0].path).ok(), Some(hash));
    }
}
