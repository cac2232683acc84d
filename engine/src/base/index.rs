//! `base.json`: the index of a base.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::{ContentHash, Stage};
use shoal_protocol::inside::is_plain_name;
use shoal_protocol::limits;
use shoal_protocol::manifest::{Base, Experts, LoraTarget, Manifest, Model, Quantisation};

use super::{BaseError, Result};
use crate::family::tensors::locate;
use crate::family::{self, Naming};
use crate::model::parameters::Parameter;

/// Name of the index in a base's folder.
pub const INDEX: &str = "base.json";

/// Version of the format.
pub(super) const FORMAT: u32 = 1;

/// One file of a base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseFile {
    /// Its name in the folder.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Hash of its bytes.
    pub hash: ContentHash,
}

/// The content of `base.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseIndex {
    pub(super) format: u32,
    /// The family, as in `model_type` of `config.json`.
    pub family: String,
    /// The shape; its context is the longest position.
    pub model: Model,
    /// The format of the matrices of layers, if they are packed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<Quantisation>,
    /// `config.json` as imported.
    pub config: serde_json::Value,
    /// The files of weights: the embedding, each layer, the head.
    pub weights: Vec<BaseFile>,
    /// Configuration and tokenizer, as imported.
    pub others: Vec<BaseFile>,
}

impl BaseIndex {
    /// Parses and checks an index.
    ///
    /// # Errors
    /// What is wrong.
    pub fn parse(bytes: &[u8]) -> std::result::Result<Self, String> {
        let index: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if index.format != FORMAT {
            return Err(format!("its format is {} and not {FORMAT}", index.format));
        }
        index.model.check().map_err(|error| error.to_string())?;
        let expected = index.model.layers as usize + 2;
        if index.weights.len() != expected {
            return Err(format!("it has {} files and not {expected}", index.weights.len()));
        }
        let mut files = index.weights.iter().chain(&index.others);
        match files.find(|file| !is_plain_name(&file.name)) {
            Some(file) => Err(format!("it lists {:?}, which is no plain file name", file.name)),
            None => Ok(index),
        }
    }

    /// Reads the index of a base's folder, and its name in a manifest.
    ///
    /// # Errors
    /// If the folder is no base, or its index is damaged.
    pub fn read(folder: &Path) -> Result<(Self, Base)> {
        let path = folder.join(INDEX);
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => BaseError::NotABase { path: folder.to_owned() },
            _ => BaseError::io(&path)(error),
        })?;
        file.take(limits::BASE_INDEX.0 + 1)
            .read_to_end(&mut bytes)
            .map_err(BaseError::io(&path))?;
        if bytes.len() as u64 > limits::BASE_INDEX.0 {
            return Err(BaseError::damaged(&path, format!("it is over {}", limits::BASE_INDEX)));
        }
        let index = Self::parse(&bytes).map_err(|reason| BaseError::damaged(&path, reason))?;
        let base =
            Base { index: ContentHash::of(&bytes), bytes: bytes.len() as u64, loads_weights: true };
        Ok((index, base))
    }

    /// The encoding that is hashed.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string_pretty(self).expect("it has only string keys");
        (text + "\n").into_bytes()
    }

    /// The files with the weights of a stage.
    #[must_use]
    pub fn files_of(&self, manifest: &Manifest, stage: Stage) -> Vec<&BaseFile> {
        let (first, last) = (stage == Stage(0), stage == manifest.last_stage());
        let embedding = first || last && self.model.block.tied;
        let layers = manifest.layers_of(stage).map(|layer| &self.weights[1 + layer as usize]);
        let mut files: Vec<&BaseFile> = Vec::new();
        files.extend(embedding.then(|| &self.weights[0]));
        files.extend(layers);
        files.extend(last.then(|| self.weights.last()).flatten());
        files
    }

    /// Whether its family names weights as this engine does.
    pub fn has_names_of_llama(&self) -> bool {
        family::naming(&self.family) == Some(Naming::Llama)
    }

    /// Why PEFT has no such adapters beside a model of its family as these targets have here; `None` if it has them.
    #[must_use]
    pub fn why_not_in_peft(&self, targets: &[LoraTarget]) -> Option<&'static str> {
        let of_experts = targets.iter().any(|target| target.is_of_experts(&self.model));
        let naming = family::naming(&self.family);
        match naming {
            Some(Naming::Llama | Naming::Mixtral | Naming::GptOss | Naming::DeepSeek) => {
                // PEFT joins the adapters of a layer's experts in the other families.
                let has_experts = !["qwen2_moe", "gpt_oss"].contains(&self.family.as_str());
                (of_experts && !has_experts).then_some("has no adapters of each expert in PEFT")
            }
            _ => Some("joins matrices that have adapters of their own here"),
        }
    }

    /// A tensor's name in files of its family, by the name of this engine's weight.
    pub(crate) fn name_in_files(&self, weight: &str) -> String {
        let naming = family::naming(&self.family).unwrap_or(Naming::Llama);
        let parameter = Parameter { name: weight.to_owned(), shape: vec![1, 1], offset: 0 };
        locate(naming, &self.model, &parameter).tensor
    }

    /// Whether the run's model is that of the base, apart from what a run decides.
    #[must_use]
    pub fn fits(&self, model: &Model) -> bool {
        let mut undecided = Model {
            context: self.model.context,
            boundary: None,
            base: None,
            slices: 1,
            ..model.clone()
        };
        if let (Some(experts), Some(own)) =
            (&mut undecided.block.experts, &self.model.block.experts)
        {
            let &Experts { balance, balance_rate, balance_coefficient, .. } = own;
            *experts = Experts { balance, balance_rate, balance_coefficient, ..experts.clone() };
        }
        undecided == self.model
    }
}

/// How the decoder is tested.
#[cfg(any(test, fuzzing))]
pub(crate) const DECODER: shoal_protocol::decoder::Decoder = shoal_protocol::decoder::Decoder {
    name: "base_index",
    examples: || {
        let model = shoal_protocol::manifest::example::small().model;
        let file = |name: String| BaseFile { name, bytes: 8, hash: ContentHash([1; 32]) };
        let weights = (0..model.layers + 2).map(|number| file(format!("{number}"))).collect();
        let others = vec![file("config.json".to_owned())];
        let index = BaseIndex {
            format: FORMAT,
            family: "llama".to_owned(),
            model,
            packed: Some(Quantisation::Nf4),
            config: serde_json::json!({}),
            weights,
            others,
        };
        vec![index.to_bytes()]
    },
    check: |bytes| {
        if let Ok(index) = BaseIndex::parse(bytes) {
            assert_eq!(BaseIndex::parse(&index.to_bytes()), Ok(index), "it parses to itself");
        }
    },
};
