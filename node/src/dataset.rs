//! Converts a run configuration and its text to the run's manifest and token file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use shoal_engine::{BaseIndex, base, data};
use shoal_protocol::manifest::{Manifest, Tokens};

use crate::config::RunConfig;
use crate::data_dir::Files;
use crate::exit::{Exit, ExitWith};

/// The text of a run that names none: this project's documentation and sources.
pub const BUILT_IN_TEXT: &str = include_str!(concat!(env!("OUT_DIR"), "/text.txt"));

/// A run's manifest and its token file on this machine.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The manifest.
    pub manifest: Manifest,
    /// Path of the token file.
    pub token_file: PathBuf,
}

/// Tokenizes a run's text into a file below `folder` that is named by the tokens' hash.
///
/// # Errors
/// If the text is missing, empty or too short for the run, or the folder cannot be written.
pub fn prepare(config: &RunConfig, folder: &Path) -> anyhow::Result<Dataset> {
    let text = text_of(config)?;
    let (tokens, token_file) = store(&text, config, folder)?;
    let manifest = config.resolve(tokens).exit_with(Exit::Usage)?;
    Ok(Dataset { manifest, token_file })
}

/// Offers a run's token file and the files of its base to other peers.
///
/// # Errors
/// If the base cannot be read.
pub fn offer(config: &RunConfig, dataset: &Dataset, files: &Files) -> anyhow::Result<()> {
    files.offer(dataset.manifest.tokens.hash, dataset.token_file.clone());
    if let Some(folder) = &config.base {
        let (index, base) = BaseIndex::read(folder).exit_with(Exit::Usage)?;
        files.offer(base.index, folder.join(base::INDEX));
        for file in index.weights.iter().chain(&index.others) {
            let path = folder.join(&file.name);
            let found = fs::metadata(&path).with_context(|| path.display().to_string());
            if found.exit_with(Exit::Usage)?.len() != file.bytes {
                let problem = anyhow!("{} is damaged: import the model again", path.display());
                return Err(problem).exit_with(Exit::Usage);
            }
            files.offer(file.hash, path);
        }
    }
    Ok(())
}

/// The text of a run.
///
/// # Errors
/// If it is missing or empty.
pub fn text_of(config: &RunConfig) -> anyhow::Result<Vec<u8>> {
    match &config.data.path {
        None => Ok(BUILT_IN_TEXT.as_bytes().to_vec()),
        Some(path) => data::read_text(path).context("no text to train on").exit_with(Exit::Usage),
    }
}

/// The file is renamed last, so that a file with the final name is whole.
fn store(text: &[u8], config: &RunConfig, folder: &Path) -> anyhow::Result<(Tokens, PathBuf)> {
    let folder = folder.join("tokens");
    let failed = || format!("cannot write tokens to {}", folder.display());
    fs::create_dir_all(&folder).with_context(failed)?;
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
        let tokens = &dataset.manifest.tokens;
        assert!(tokens.count > 100_000, "{} tokens", tokens.count);
        let file = TokenFile::open(&dataset.token_file, tokens).expect("whole");
        assert_eq!(file.bytes(), BUILT_IN_TEXT.as_bytes());
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
