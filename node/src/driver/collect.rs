//! Brings the parts of a checkpoint together: each stage's files come from the peer that wrote them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use shoal_engine::{Checkpoint, CheckpointFile, EngineError, checkpoint};
use shoal_protocol::ids::{ContentHash, PeerId, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{StoredFile, StoredStage};
use shoal_protocol::net::transport::{PARTIAL_SUFFIX, Transport};

use super::chunks;
use super::home::Files;
use super::staging::Staging;

/// A checkpoint whose stages are stored here and there.
#[derive(Debug)]
pub(crate) struct Scattered {
    pub(crate) version: Step,
    /// Each stage, in order.
    pub(crate) stages: Vec<StoredStage>,
    /// The folder that it becomes.
    pub(crate) destination: PathBuf,
}

/// A whole checkpoint.
#[derive(Debug)]
pub(crate) struct Collected {
    pub(crate) directory: PathBuf,
    pub(crate) hash: ContentHash,
}

/// Fetches what is not here, adds the index, checks the whole and puts it in its place.
pub(crate) async fn collect(
    scattered: Scattered,
    manifest: Arc<Manifest>,
    files: Files,
    transport: Option<Transport>,
) -> anyhow::Result<Collected> {
    let Scattered { version, stages, destination } = scattered;
    let staging = Staging::open(&destination)
        .with_context(|| format!("a checkpoint cannot be written to {}", destination.display()))?;
    let me = transport.as_ref().map_or(PeerId([0; 32]), Transport::peer_id);
    for stored in &stages {
        obtain(stored, me, staging.folder(), &files, transport.as_ref()).await?;
    }
    let all: Vec<CheckpointFile> = stages
        .into_iter()
        .flat_map(|stored| stored.files)
        .map(|StoredFile { name, hash, size }| CheckpointFile { name, bytes: size.0, hash })
        .collect();
    let offered: Vec<(ContentHash, PathBuf)> =
        all.iter().map(|file| (file.hash, destination.join(&file.name))).collect();
    let published = tokio::task::spawn_blocking({
        let (manifest, destination) = (manifest.clone(), destination.clone());
        move || {
            let folder = staging.folder();
            checkpoint::write_index(folder, &manifest, version, &all)?;
            let whole = Checkpoint::open(folder)?;
            whole.verify()?;
            let hash = whole.hash()?;
            checkpoint::publish(folder, &destination)?;
            Ok::<_, EngineError>(hash)
        }
    });
    let hash = published.await.context("the checkpoint's writer panicked")??;
    // Whoever takes over a stage begins from here.
    for (hash, path) in offered {
        files.offer(hash, path);
    }
    Ok(Collected { directory: destination, hash })
}

/// Brings a stage's files into a folder: those that are here are linked or copied, others come from
/// those who have them.
pub(crate) async fn obtain(
    stored: &StoredStage,
    me: PeerId,
    folder: &Path,
    files: &Files,
    transport: Option<&Transport>,
) -> anyhow::Result<()> {
    // Another task may be bringing the same file here, and a third may be reading it: each puts its own
    // in the place at once. A fetch does so by itself.
    let scratch = tempfile::Builder::new()
        .prefix(".part-")
        .tempdir_in(folder)
        .with_context(|| format!("{} takes no files", folder.display()))?;
    for file in &stored.files {
        let name = checked_name(&file.name)?;
        let (part, to) = (scratch.path().join(name), folder.join(name));
        match (files.path(&file.hash), transport) {
            (Some(path), _) if path == to => continue,
            (Some(path), _) => {
                std::fs::hard_link(&path, &part)
                    .or_else(|_| std::fs::copy(&path, &part).map(|_| ()))
                    .with_context(|| format!("{} cannot be copied", path.display()))?;
            }
            // A process that died had it already.
            (None, _) if is_there(&to, file).await => continue,
            (None, Some(transport)) => {
                fetch(&stored.holders, me, file, &to, transport).await?;
                continue;
            }
            (None, None) => anyhow::bail!("{} is nowhere", file.name),
        }
        std::fs::rename(&part, &to)
            .with_context(|| format!("{} cannot be put in its place", to.display()))?;
    }
    Ok(())
}

/// Whether this very file is at a path.
async fn is_there(path: &Path, file: &StoredFile) -> bool {
    let (path, hash) = (path.to_owned(), file.hash);
    let found = tokio::task::spawn_blocking(move || chunks::hash(&path));
    matches!(found.await, Ok(Ok(found)) if found == hash)
}

/// Fetches a file from its holders. Who fetches decides whom it asks first, so that not all ask the
/// same.
async fn fetch(
    holders: &[PeerId],
    me: PeerId,
    file: &StoredFile,
    to: &Path,
    transport: &Transport,
) -> anyhow::Result<()> {
    let mut others: Vec<PeerId> = holders.iter().copied().filter(|holder| *holder != me).collect();
    anyhow::ensure!(!others.is_empty(), "nobody has {}", file.name);
    let first = usize::from(me.0[0]) % others.len();
    others.rotate_left(first);
    Ok(transport.fetch_file(&others, file.hash, file.size.0, to).await?)
}

/// A name that a peer gave must stay in the folder.
pub(crate) fn checked_name(name: &str) -> anyhow::Result<&str> {
    let plain = !name.is_empty()
        && !name.starts_with('.')
        && !name.ends_with(PARTIAL_SUFFIX)
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    anyhow::ensure!(plain, "a peer named a file {name:?}: no plain file name");
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0", "a.part"] {
            assert!(checked_name(name).is_err(), "{name:?}");
        }
        assert!(checked_name("model-00001-of-00002.safetensors").is_ok());
    }
}
