//! Saved state: a folder that `transformers` can load, unless the model has trained boundaries,
//! which Llama lacks.
//!
//! ```text
//! model-00001-of-0000S.safetensors      weights of each stage, f32, Hugging Face's names
//! optimizer-00001-of-0000S.safetensors  what its optimizer keeps, as first_moment.NAME (see Slot)
//! model.safetensors.index.json          which file holds which weight
//! config.json, generation_config.json, tokenizer.json, tokenizer_config.json
//! shoal.json                            run, version, manifest, and every file's size and hash
//! ```
//!
//! Each stage's files may be written by a different peer ([`write_stage`]). A peer that has all of
//! them writes the rest ([`write_index`]) and renames the folder into place ([`publish`]).

mod read;
mod start;
mod write;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::{ContentHash, RunId, Stage, Step};
use shoal_protocol::inside::is_plain_name;
use shoal_protocol::limits;
use shoal_protocol::manifest::Manifest;

pub use read::{Checkpoint, read_stage};
pub use start::StartFiles;
pub use write::{publish, write_index, write_stage};

pub use crate::checkpoint_error::CheckpointError;
use crate::checkpoint_error::DESCRIPTION;
use crate::data::safetensors_file::HEADER_CAP;
use crate::model::parameters::{Parameter, parameters};
use crate::optimizer::{Slot, layout_of_run};

/// The file that describes the folder.
pub const INDEX: &str = DESCRIPTION;

/// Maximum size of that file, in bytes.
pub const INDEX_CAP: u64 = HEADER_CAP;

/// Version of the folder's layout.
const FORMAT: u32 = 1;

/// The state of a stage at a version; each vector is in the order of the flat vector.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StageState {
    /// The weights.
    pub weights: Vec<f32>,
    /// The weights of earlier versions that the run's steps read, the newest first; those that are absent are
    /// the newest weights.
    pub stale_weights: Vec<Vec<f32>>,
    /// What the optimizer keeps beside the weights, in the order of weights; a slot that is absent has zeros.
    pub slots: BTreeMap<Slot, Vec<f32>>,
}

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointFile {
    /// Its name in the folder.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Hash of its bytes.
    pub hash: ContentHash,
}

/// The content of `shoal.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    format: u32,
    run: RunId,
    /// Version of the weights: the optimizer updates applied.
    step: Step,
    manifest: Manifest,
    files: Vec<CheckpointFile>,
    /// Hash of all other fields, as compact JSON with this one zero.
    seal: ContentHash,
}

impl Description {
    /// Parses and checks a description.
    ///
    /// # Errors
    /// What is wrong.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let description: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if description.format != FORMAT {
            return Err(format!("its format is {} and not {FORMAT}", description.format));
        }
        if description.seal != description.expected_seal() {
            return Err("it has been changed".to_owned());
        }
        description.manifest.check().map_err(|error| error.to_string())?;
        // The names are joined to folders, and the files are offered to peers.
        let mut files = description.files.iter();
        if let Some(file) = files.find(|file| !is_plain_name(&file.name)) {
            return Err(format!("it lists {:?}, which is no plain file name", file.name));
        }
        match description.manifest.run_id() == description.run {
            true => Ok(description),
            false => Err("its manifest is not that of its run".to_owned()),
        }
    }

    /// The text of the file.
    fn to_bytes(&self) -> Vec<u8> {
        let value = serde_json::to_value(self).expect("it has only string keys");
        format!("{value:#}\n").into_bytes()
    }

    /// The correct value of `seal`.
    fn expected_seal(&self) -> ContentHash {
        let unsealed = Self { seal: ContentHash([0; 32]), ..self.clone() };
        ContentHash::of(&serde_json::to_vec(&unsealed).expect("it has only string keys"))
    }
}

/// Name of a stage's weights file, counted from 1 as in Hugging Face's convention.
#[must_use]
pub fn weights_file(manifest: &Manifest, stage: Stage) -> String {
    stage_file("model", manifest, stage)
}

/// Name of a stage's optimizer file.
#[must_use]
pub fn optimizer_file(manifest: &Manifest, stage: Stage) -> String {
    stage_file("optimizer", manifest, stage)
}

