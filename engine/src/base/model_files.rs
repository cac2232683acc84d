//! The files of weights of a model in Hugging Face's format: which of them, and which tensor, as
//! `transformers` chooses.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use shoal_protocol::limits;
use shoal_protocol::manifest::{Model, Quantisation};

use super::import::{describe_file, read_json};
use super::index::BaseFile;
use super::quantised::FileFormat;
use super::weights::{expected, open, packed_name, size_of_dtype, widened, wrong_tensor};
use super::{BaseError, Result, mxfp4, quantised, what};
use crate::data::safetensors_file::{FileTensor, SafetensorsFile, is_finite};
use crate::family::Naming;
use crate::family::tensors::{Location, is_constant, locate};
use crate::model::parameters::{EMBEDDING, HEAD, Parameter};
use crate::numeric::nf4;

/// The safetensors files of a model.
pub(super) struct ModelFiles {
    folder: PathBuf,
    files: Vec<SafetensorsFile>,
    naming: Naming,
    /// The weight whose tensor the head has, where that is not its own.
    head: &'static str,
    /// As `head`, for the embedding.
    embedding: &'static str,
    /// The format of quantised matrices in these files.
    quantised: Option<FileFormat>,
    /// The format that unquantised matrices of layers get.
    pack: Option<Quantisation>,
}

/// A tensor of a base.
struct BaseTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl BaseTensor {
    /// A packed matrix.
    fn packed(parameter: &Parameter, section: Vec<u8>) -> Self {
        let (name, shape) = (packed_name(&parameter.name), vec![section.len()]);
        Self { name, dtype: Dtype::U8, shape, bytes: section }
    }
}

impl ModelFiles {
    /// Opens the single file, or else those that the index names. Matrices there are `quantised`, or get the format `pack`.
    pub(super) fn open(
        folder: &Path,
        naming: Naming,
        quantised: Option<FileFormat>,
        pack: Option<Quantisation>,
    ) -> Result<Self> {
        let single = "model.safetensors";
        let mut names = BTreeSet::new();
        let index = folder.join("model.safetensors.index.json");
        if folder.join(single).exists() {
            names.insert(single.to_owned());
        } else if let Some(value) = read_json(&index)? {
            let map = value.get("weight_map").and_then(Value::as_object);
            let map = map.ok_or_else(|| BaseError::damaged(&index, "it has no weight_map"))?;
            for name in map.values() {
                let name = name.as_str().filter(|name| {
                    // The name comes from a file and must not lead out of the folder.
                    Path::new(name).file_name() == Some((*name).as_ref())
                });
                let name = name.ok_or_else(|| BaseError::damaged(&index, "it names no file"))?;
                names.insert(name.to_owned());
            }
        } else {
            let found = what::folder_without_weights(folder);
            return Err(BaseError::NoWeights { path: folder.to_owned(), found });
        }
        let files = names.iter().map(|name| open(&folder.join(name))).collect::<Result<_>>()?;
        let (folder, head, embedding) = (folder.to_owned(), HEAD, EMBEDDING);
        Ok(Self { folder, files, naming, head, embedding, quantised, pack })
    }

    /// Decides whether head and embedding are one weight, and which tensor has it. With `untie`, a
    /// head that is tied becomes a weight of its own.
    ///
    /// A tied model's file may have either of the two. If it has both and they differ, they are not
    /// tied, as in `transformers`, whatever the configuration says.
    pub(super) fn tie(&mut self, model: &mut Model, untie: bool) -> Result<()> {
        if !model.block.tied {
            return Ok(());
        }
        let shape = vec![model.vocabulary as usize, model.hidden as usize];
        let of = |name: &str| Parameter { name: name.to_owned(), shape: shape.clone(), offset: 0 };
        let found = |name| {
            let location = locate(self.naming, model, &of(name));
            self.tensor(&location.tensor).map(|(_, tensor)| (tensor.dtype, tensor.data))
        };
        match (found(EMBEDDING), found(HEAD)) {
            (Some(embedding), Some(head)) if embedding != head => {
                model.block.tied = false;
                return Ok(());
            }
            (None, Some(_)) => (self.head, self.embedding) = (HEAD, HEAD),
            _ => (self.head, self.embedding) = (EMBEDDING, EMBEDDING),
        }
        if untie {
            model.block.tied = false;
        }
        Ok(())
    }

    /// A tensor, also without the prefix that the names of the model have in one with a head.
    fn tensor(&self, name: &str) -> Option<(&SafetensorsFile, FileTensor<'_>)> {
        let bare = name.strip_prefix(self.naming.prefix()).unwrap_or(name);
        self.files
            .iter()
            .find_map(|file| Some((file, file.tensor(name).or_else(|| file.tensor(bare))?)))
    }

