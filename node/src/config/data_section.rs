//! The section `[data]` of `run.toml`: a text, or prepared data.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use shoal_protocol::manifest::{Model, Prepared, Tokenizer};

use super::Sources;

/// The data that is trained on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataSource {
    /// A text file or a folder of text files; by default the built-in text.
    pub path: Option<PathBuf>,
    /// The tokenizer of the text.
    pub tokenizer: Tokenizer,
    /// Prepared data instead of a text: its folder, and what the manifest says of it.
    pub prepared: Option<(PathBuf, Prepared)>,
}

/// The section `[data]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DataSection {
    path: Option<PathBuf>,
    tokenizer: Option<Tokenizer>,
    prepared: Option<PathBuf>,
}

impl DataSection {
    /// Relative paths start at `folder`.
    pub(super) fn resolve(
        self,
        folder: &Path,
        sources: &dyn Sources,
    ) -> Result<DataSource, String> {
        let Some(prepared) = self.prepared else {
            let tokenizer = self.tokenizer.ok_or("missing key `tokenizer`")?;
            let path = self.path.map(|text| folder.join(text));
            return Ok(DataSource { path, tokenizer, prepared: None });
        };
        if self.path.is_some() || self.tokenizer.is_some() {
            return Err(
                "data.prepared excludes data.path and data.tokenizer: remove them".to_owned()
            );
        }
        let folder = folder.join(prepared);
        let prepared =
            sources.prepared(&folder).map_err(|error| format!("data.prepared: {error}"))?;
        let prepared = Some((folder, prepared));
        Ok(DataSource { path: None, tokenizer: Tokenizer::Bytes, prepared })
    }
}

/// Whether the token ids of a model are bytes, so that it can train on plain text.
pub(crate) fn reads_bytes(model: &Model) -> bool {
    model.vocabulary == Tokenizer::Bytes.vocabulary()
}

/// Why a base does not train on plain text, and what would do.
pub(super) fn not_prepared(base: &Path, text: Option<&Path>, context: u32) -> String {
    let (base, source) = (base.display(), text.unwrap_or(Path::new("SRC")).display());
    format!(
        "{base} reads tokens of its own vocabulary, not the bytes of a text: run `shoal data prepare {source} \
         --tokenizer {base} --context {context} -o data`, and set prepared = \"data\" in [data] instead of path \
         and tokenizer"
    )
}

/// The keys of `[data]` in TOML.
pub(super) fn to_toml(data: &DataSource) -> String {
    let quoted = |path: &Path| toml::Value::from(path.to_string_lossy().as_ref()).to_string();
    if let Some((folder, _)) = &data.prepared {
        return format!("prepared = {}", quoted(folder));
    }
    let path = match &data.path {
        Some(path) => format!("path = {}", quoted(path)),
        None => "# path = \"text.txt\"".to_owned(),
    };
    let Tokenizer::Bytes = data.tokenizer;
    format!("{path}\ntokenizer = \"bytes\"")
}
