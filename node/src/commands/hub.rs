//! Models and data on the Hugging Face Hub, for the commands that take `hf:` names.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use shoal_hub::{Hub, HubConfig, HubError, Push, Reference, RepositoryKind};

use crate::exit::{Exit, ExitWith};
use crate::progress;

/// Beginning of a name on the Hub.
const PREFIX: &str = "hf:";

/// Files of a model that an import reads, by the ends of their names.
const MODEL_FILES: [&str; 6] =
    [".safetensors", ".json", ".jinja", "merges.txt", "tokenizer.model", "LICENSE"];

/// The folder of a model: the path itself, or the files of `hf:owner/name[@revision]`, which are
/// downloaded unless they are in the Hub's cache.
///
/// # Errors
/// If the name is invalid, or the Hub does not give the files.
pub(super) fn local_model(model: &str) -> anyhow::Result<PathBuf> {
    if !model.starts_with(PREFIX) {
        return Ok(PathBuf::from(model));
    }
    let reference: Reference = model.parse().exit_with(Exit::Usage)?;
    if reference.repository().kind() != RepositoryKind::Model {
        let problem = anyhow!("{model} is no model: name one as hf:owner/name");
        return Err(problem).exit_with(Exit::Usage);
    }
    let hub = hub()?;
    if hub.config().offline {
        return Ok(download(&hub, &reference)?.folder);
    }
    let commit =
        hub.resolve(reference.repository(), reference.revision()).exit_with(Exit::Failed)?;
    let files = hub.list(reference.repository(), &commit).exit_with(Exit::Failed)?;
    let wanted =
        |path: &&str| !path.contains('/') && MODEL_FILES.iter().any(|end| path.ends_with(end));
    let mut folder = None;
    for path in files.iter().map(|file| file.path.as_str()).filter(wanted) {
        let pinned = Reference::new(reference.repository().clone()).at(&commit);
        let one = pinned.and_then(|pinned| pinned.only(path)).exit_with(Exit::Failed)?;
        folder = Some(download(&hub, &one)?.folder);
    }
    let problem = || anyhow!("{model} has no safetensors files: choose another model");
    folder.ok_or_else(problem).exit_with(Exit::Usage)
}

/// The files of a source: the source itself, or those of `hf:datasets/owner/name[@revision][:pattern]`.
///
/// # Errors
/// If the name is invalid, or the Hub does not give the files.
pub(super) fn local_sources(source: String) -> anyhow::Result<Vec<String>> {
    if !source.starts_with(PREFIX) {
        return Ok(vec![source]);
    }
    let reference: Reference = source.parse().exit_with(Exit::Usage)?;
    let snapshot = download(&hub()?, &reference)?;
    let readable = |path: &str| {
        let path = path.trim_end_matches(".gz").trim_end_matches(".zst");
        [".jsonl", ".parquet", ".txt", ".md"].iter().any(|end| path.ends_with(end))
    };
    let files = snapshot.files.into_iter().filter(|file| readable(&file.path));
    Ok(files.map(|file| file.local.to_string_lossy().into_owned()).collect())
}

/// Uploads a folder as one commit; returns the commit's page.
///
/// # Errors
/// If the name is invalid, or the Hub refuses the files.
pub(super) fn push(
    folder: &Path,
    repository: &str,
    private: bool,
    message: &str,
) -> anyhow::Result<String> {
    let reference: Reference = repository.parse().exit_with(Exit::Usage)?;
    let bar = progress::byte_bar("uploading");
    let push = Push {
        repository: reference.repository(),
        revision: reference.revision(),
        folder,
        private,
        message,
    };
    let pushed = hub()?.push(&push, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.bytes);
        bar.set_message(progress.file.to_owned());
    });
    bar.finish_and_clear();
    Ok(pushed.exit_with(Exit::Failed)?.url)
}

fn hub() -> anyhow::Result<Hub> {
    HubConfig::from_environment().and_then(Hub::new).exit_with(Exit::Usage)
}

fn download(hub: &Hub, reference: &Reference) -> anyhow::Result<shoal_hub::Snapshot> {
    let bar = progress::byte_bar("fetching");
    let snapshot: Result<_, HubError> = hub.download(reference, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.bytes);
        bar.set_message(progress.file.to_owned());
    });
    bar.finish_and_clear();
    snapshot.exit_with(Exit::Failed)
}