    fn location(&self, parameter: &Parameter, model: &Model) -> Location {
        let source = match parameter.name.as_str() {
            HEAD => self.head,
            EMBEDDING => self.embedding,
            name => name,
        };
        locate(self.naming, model, &Parameter { name: source.to_owned(), ..parameter.clone() })
    }

    /// Refuses a model with weights that would be ignored, and one with two of the same name.
    pub(super) fn refuse_unknown(
        &self,
        family: &str,
        parameters: &[Parameter],
        model: &Model,
        more_layers: u32,
    ) -> Result<()> {
        let more = |layer| format!("model.layers.{}.", u64::from(model.layers) + u64::from(layer));
        let more: Vec<String> = (0..more_layers.min(limits::LAYERS)).map(more).collect();
        let counts = |name: &str| {
            !is_constant(name) && !more.iter().any(|layer| name.starts_with(layer.as_str()))
        };
        let mut known: BTreeSet<String> =
            parameters.iter().map(|parameter| self.location(parameter, model).tensor).collect();
        let shape = vec![model.vocabulary as usize, model.hidden as usize];
        for name in [HEAD, EMBEDDING] {
            // Both may be there where they are tied.
            let both = Parameter { name: name.to_owned(), shape: shape.clone(), offset: 0 };
            known.insert(locate(self.naming, model, &both).tensor);
        }
        let mut seen = BTreeSet::new();
        for file in &self.files {
            for name in file.names() {
                let prefixed = format!("{}{name}", self.naming.prefix());
                let whole = if known.contains(&prefixed) { &prefixed } else { name };
                let is_known = known.contains(whole) || self.is_of_packed(name, &known);
                if !is_known && counts(name) {
                    return Err(BaseError::UnknownTensor {
                        path: file.path().to_owned(),
                        tensor: name.clone(),
                        family: family.to_owned(),
                        remedy: what::unknown_tensor(name),
                    });
                }
                if !seen.insert(whole.clone()) && counts(name) {
                    let path = file.path().to_owned();
                    return Err(BaseError::TwiceTensor { path, tensor: name.clone() });
                }
            }
        }
        Ok(())
    }

    /// Whether a tensor belongs to the quantisation of one of these.
    fn is_of_packed(&self, name: &str, known: &BTreeSet<String>) -> bool {
        let matrix = self.quantised.and_then(|format| quantised::matrix_of(name, format));
        let Some(matrix) = matrix else { return false };
        known.contains(matrix) || known.contains(&format!("{}{matrix}", self.naming.prefix()))
    }

    /// A weight as a base has it.
    fn read(&self, parameter: &Parameter, model: &Model) -> Result<BaseTensor> {
        let location = self.location(parameter, model);
        let name = &location.tensor;
        if let Some((dtype, bytes)) = self.read_mxfp4(&location, parameter)? {
            return Ok(self.packed_or_plain(parameter, dtype, bytes));
        }
        let (file, tensor) = self.tensor(name).ok_or_else(|| {
            let (path, tensor) = (self.folder.clone(), name.clone());
            let remedy = what::missing_tensor(&parameter.name);
            BaseError::MissingTensor { path, tensor, remedy }
        })?;
        if self.quantised == Some(FileFormat::Nf4) && parameter.is_packable() {
            if !location.is_whole(parameter) {
                let (path, tensor) = (file.path().to_owned(), name.clone());
                let reason = "it joins several matrices, or is transposed".to_owned();
                return Err(BaseError::NotNf4 { path, tensor, reason });
            }
            let find = |name: &str| Some(self.tensor(name)?.1);
            let section = quantised::section(file.path(), name, parameter, find)?;
            return Ok(BaseTensor::packed(parameter, section));
        }
        let size = size_of_dtype(tensor.dtype).filter(|_| tensor.shape == location.shape);
        let size = size
            .ok_or_else(|| wrong_tensor(file.path(), name, tensor, &expected(&location.shape)))?;
        let bytes = location.read(tensor.data, parameter, size);
        if !is_finite(tensor.dtype, &bytes) {
            let (path, tensor) = (file.path().to_owned(), location.tensor);
            return Err(BaseError::NotFinite { path, tensor });
        }
        Ok(self.packed_or_plain(parameter, tensor.dtype, bytes))
    }

    /// A weight that these files have in MXFP4; `None` if it is a tensor of its own, or missing.
    fn read_mxfp4(
        &self,
        location: &Location,
        parameter: &Parameter,
    ) -> Result<Option<(Dtype, Vec<u8>)>> {
        let name = &location.tensor;
        if self.quantised != Some(FileFormat::Mxfp4) || self.tensor(name).is_some() {
            return Ok(None);
        }
        let found = [mxfp4::BLOCKS, mxfp4::SCALES].map(|end| self.tensor(&format!("{name}{end}")));
        let [Some((file, blocks)), Some((_, scales))] = found else { return Ok(None) };
        let bytes = mxfp4::read(file.path(), location, parameter, [blocks, scales])?;
        Ok(Some((Dtype::BF16, bytes)))
    }

