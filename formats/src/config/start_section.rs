//! The section `[start]` of `run.toml`: a checkpoint of another run that this one goes on from.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use shoal_protocol::ids::{ContentHash, Step};
use shoal_protocol::manifest::{Manifest, ManifestError, Start};

use super::Sources;

/// The section as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StartSection {
    /// The checkpoint's folder.
    from: PathBuf,
}

impl StartSection {
    /// Reads the checkpoint. A relative path starts at `folder`.
    pub(crate) fn resolve(
        self,
        folder: &Path,
        sources: &dyn Sources,
    ) -> Result<StartSource, String> {
        sources.checkpoint(&folder.join(self.from)).map_err(|error| format!("start.from: {error}"))
    }
}

/// A checkpoint that a run goes on from.
#[derive(Debug, Clone, PartialEq)]
pub struct StartSource {
    /// Its folder.
    pub folder: PathBuf,
    /// Hash of its description.
    pub checkpoint: ContentHash,
    /// Bytes of its description.
    pub bytes: u64,
    /// Its version.
    pub step: Step,
    /// The manifest of its run.
    pub manifest: Manifest,
}

impl StartSource {
    /// The steps of a worker that it has done.
    pub fn updates(&self) -> u64 {
        let every = self.manifest.inner.as_ref().map_or(1, |inner| inner.steps.into());
        self.step.0.saturating_mul(every)
    }

    /// Its name in the manifest of a run that goes on from it.
    pub fn start_of(&self, manifest: &Manifest) -> Result<Start, ManifestError> {
        let Self { checkpoint, bytes, step, .. } = *self;
        let samples = manifest.samples_after(&self.manifest, step);
        let step = manifest.version_after(&self.manifest, step)?;
        Ok(Start { checkpoint, bytes, step, samples })
    }
}

/// The section in TOML, or a comment with an example if there is none.
pub(crate) fn to_toml(source: Option<&StartSource>) -> String {
    let Some(StartSource { folder, .. }) = source else {
        return "# [start]\n# from = \"out/checkpoint\"".to_owned();
    };
    format!("[start]\nfrom = {}", toml::Value::from(folder.to_string_lossy().as_ref()))
}
