//! The section `[data]` of `run.toml`: a text, prepared data, or a mixture of several.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use shoal_protocol::ids::{ContentHash, Step};
use shoal_protocol::manifest::{
    Data, MixedSource, Mixture, MixtureError, Model, Phase, Prepared, Tokenizer, Weight,
};

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
    /// Several prepared data sets instead, by weights.
    pub mixture: Option<MixtureSource>,
}

/// Prepared data sets that are mixed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MixtureSource {
    /// The folder of each.
    pub folders: Vec<PathBuf>,
    /// What the manifest says of them; phases are counted in the steps of a worker.
    pub mixture: Mixture,
}

/// Prepared data in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedFolder {
    /// What a manifest says of it.
    pub prepared: Prepared,
    /// The hash of its tokenizer.
    pub tokenizer: ContentHash,
    /// The token that ends a document.
    pub eos: Option<u32>,
    /// The hash of its chat template, if that is not its model's.
    pub chat_template: Option<ContentHash>,
}

impl DataSource {
    /// What the manifest says of prepared data; `None` of a text.
    #[must_use]
    pub fn rows(&self) -> Option<Data> {
        let prepared = self.prepared.iter().map(|(_, prepared)| Data::Prepared(prepared.clone()));
        let mixture = self.mixture.iter().map(|source| Data::Mixture(source.mixture.clone()));
        prepared.chain(mixture).next()
    }

    /// The folders of prepared data, in the order of the manifest.
    #[must_use]
    pub fn folders(&self) -> Vec<&Path> {
        let prepared = self.prepared.iter().map(|(folder, _)| folder);
        prepared
            .chain(self.mixture.iter().flat_map(|source| &source.folders))
            .map(PathBuf::as_path)
            .collect()
    }

    /// The same, to be changed.
    pub fn folders_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let prepared = self.prepared.iter_mut().map(|(folder, _)| folder);
        prepared.chain(self.mixture.iter_mut().flat_map(|source| &mut source.folders))
    }
}

/// The section `[data]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSection {
    path: Option<PathBuf>,
    tokenizer: Option<Tokenizer>,
    prepared: Option<PathBuf>,
    sources: Option<Vec<SourceKeys>>,
    #[serde(default)]
    phases: Vec<PhaseKeys>,
}

/// A source of a mixture, as it is written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceKeys {
    /// By default the last part of the path.
    pub name: Option<String>,
    /// The folder of prepared data.
    pub prepared: PathBuf,
    /// Its share of the documents, against those of the others.
    pub weight: f64,
}

/// A phase of a mixture, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseKeys {
    from: u64,
    /// By the names of sources; those left out have none.
    weights: BTreeMap<String, f64>,
}

impl DataSection {
    /// Relative paths start at `folder`.
    pub fn resolve(self, folder: &Path, sources: &dyn Sources) -> Result<DataSource, String> {
        let has_text = self.path.is_some() || self.tokenizer.is_some();
        if let Some(keys) = self.sources {
            if has_text || self.prepared.is_some() {
                return Err("data.sources excludes data.prepared, data.path and data.tokenizer: remove them".to_owned());
            }
            return mix(keys, self.phases, folder, sources);
        }
        if !self.phases.is_empty() {
            return Err("data.phases change the weights of data.sources: give sources instead of prepared or path".to_owned());
        }
        let Some(prepared) = self.prepared else {
            let tokenizer = self.tokenizer.ok_or("missing key `tokenizer`")?;
            let path = self.path.map(|text| folder.join(text));
            return Ok(DataSource { path, tokenizer, ..DataSource::default() });
        };
        if has_text {
            return Err(
                "data.prepared excludes data.path and data.tokenizer: remove them".to_owned()
            );
        }
        let folder = folder.join(prepared);
        let found = sources.prepared(&folder).map_err(|error| format!("data.prepared: {error}"))?;
        Ok(DataSource { prepared: Some((folder, found.prepared)), ..DataSource::default() })
    }
}