    /// A weight of these elements, in the format that the base gets.
    fn packed_or_plain(&self, parameter: &Parameter, dtype: Dtype, bytes: Vec<u8>) -> BaseTensor {
        if self.pack.is_some() && parameter.is_packable() {
            let values = widened(dtype, &bytes, parameter.len());
            let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
            return BaseTensor::packed(parameter, nf4::packed(&values, threads));
        }
        let (name, shape) = (parameter.name.clone(), parameter.shape.clone());
        BaseTensor { name, dtype, shape, bytes }
    }

    /// Writes some weights under the names of this engine.
    pub(super) fn write(
        &self,
        to: &Path,
        name: &str,
        group: &[&Parameter],
        model: &Model,
    ) -> Result<BaseFile> {
        let tensors = group.iter().map(|parameter| self.read(parameter, model));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let name = format!("{name}.safetensors");
        let path = to.join(&name);
        let views = tensors.iter().map(|tensor| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes)
                .expect("the data has the length of its shape");
            (tensor.name.as_str(), view)
        });
        safetensors::serialize_to_file(views, None, &path)
            .map_err(|error| BaseError::io(&path)(std::io::Error::other(error)))?;
        describe_file(to, name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use safetensors::tensor::TensorView;
    use serde_json::{Value, json};

    use super::super::{BaseFiles, Imported, import};
    use super::Dtype;
    use crate::family::describe;
    use crate::model::parameters::{EMBEDDING, HEAD, all_parameters};

    type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

    fn config(tied: bool) -> Value {
        json!({
            "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
            "max_position_embeddings": 16, "intermediate_size": 8, "vocab_size": 4,
            "tie_word_embeddings": tied,
        })
    }

    /// All tensors of the model, with different numbers in each, and a head.
    fn tensors(tied: bool) -> Tensors {
        let model = describe(&config(tied)).expect("a model").model;
        let mut tensors: Tensors = BTreeMap::new();
        for (number, parameter) in all_parameters(&model).into_iter().enumerate() {
            let values = vec![number as f32 + 1.0; parameter.len()];
            tensors.insert(parameter.name, (parameter.shape, values));
        }
        tensors
    }

    fn write(path: &Path, tensors: &Tensors) {
        let views = tensors.iter().map(|(name, (shape, values))| {
            let data = bytemuck::cast_slice(values);
            (name, TensorView::new(Dtype::F32, shape.clone(), data).expect("of its shape"))
        });
        safetensors::serialize_to_file(views, None, path).expect("writable");
    }

    /// Imports a model with these tensors.
    fn imported(
        config: &Value,
        tensors: &Tensors,
        untie: bool,
    ) -> Result<(Imported, tempfile::TempDir), String> {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("config.json"), config.to_string()).expect("writable");
        write(&folder.path().join("model.safetensors"), tensors);
        let base = import(folder.path(), &folder.path().join("base"), untie);
        base.map(|base| (base, folder)).map_err(|error| error.to_string())
    }

    /// The first number of a weight of a base.
    fn first(folder: &tempfile::TempDir, name: &str) -> Option<f32> {
        let base = BaseFiles::in_folder(&folder.path().join("base")).expect("a base");
        base.index.weights.iter().find_map(|file| {
            let file = super::open(&base.find(file)?).ok()?;
            let data = file.tensor(name)?.data.first_chunk().copied()?;
            Some(f32::from_le_bytes(data))
        })
    }

    #[test]
    fn a_tied_weight_is_taken_from_where_it_is() {
        let mut all = tensors(true);
        let (shape, values) = all.remove(EMBEDDING).expect("it is there");
        let head = (shape.clone(), vec![77.0; values.len()]);
        // The head alone.
        all.insert(HEAD.to_owned(), head.clone());
        let (base, folder) = imported(&config(true), &all, false).expect("tied");
        assert!(base.index.model.block.tied);
        assert_eq!(first(&folder, EMBEDDING), Some(77.0));
        let (base, folder) = imported(&config(true), &all, true).expect("untied");
        assert!(!base.index.model.block.tied);
        assert_eq!(first(&folder, HEAD), Some(77.0));
        // Both, and equal.
        all.insert(EMBEDDING.to_owned(), head);
        assert!(imported(&config(true), &all, false).expect("tied").0.index.model.block.tied);
        // Both, and different: they are not tied, as in transformers.
        all.insert(EMBEDDING.to_owned(), (shape, values));
        let (base, folder) = imported(&config(true), &all, false).expect("untied");
        assert!(!base.index.model.block.tied);
        assert_eq!(base.index.config["tie_word_embeddings"], false);
        assert_eq!((first(&folder, HEAD), first(&folder, EMBEDDING)), (Some(77.0), Some(1.0)));
        // Neither.
        let mut none = tensors(false);
        none.remove(HEAD);
        let error = imported(&config(false), &none, false).expect_err("no head");
        assert!(
            error.contains("lm_head.weight") && error.contains("tie_word_embeddings"),
            "{error}"
        );
    }

    #[test]
    fn names_of_the_bare_model_are_read_and_wrapped_ones_refused() {
        let renamed = |change: &dyn Fn(&str) -> String| -> Tensors {
            tensors(false).into_iter().map(|(name, value)| (change(&name), value)).collect()
        };
        let bare = renamed(&|name| name.strip_prefix("model.").unwrap_or(name).to_owned());
        imported(&config(false), &bare, false).expect("as transformers");
        let wrapped = renamed(&|name| format!("_orig_mod.{name}"));
        let error = imported(&config(false), &wrapped, false).expect_err("not as transformers");
        assert!(error.contains("_orig_mod. was put before all names"), "{error}");
        let mut twice = tensors(false);
        twice.insert("norm.weight".to_owned(), (vec![8], vec![1.0; 8]));
        let error = imported(&config(false), &twice, false).expect_err("two norms");
        assert!(error.contains("norm.weight, which another tensor"), "{error}");
    }

    #[test]
    fn a_single_file_goes_before_an_index() {
        let (_, folder) = imported(&config(false), &tensors(false), false).expect("a model");
        fs::remove_dir_all(folder.path().join("base")).expect("it is there");
        let index = json!({"weight_map": {"lm_head.weight": "old.safetensors"}});
        let place = folder.path().join("model.safetensors.index.json");
        fs::write(&place, index.to_string()).expect("writable");
        import(folder.path(), &folder.path().join("base"), false).expect("the single file");
    }

    #[test]
    fn what_is_no_model_is_named() {
        let (_, folder) = imported(&config(false), &tensors(false), false).expect("a model");
        let place = |name: &str| folder.path().join(name);
        let error = || {
            let _ = fs::remove_dir_all(place("base"));
            import(folder.path(), &place("base"), false).expect_err("no model").to_string()
        };
        let whole = fs::read(place("model.safetensors")).expect("it is there");
        fs::write(place("model.safetensors"), &whole[..whole.len() - 9]).expect("writable");
        assert!(error().contains("not those that its header announces"), "{}", error());
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
        fs::write(place("model.safetensors"), pointer).expect("writable");
        assert!(error().contains("is a Git LFS pointer"), "{}", error());
        fs::rename(place("model.safetensors"), place("pytorch_model.bin")).expect("there");
        assert!(error().contains("it has pytorch_model.bin: load it with"), "{}", error());
        fs::write(place("model.safetensors"), &whole).expect("writable");
        fs::write(place("tokenizer.json"), pointer).expect("writable");
        assert!(error().contains("tokenizer.json is a Git LFS pointer"), "{}", error());
        fs::write(place("config.json"), "{\n \"time_limit\": [0.0, Infinity]}").expect("writable");
        assert!(error().contains("line 2 has Infinity"), "{}", error());
        fs::rename(place("config.json"), place("adapter_config.json")).expect("there");
        assert!(error().contains("it has the adapters of a model"), "{}", error());
    }

    #[test]
    fn an_expert_that_is_missing_or_fused_is_named() {
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
            "num_key_value_heads": 2, "max_position_embeddings": 16, "intermediate_size": 8,
            "vocab_size": 4, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
        });
        let model = describe(&config).expect("a model").model;
        let with_values = |parameter: crate::model::parameters::Parameter| {
            let values = vec![1.0; parameter.len()];
            (parameter.name, (parameter.shape, values))
        };
        let mut all: Tensors = all_parameters(&model).into_iter().map(with_values).collect();
        imported(&config, &all, false).expect("whole");
        let name = "model.layers.0.mlp.experts.1.down_proj.weight";
        let (_, values) = all.remove(name).expect("there");
        let error = imported(&config, &all, false).expect_err("two of three");
        assert!(
            error.contains(name) && error.contains("the number of layers or experts"),
            "{error}"
        );
        all.insert("model.layers.0.mlp.experts.down_proj".to_owned(), (vec![8, 4], values));
        let error = imported(&config, &all, false).expect_err("fused");
        assert!(error.contains("its experts are one tensor"), "{error}");
    }

    #[test]
    fn a_broken_number_is_named_by_its_tensor() {
        let mut all = tensors(false);
        all.get_mut("model.layers.0.mlp.up_proj.weight").expect("there").1[3] = f32::NAN;
        let error = imported(&config(false), &all, false).expect_err("NaN");
        assert!(
            error.contains("model.layers.0.mlp.up_proj.weight has a number that is NaN"),
            "{error}"
        );
    }
}