/// The tensors of an optimizer file, each list with the prefix of its names: those of the optimizer's slots
/// and the weights of earlier versions that the run's steps read.
fn optimizer_tensors(manifest: &Manifest, stage: Stage) -> Vec<(&'static str, Vec<Parameter>)> {
    let parameters = parameters(manifest, stage);
    let slots = layout_of_run(manifest, &parameters);
    let slots = slots.into_iter().map(|slot| (slot.slot.prefix(), slot.tensors));
    let stale = STALE.iter().take(usize::from(manifest.training.staleness));
    slots.chain(stale.map(|prefix| (*prefix, parameters.clone()))).collect()
}

/// Begin the names of earlier versions of weights in an optimizer file, the newest first.
const STALE: [&str; limits::STALENESS as usize] = ["stale.", "stale2.", "stale3.", "stale4."];

fn stage_file(kind: &str, manifest: &Manifest, stage: Stage) -> String {
    format!("{kind}-{:05}-of-{:05}.safetensors", stage.0 + 1, manifest.training.stages)
}

/// How the decoder is tested.
#[cfg(test)]
pub(crate) const DECODER: shoal_protocol::decoder::Decoder = shoal_protocol::decoder::Decoder {
    name: "checkpoint_description",
    examples: || {
        let manifest = shoal_protocol::manifest::example::small();
        let hash = ContentHash([1; 32]);
        let name = weights_file(&manifest, Stage(0));
        let mut description = Description {
            format: FORMAT,
            run: manifest.run_id(),
            step: Step(3),
            manifest,
            files: vec![CheckpointFile { name, bytes: 8, hash }],
            seal: hash,
        };
        description.seal = description.expected_seal();
        vec![description.to_bytes()]
    },
    check: |bytes| {
        if let Ok(description) = Description::parse(bytes) {
            let again = Description::parse(&description.to_bytes()).expect("it parses again");
            assert_eq!(again.to_bytes(), description.to_bytes());
        }
    },
};

/// Hash of named f32 tensors.
///
/// BLAKE3 in key derivation mode, over, for each tensor in the byte order of names: the name's
/// length as u32 and the name; `3` as u32 and `F32`; the rank as u32 and each extent as u64; the
/// data's length in bytes as u64 and the data. All integers and the data are little-endian. The
/// context for a checkpoint's weights is `shoal checkpoint v1`.
struct TensorHasher(blake3::Hasher);

impl TensorHasher {
    fn new(context: &str) -> Self {
        Self(blake3::Hasher::new_derive_key(context))
    }

    fn add(&mut self, name: &str, shape: &[usize], data: &[u8]) {
        self.0.update(&(name.len() as u32).to_le_bytes());
        self.0.update(name.as_bytes());
        self.0.update(&3u32.to_le_bytes());
        self.0.update(b"F32");
        self.0.update(&(shape.len() as u32).to_le_bytes());
        for extent in shape {
            self.0.update(&(*extent as u64).to_le_bytes());
        }
        self.0.update(&(data.len() as u64).to_le_bytes());
        self.0.update(data);
    }

    fn finish(&self) -> ContentHash {
        self.0.finalize().into()
    }
}

/// Hash of several flat vectors with their tensors, one vector after the other.
pub(crate) fn hash_tensors(context: &str, vectors: &[(&[Parameter], &[f32])]) -> ContentHash {
    let mut hasher = TensorHasher::new(context);
    for (parameters, vector) in vectors {
        let mut sorted: Vec<&Parameter> = parameters.iter().collect();
        sorted.sort_by(|one, other| one.name.cmp(&other.name));
        for parameter in sorted {
            let data = bytemuck::cast_slice(&vector[parameter.range()]);
            hasher.add(&parameter.name, &parameter.shape, data);
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_lists_plain_names_alone() {
        let manifest = shoal_protocol::manifest::example::small();
        let hash = ContentHash([1; 32]);
        let parse = |name: &str| {
            let mut description = Description {
                format: FORMAT,
                run: manifest.run_id(),
                step: Step(3),
                manifest: manifest.clone(),
                files: vec![CheckpointFile { name: name.to_owned(), bytes: 8, hash }],
                seal: hash,
            };
            description.seal = description.expected_seal();
            Description::parse(&description.to_bytes())
        };
        parse("config.json").expect("plain");
        for name in ["../identity", "/etc/passwd", "a/b", "..", "", ".hidden", "a.part"] {
            let error = parse(name).expect_err(name);
            assert!(error.contains("is no plain file name"), "{error}");
        }
    }
}