/// The mixture of some sources. One source without phases is the prepared data that it is.
pub fn mix(
    keys: Vec<SourceKeys>,
    phases: Vec<PhaseKeys>,
    folder: &Path,
    on_disk: &dyn Sources,
) -> Result<DataSource, String> {
    let mut folders = Vec::new();
    let mut found = Vec::new();
    let mut sources = Vec::new();
    for SourceKeys { name, prepared, weight } in keys {
        let path = folder.join(prepared);
        let last = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = name.unwrap_or_else(last);
        let read = on_disk.prepared(&path).map_err(|error| format!("data.sources: {error}"))?;
        let weight = weight_of(weight, &name)?;
        sources.push(MixedSource { name, data: read.prepared.clone(), weight });
        found.push(read);
        folders.push(path);
    }
    if let ([folder], [read], true) = (&folders[..], &found[..], phases.is_empty()) {
        let prepared = Some((folder.clone(), read.prepared.clone()));
        return Ok(DataSource { prepared, ..DataSource::default() });
    }
    let phases =
        phases.into_iter().map(|phase| phase_of(phase, &sources)).collect::<Result<_, _>>()?;
    let mixture = Mixture { sources, phases };
    let agrees = || -> Result<(), MixtureError> {
        mixture.check()?;
        let text = |hash: Option<&ContentHash>| hash.map_or("none".to_owned(), ToString::to_string);
        mixture.agree("tokenizer", found.iter().map(|read| read.tokenizer))?;
        let eos = |read: &PreparedFolder| read.eos.map_or("none".to_owned(), |eos| eos.to_string());
        mixture.agree("eos", found.iter().map(eos))?;
        mixture.agree("chat_template", found.iter().map(|read| text(read.chat_template.as_ref())))
    };
    agrees().map_err(|error| with_files(&error, &mixture, &folders))?;
    Ok(DataSource { mixture: Some(MixtureSource { folders, mixture }), ..DataSource::default() })
}

/// An error, with the files that it is about.
fn with_files(error: &MixtureError, mixture: &Mixture, folders: &[PathBuf]) -> String {
    let MixtureError::Differs { one, other, .. } = error else { return error.to_string() };
    let named = mixture.sources.iter().zip(folders);
    let files = named.filter(|(source, _)| source.name == *one || source.name == *other);
    let files = files.map(|(_, folder)| folder.join("index.json").display().to_string());
    format!("{error} ({})", files.collect::<Vec<_>>().join(", "))
}

fn weight_of(number: f64, name: &str) -> Result<Weight, String> {
    Weight::of(number).ok_or_else(|| {
        format!("data: the weight {number} of {name:?} is out of range: it must be 0, or from 0.000001 to 1000000")
    })
}

fn phase_of(keys: PhaseKeys, sources: &[MixedSource]) -> Result<Phase, String> {
    let PhaseKeys { from, weights: named } = keys;
    let known: Vec<&str> = sources.iter().map(|source| source.name.as_str()).collect();
    if let Some(name) = named.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(format!(
            "data.phases from {from} has a weight of {name:?}, and the sources are {}",
            known.join(", ")
        ));
    }
    let weight = |name: &&str| weight_of(named.get(*name).copied().unwrap_or(0.0), name);
    let weights = known.iter().map(weight).collect::<Result<_, _>>()?;
    Ok(Phase { from: Step(from), weights })
}

/// Whether the token ids of a model are bytes, so that it can train on plain text.
pub fn reads_bytes(model: &Model) -> bool {
    model.vocabulary == Tokenizer::Bytes.vocabulary()
}

/// Why a base does not train on plain text, and what would do.
pub fn not_prepared(base: &Path, text: Option<&Path>, context: u32) -> String {
    let (base, source) = (base.display(), text.unwrap_or(Path::new("SRC")).display());
    format!(
        "{base} reads tokens of its own vocabulary, not the bytes of a text: run `shoal data prepare {source} \
         --tokenizer {base} --context {context} -o data`, and set prepared = \"data\" in [data] instead of path \
         and tokenizer"
    )
}

/// The keys of `[data]` in TOML.
pub fn to_toml(data: &DataSource) -> String {
    let quoted = |path: &Path| toml::Value::from(path.to_string_lossy().as_ref()).to_string();
    if let Some((folder, _)) = &data.prepared {
        return format!("prepared = {}", quoted(folder));
    }
    if let Some(source) = &data.mixture {
        return mixture_to_toml(source);
    }
    let path = match &data.path {
        Some(path) => format!("path = {}", quoted(path)),
        None => "# path = \"text.txt\"".to_owned(),
    };
    let Tokenizer::Bytes = data.tokenizer;
    format!("{path}\ntokenizer = \"bytes\"")
}

fn mixture_to_toml(MixtureSource { folders, mixture }: &MixtureSource) -> String {
    let quoted = |text: &str| toml::Value::from(text).to_string();
    let mut text = "sources = [\n".to_owned();
    for (MixedSource { name, weight, .. }, folder) in mixture.sources.iter().zip(folders) {
        let (name, folder) = (quoted(name), quoted(&folder.to_string_lossy()));
        let _ = writeln!(text, "  {{ name = {name}, prepared = {folder}, weight = {weight} }},");
    }
    text.push(']');
    if mixture.phases.is_empty() {
        return text;
    }
    text.push_str("\nphases = [\n");
    for Phase { from, weights } in &mixture.phases {
        let named = mixture.sources.iter().zip(weights);
        let named = named.map(|(source, weight)| format!("{} = {weight}", quoted(&source.name)));
        let named = named.collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "  {{ from = {from}, weights = {{ {named} }} }},");
    }
    text.push(']');
    text
}
