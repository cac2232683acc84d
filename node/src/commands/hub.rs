//! Models and data on the Hugging Face Hub, for the commands that take `hf:` names.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use shoal_hub::{Hub, HubConfig, Push, Reference, RepositoryKind, Snapshot, SnapshotFile};

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
    let wanted =
        |path: &str| !path.contains('/') && MODEL_FILES.iter().any(|end| path.ends_with(end));
    Ok(download(&hub()?, &reference, &wanted)?.folder)
}

/// The repository of a model that is named as `hf:owner/name`, as others find it.
pub(super) fn name(model: &str) -> Option<String> {
    let name = model.strip_prefix(PREFIX)?;
    Some(name.split('@').next().unwrap_or(name).to_owned())
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
    let readable = |path: &str| {
        let path = path.trim_end_matches(".gz").trim_end_matches(".zst");
        [".jsonl", ".ndjson", ".parquet", ".txt", ".md"].iter().any(|end| path.ends_with(end))
    };
    let snapshot = download(&hub()?, &reference, &readable)?;
    let path = |file: SnapshotFile| file.local.to_string_lossy().into_owned();
    Ok(snapshot.files.into_iter().map(path).collect())
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

fn download(
    hub: &Hub,
    reference: &Reference,
    wants: &dyn Fn(&str) -> bool,
) -> anyhow::Result<Snapshot> {
    let bar = progress::byte_bar("fetching");
    let snapshot = hub.download_where(reference, wants, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.bytes);
        bar.set_message(progress.file.to_owned());
    });
    bar.finish_and_clear();
    snapshot.exit_with(Exit::Failed)
}
