//! Collects the files of a checkpoint, each stage's from the peers that hold them.

use std::path::{Path, PathBuf};

use anyhow::Context;
use shoal_data::template::TRAINED_FILE;
use shoal_engine::{Checkpoint, CheckpointFile, EngineError, checkpoint};
use shoal_protocol::ids::{ContentHash, PeerId, Step};
use shoal_protocol::inside::is_plain_name;
use shoal_protocol::message::{StoredFile, StoredStage};
use shoal_protocol::net::transport::Transport;

use super::checkpoint_staging::Staging;
use super::chunks;
use super::run_files::RunFiles;
use crate::data_dir::Files;

/// A checkpoint whose stages are on several peers.
#[derive(Debug)]
pub(crate) struct Scattered {
    pub(crate) version: Step,
    /// Each stage, in order.
    pub(crate) stages: Vec<StoredStage>,
    /// The folder for the whole checkpoint.
    pub(crate) destination: PathBuf,
}

/// A whole checkpoint.
#[derive(Debug)]
pub(crate) struct Collected {
    pub(crate) directory: PathBuf,
    pub(crate) hash: ContentHash,
}

/// Fetches missing files, adds the index and the base's description, verifies the whole and publishes it.
///
/// # Errors
/// When the folder cannot be written, a file cannot be had, or the checkpoint is not whole.
pub(crate) async fn collect(
    scattered: Scattered,
    run_files: RunFiles,
) -> anyhow::Result<Collected> {
    let RunFiles { manifest, files, transport, .. } = run_files.clone();
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
    let base = run_files.obtain_base_description().await?;
    let template = run_files.obtain_chat_template().await?;
    let texts: Vec<_> = template.map(|source| (TRAINED_FILE, source)).into_iter().collect();
    let published = tokio::task::spawn_blocking({
        let (manifest, destination) = (manifest.clone(), destination.clone());
        move || {
            let folder = staging.folder();
            checkpoint::write_index(folder, &manifest, version, &all, base.as_ref(), &texts)?;
            let whole = Checkpoint::open(folder)?;
            whole.verify()?;
            let hash = whole.hash()?;
            checkpoint::publish(folder, &destination)?;
            Ok::<_, EngineError>(hash)
        }
    });
    let hash = published.await.context("the checkpoint's writer panicked")??;
    // A new host of a stage may begin from these files.
    for (hash, path) in offered {
        files.offer(hash, path);
    }
    Ok(Collected { directory: destination, hash })
}

/// Brings a stage's files into a folder: local ones are linked or copied, the others fetched from
/// their holders.
///
/// # Errors
/// When the folder takes no files, or no holder gives one.
pub(crate) async fn obtain(
    stored: &StoredStage,
    me: PeerId,
    folder: &Path,
    files: &Files,
    transport: Option<&Transport>,
) -> anyhow::Result<()> {
    // Another task may bring the same file here, and a third may read it, so each copy is renamed
    // into its place. A fetch does so by itself.
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
                    .with_context(|| {
                        let (path, folder) = (path.display(), folder.display());
                        format!("{path} cannot be copied to {folder}")
                    })?;
            }
            // An earlier process fetched it before it died.
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

/// Returns whether this very file is at a path.
async fn is_there(path: &Path, file: &StoredFile) -> bool {
    let (path, hash) = (path.to_owned(), file.hash);
    let found = tokio::task::spawn_blocking(move || chunks::hash(&path));
    matches!(found.await, Ok(Ok(found)) if found == hash)
}

/// Fetches a file from its holders. Each peer begins with another holder.
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

/// Checks that a file name from a peer stays in the folder.
///
/// # Errors
/// When it is no plain file name.
pub(crate) fn checked_name(name: &str) -> anyhow::Result<&str> {
    anyhow::ensure!(is_plain_name(name), "a peer named a file {name:?}: no plain file name");
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
