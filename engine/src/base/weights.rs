//! Reads a stage's weights from the files of a base.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype as FileDtype;
use shoal_protocol::ids::{ContentHash, Stage};
use shoal_protocol::manifest::{Dtype, Manifest, Quantisation, Training, example};

use super::index::{BaseFile, BaseIndex};
use super::{BaseError, Result, what};
use crate::data::safetensors_file::{FileProblem, FileTensor, SafetensorsFile};
use crate::model::boundary;
use crate::model::parameters::{Parameter, parameter_count, parameters, source_of};
use crate::numeric::nf4;
use crate::weights::init::initial_weights;

/// Finds a file by its hash.
pub(crate) type Find = dyn Fn(&ContentHash) -> Option<PathBuf> + Send + Sync;

/// The files of a base, as far as they are here.
#[derive(Clone)]
pub struct BaseFiles {
    /// The index.
    pub index: Arc<BaseIndex>,
    find: Arc<Find>,
}

impl fmt::Debug for BaseFiles {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("BaseFiles").field("index", &self.index).finish_non_exhaustive()
    }
}

impl BaseFiles {
    /// Files that `find` finds.
    pub fn new(
        index: Arc<BaseIndex>,
        find: impl Fn(&ContentHash) -> Option<PathBuf> + Send + Sync + 'static,
    ) -> Self {
        Self { index, find: Arc::new(find) }
    }

    /// The place of a file, if it is here.
    #[must_use]
    pub fn find(&self, file: &BaseFile) -> Option<PathBuf> {
        (self.find)(&file.hash)
    }

    /// The files of a base's folder.
    ///
    /// # Errors
    /// If the folder is no base.
    pub fn in_folder(folder: &Path) -> Result<Self> {
        let (index, _) = BaseIndex::read(folder)?;
        let all = index.weights.iter().chain(&index.others);
        let paths: Vec<_> = all.map(|file| (file.hash, folder.join(&file.name))).collect();
        let find = move |hash: &ContentHash| {
            paths.iter().find(|(known, _)| known == hash).map(|(_, path)| path.clone())
        };
        Ok(Self::new(Arc::new(index), find))
    }

    /// A run in one stage from this base. Passes for text depend on nothing else of a run.
    pub(crate) fn manifest(&self) -> Manifest {
        let run = example::small();
        let training = Training { stages: 1, dtype: Dtype::F32, staleness: 0, ..run.training };
        Manifest { model: self.index.model.clone(), training, ..run }
    }

    /// Reads all files and compares their bytes with the hashes in the index.
    ///
    /// # Errors
    /// If a file is missing, cannot be read, or is not the one that was imported.
    pub fn verify(&self) -> Result<()> {
        for file in self.index.weights.iter().chain(&self.index.others) {
            let missing = || BaseError::MissingShard { path: PathBuf::from(&file.name) };
            let path = self.find(file).ok_or_else(missing)?;
            let mut hasher = blake3::Hasher::new();
            hasher.update_mmap(&path).map_err(BaseError::io(&path))?;
            if ContentHash::from(hasher.finalize()) != file.hash {
                return Err(BaseError::damaged(&path, "it has changed since the import"));
            }
        }
        Ok(())
    }
}

/// Opens a file of weights.
pub(super) fn open(path: &Path) -> Result<SafetensorsFile> {
    SafetensorsFile::open(path).map_err(|problem| match problem {
        FileProblem::Io(error) if error.kind() == ErrorKind::NotFound => {
            BaseError::MissingShard { path: path.to_owned() }
        }
        FileProblem::Io(error) => BaseError::io(path)(error),
        FileProblem::Damaged(reason) => {
            let pointer =
                what::beginning(path).and_then(|bytes| what::refuse_pointer(path, &bytes));
            pointer.err().unwrap_or_else(|| BaseError::damaged(path, reason))
        }
    })
}

/// The files with the model's weights in a stage.
pub(crate) struct StageFiles {
    files: Vec<SafetensorsFile>,
    is_tied: bool,
}

impl StageFiles {
    /// Opens the files.
    pub(crate) fn open(base: &BaseFiles, manifest: &Manifest, stage: Stage) -> Result<Self> {
        let mut files = Vec::new();
        for file in base.index.files_of(manifest, stage) {
            let missing = || BaseError::MissingShard { path: PathBuf::from(&file.name) };
            files.push(open(&(base.find)(&file.hash).ok_or_else(missing)?)?);
        }
        Ok(Self { files, is_tied: manifest.model.block.tied })
    }

    fn tensor(&self, name: &str) -> Option<(&SafetensorsFile, FileTensor<'_>)> {
        self.files.iter().find_map(|file| Some((file, file.tensor(name)?)))
    }

