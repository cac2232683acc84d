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
    model_files(model, &|path| {
        !path.contains('/') && MODEL_FILES.iter().any(|end| path.ends_with(end))
    })
}

/// The folder with the `config.json` of a model, as [`local_model`], of which nothing else is downloaded.
///
/// # Errors
/// Those of [`local_model`].
pub(super) fn local_config(model: &str) -> anyhow::Result<PathBuf> {
    model_files(model, &|path| path == "config.json")
}

/// The folder of a model, or these files of one on the Hub.
fn model_files(model: &str, wants: &dyn Fn(&str) -> bool) -> anyhow::Result<PathBuf> {
    if !model.starts_with(PREFIX) {
        return Ok(PathBuf::from(model));
    }
    let reference: Reference = model.parse().exit_with(Exit::Usage)?;
    if reference.repository().kind() != RepositoryKind::Model {
        let problem = anyhow!("{model} is no model: name one as hf:owner/name");
        return Err(problem).exit_with(Exit::Usage);
    }
    Ok(download(&hub()?, &reference, wants)?.folder)
}

/// Refuses a name of the Hub without `hf:`, which would pass for a folder.
///
/// # Errors
/// If there is no such folder and the name is one of the Hub.
pub(super) fn check_model(model: &str) -> anyhow::Result<()> {
    if is_name(model) && !Path::new(model).exists() {
        return Err(anyhow!("there is no folder {model}: a model on the Hub is named hf:{model}"));
    }
    Ok(())
}

/// Refuses the name of a model where the folder of a base must be.
///
/// # Errors
/// If there is no such folder.
pub(super) fn check_base(base: &Path) -> anyhow::Result<()> {
    if base.exists() {
        return Ok(());
    }
    let name = base.to_string_lossy();
    let model = match name.strip_prefix(PREFIX) {
        Some(model) => Some(model),
        None => is_name(&name).then_some(&*name),
    };
    Err(match model {
        Some(model) => anyhow!(
            "--tokenizer {name} is no folder: run `shoal import hf:{model} -o base`, then give --tokenizer base"
        ),
        None => anyhow!(
            "--tokenizer {name}: there is no such folder; `shoal import MODEL -o {name}` makes it"
        ),
    })
}

/// Whether a text has the form of a repository, `OWNER/NAME`.
fn is_name(text: &str) -> bool {
    let part = |part: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !part.is_empty() && !part.starts_with('.') && part.bytes().all(known)
    };
    text.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
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
    let snapshot = download(&hub()?, &reference, &is_readable)?;
    let path = |file: SnapshotFile| file.local.to_string_lossy().into_owned();
    Ok(snapshot.files.into_iter().map(path).collect())
}

/// Whether a file of a data set has rows, by its name.
pub(super) fn is_readable(path: &str) -> bool {
    let path = path.trim_end_matches(".gz").trim_end_matches(".zst");
    [".jsonl", ".ndjson", ".parquet", ".txt", ".md"].iter().any(|end| path.ends_with(end))
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

/// A client with the settings of the environment.
///
/// # Errors
/// If one of them is invalid.
pub(super) fn hub() -> anyhow::Result<Hub> {
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
