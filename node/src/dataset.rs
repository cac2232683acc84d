//! Converts a run configuration to the run's manifest, and finds the files that it names.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use flate2::read::ZlibDecoder;
use shoal_data::prepared::{INDEX_FILE, Index, Shard};
use shoal_data::stream::TOKENIZER_FOLDER;
use shoal_engine::{BaseIndex, Checkpoint, base, data};
use shoal_formats::config::{RunConfig, TrainingEpochs};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::{Base, Data, Manifest, Tokens};

use crate::data_dir::{self, Files};
use crate::exit::{Exit, ExitWith};
use crate::{progress, source_epochs};

/// The text of a run that names none: this project's documentation and sources.
///
/// # Panics
/// Never: the build wrote it.
#[must_use]
pub fn built_in_text() -> Vec<u8> {
    const COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/text.zlib"));
    let mut text = Vec::new();
    ZlibDecoder::new(COMPRESSED).read_to_end(&mut text).expect("the build compressed it");
    text
}

/// A run's manifest and the files that it names, on this machine.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The manifest.
    pub manifest: Manifest,
    /// The token file, or the index and the shards of prepared data, the base, and the checkpoint that
    /// the run goes on from.
    pub files: Vec<(ContentHash, PathBuf)>,
}

impl Dataset {
    /// The token file of a run on a text.
    #[must_use]
    pub fn token_file(&self) -> Option<&Path> {
        let hash = self.manifest.text()?.hash;
        self.files.iter().find(|(known, _)| *known == hash).map(|(_, path)| path.as_path())
    }

    /// Offers the files to other peers.
    pub fn offer(&self, files: &Files) {
        for (hash, path) in &self.files {
            files.offer(*hash, path.clone());
        }
    }
}

/// Finds the data of a run that is about to train, and tells how often the run sees it if that follows from
/// the data, or is likely not meant.
///
/// # Errors
/// Those of [`prepare`].
pub fn prepare_to_train(config: &RunConfig, folder: &Path) -> anyhow::Result<Dataset> {
    let dataset = prepare(config, folder)?;
    let (numbers, mut warnings) = source_epochs::lines(&dataset.manifest);
    if config.data.folders().is_empty() {
        warnings.clear();
    }
    if let TrainingEpochs::Overruled(number) = config.epochs {
        let steps = config.training.steps;
        progress::say(&format!(
            "training.steps = {steps} counts, and training.epochs = {number} does not: remove one of them"
        ));
    }
    // How much of each source is read follows from the data alone.
    if config.epochs != TrainingEpochs::None
        || !warnings.is_empty()
        || config.data.mixture.is_some()
    {
        numbers.iter().for_each(|line| progress::say(line));
    }
    for warning in warnings {
        progress::say(&format!("warning: {warning}"));
    }
    Ok(dataset)
}

/// Finds the data of a run. A text is tokenized into a file below `folder` that is named by the tokens'
/// hash.
///
/// # Errors
/// If the data is missing, empty or too short for the run, the checkpoint that it goes on from is
/// damaged, or the folder cannot be written.
pub fn prepare(config: &RunConfig, folder: &Path) -> anyhow::Result<Dataset> {
    let base = config.base.as_deref().map(BaseIndex::read).transpose().exit_with(Exit::Usage)?;
    let mut files = base_files(config, base.as_ref())?;
    files.extend(start_files(config)?);
    for folder in config.data.folders() {
        files.extend(prepared_files(base.as_ref(), folder)?);
    }
    let data = match config.data.rows() {
        Some(data) => data,
        None => {
            let text = text_of(config)?;
            let (tokens, token_file) = store(&text, config, folder)?;
            files.push((tokens.hash, token_file));
            Data::Text(tokens)
        }
    };
    let manifest = config.resolve(data).exit_with(Exit::Usage)?;
    Ok(Dataset { manifest, files })
}

/// Refuses to train the weights of a base that has few bits of them.
///
/// # Errors
/// If the base is packed, and the run has no adapters.
pub(crate) fn check_packed(
    index: &BaseIndex,
    has_adapters: bool,
    folder: &Path,
) -> anyhow::Result<()> {
    if index.packed.is_none() || has_adapters {
        return Ok(());
    }
    let folder = folder.display();
    Err(anyhow!(
        "{folder} is packed in 4 bits, which are no weights to train: give `shoal init` --lora 16 for adapters beside it, or import \
         the model without --nf4"
    ))
    .exit_with(Exit::Usage)
}

/// The files of the run's base.
fn base_files(
    config: &RunConfig,
    base: Option<&(BaseIndex, Base)>,
) -> anyhow::Result<Vec<(ContentHash, PathBuf)>> {
    let (Some(folder), Some((index, base))) = (&config.base, base) else { return Ok(Vec::new()) };
    check_packed(index, config.lora.is_some(), folder)?;
    let mut files = vec![(base.index, folder.join(base::INDEX))];
    for file in index.weights.iter().chain(&index.others) {
        let path = folder.join(&file.name);
        expect_length(&path, file.bytes, "import the model again").exit_with(Exit::Usage)?;
        files.push((file.hash, path));
    }
    Ok(files)
}