    /// The section of a matrix that the base has packed.
    pub(crate) fn section(&self, parameter: &Parameter) -> Result<Option<&[u8]>> {
        let found = parameter.is_packable().then(|| self.tensor(&packed_name(&parameter.name)));
        let Some((file, tensor)) = found.flatten() else { return Ok(None) };
        let length = nf4::section_bytes(parameter.len());
        if tensor.dtype != FileDtype::U8 || tensor.shape != [length] {
            let expected = format!("U8 [{length}]");
            return Err(wrong_tensor(file.path(), &parameter.name, tensor, &expected));
        }
        Ok(Some(tensor.data))
    }

    /// The values of a weight.
    pub(crate) fn values(&self, parameter: &Parameter) -> Result<Vec<f32>> {
        if let Some(section) = self.section(parameter)? {
            return Ok(nf4::values_in(Dtype::F32, section, parameter.len()));
        }
        let name = source_of(parameter, self.is_tied);
        let Some((file, tensor)) = self.tensor(name) else {
            let (path, tensor) = (PathBuf::from("the base"), parameter.name.clone());
            return Err(BaseError::MissingTensor {
                path,
                tensor,
                remedy: "import the model again",
            });
        };
        if tensor.shape != parameter.shape || size_of_dtype(tensor.dtype).is_none() {
            let expected = expected(&parameter.shape);
            return Err(wrong_tensor(file.path(), &parameter.name, tensor, &expected));
        }
        Ok(widened(tensor.dtype, tensor.data, parameter.len()))
    }
}

/// The flat vector of a stage at version 0, in a run that trains all weights.
pub(crate) fn stage_weights(
    base: &BaseFiles,
    manifest: &Manifest,
    stage: Stage,
) -> Result<Vec<f32>> {
    let files = StageFiles::open(base, manifest, stage)?;
    // Trained boundaries are no part of a base: they are drawn as always.
    let mut flat = match manifest.model.trained_boundary() {
        Some(_) => initial_weights(manifest, stage),
        None => vec![0.0; parameter_count(manifest, stage)],
    };
    for parameter in parameters(manifest, stage) {
        if !boundary::owns(&parameter.name) {
            flat[parameter.range()].copy_from_slice(&files.values(&parameter)?);
        }
    }
    Ok(flat)
}

/// The error of a tensor with another shape or dtype.
pub(super) fn wrong_tensor(
    path: &Path,
    name: &str,
    found: FileTensor<'_>,
    expected: &str,
) -> BaseError {
    BaseError::WrongTensor {
        path: path.to_owned(),
        tensor: name.to_owned(),
        found: format!("{:?} {:?}", found.dtype, found.shape),
        expected: expected.to_owned(),
    }
}

/// What a weight that is not packed is.
pub(super) fn expected(shape: &[usize]) -> String {
    format!("F32, BF16 or F16 {shape:?}")
}

/// The name of a packed matrix in a base's file.
pub(super) fn packed_name(weight: &str) -> String {
    format!("{weight}.{}", Quantisation::Nf4.name())
}

/// Bytes of a number, if the dtype is one of weights.
pub(super) fn size_of_dtype(dtype: FileDtype) -> Option<usize> {
    match dtype {
        FileDtype::F32 => Some(4),
        FileDtype::BF16 | FileDtype::F16 => Some(2),
        _ => None,
    }
}

/// Numbers in f32, which is exact.
///
/// # Panics
/// If the dtype is none of weights.
pub(super) fn widened(dtype: FileDtype, data: &[u8], count: usize) -> Vec<f32> {
    let mut to = vec![0.0; count];
    let halves = || data.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
    match dtype {
        FileDtype::F32 => {
            let words = data.as_chunks::<4>().0;
            to.iter_mut().zip(words).for_each(|(to, word)| *to = f32::from_le_bytes(*word));
        }
        FileDtype::BF16 => {
            to.iter_mut().zip(halves()).for_each(|(to, bits)| {
                *to = f32::from_bits(u32::from(bits) << 16);
            });
        }
        FileDtype::F16 => {
            to.iter_mut().zip(halves()).for_each(|(to, bits)| {
                *to = half::f16::from_bits(bits).to_f32();
            });
        }
        other => panic!("{other:?} is no dtype of weights"),
    }
    to
}

/// The name of the file with a weight, without `.safetensors`.
pub(super) fn file_of(parameter: &Parameter) -> String {
    let layer = parameter.name.strip_prefix("model.layers.");
    let layer = layer.and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    match layer {
        Some(layer) => format!("layer-{layer:05}"),
        None if parameter.name.starts_with("model.embed") => "embedding".to_owned(),
        None => "head".to_owned(),
    }
}