/// The files of the checkpoint that the run goes on from, all of which are checked.
fn start_files(config: &RunConfig) -> anyhow::Result<Vec<(ContentHash, PathBuf)>> {
    let Some(start) = &config.start else { return Ok(Vec::new()) };
    let checkpoint = Checkpoint::open(&start.folder).exit_with(Exit::Corrupt)?;
    checkpoint.verify().exit_with(Exit::Corrupt)?;
    let files = checkpoint.files().iter().chain([checkpoint.description()]);
    Ok(files.map(|file| (file.hash, start.folder.join(&file.name))).collect())
}

/// The index and the shards of prepared data.
fn prepared_files(
    base: Option<&(BaseIndex, Base)>,
    folder: &Path,
) -> anyhow::Result<Vec<(ContentHash, PathBuf)>> {
    let index = Index::read(folder).exit_with(Exit::Usage)?;
    if let Some((base, _)) = base {
        let tokenizer = base.others.iter().find(|file| file.name == "tokenizer.json");
        if tokenizer.is_some_and(|file| file.hash != index.tokenizer) {
            let folder = folder.display();
            let problem = anyhow!("{folder} was prepared with another tokenizer than the base's");
            return Err(problem).exit_with(Exit::Usage);
        }
    }
    let mut files = vec![(index.hash(), folder.join(INDEX_FILE))];
    let row = index.layout().row_bytes() as u64;
    // The shards of streamed data are made while they are read.
    let whole = index.train.iter().filter(|_| index.stream.is_none());
    for shard in whole.chain(&index.held_out) {
        let path = Shard::path_in(folder, shard);
        expect_length(&path, shard.rows * row, "prepare the data again").exit_with(Exit::Usage)?;
        files.push((shard.hash, path));
    }
    for file in index.stream.iter().flat_map(|stream| &stream.tokenizer) {
        let path = folder.join(TOKENIZER_FOLDER).join(&file.name);
        expect_length(&path, file.bytes, "prepare the data again").exit_with(Exit::Usage)?;
        files.push((file.hash, path));
    }
    Ok(files)
}

fn expect_length(path: &Path, bytes: u64, remedy: &str) -> anyhow::Result<()> {
    let about = fs::metadata(path).with_context(|| path.display().to_string())?;
    anyhow::ensure!(about.len() == bytes, "{} is damaged: {remedy}", path.display());
    Ok(())
}

/// The text of a run.
///
/// # Errors
/// If it is missing or empty.
pub fn text_of(config: &RunConfig) -> anyhow::Result<Vec<u8>> {
    match &config.data.path {
        None => Ok(built_in_text()),
        Some(path) => data::read_text(path).context("no text to train on").exit_with(Exit::Usage),
    }
}

/// The file is renamed last, so that a file with the final name is whole.
fn store(text: &[u8], config: &RunConfig, folder: &Path) -> anyhow::Result<(Tokens, PathBuf)> {
    let folder = folder.join("tokens");
    let failed = || format!("cannot write tokens to {}", folder.display());
    data_dir::make(&folder).with_context(failed)?;
    let scratch = tempfile::tempdir_in(&folder).with_context(failed)?;
    let written = scratch.path().join("tokens");
    let tokens = data::write_tokens(text, config.data.tokenizer, &written)?;
    let token_file = folder.join(format!("{}.tokens", tokens.hash));
    let description = |path: &Path| path.with_added_extension("json");
    fs::rename(description(&written), description(&token_file)).with_context(failed)?;
    fs::rename(&written, &token_file).with_context(failed)?;
    Ok((tokens, token_file))
}

#[cfg(test)]
mod tests {
    use shoal_engine::TokenFile;

    use super::*;

    #[test]
    fn the_default_run_has_a_text() {
        let folder = tempfile::tempdir().expect("a folder");
        let dataset = prepare(&RunConfig::default(), folder.path()).expect("prepared");
        let tokens = dataset.manifest.text().expect("a text");
        assert!(tokens.count > 100_000, "{} tokens", tokens.count);
        let file = TokenFile::open(dataset.token_file().expect("there"), tokens).expect("whole");
        assert_eq!(file.bytes(), built_in_text());
        let again = prepare(&RunConfig::default(), folder.path()).expect("prepared again");
        assert_eq!(again.manifest, dataset.manifest);
    }

    #[test]
    fn a_text_that_cannot_be_trained_on_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let refusal = |content: Option<&str>| {
            let path = folder.path().join("text.txt");
            if let Some(content) = content {
                fs::write(&path, content).expect("written");
            }
            let mut config = RunConfig::default();
            config.data.path = Some(path);
            let error = prepare(&config, folder.path()).expect_err("refused");
            assert_eq!(Exit::of(&error), Exit::Usage);
            format!("{error:#}")
        };
        assert!(refusal(None).contains("text.txt: No such file"));
        assert!(refusal(Some("")).contains("holds no text"));
        assert!(refusal(Some("a short text")).contains("the text has 12 tokens"));
    }
}
