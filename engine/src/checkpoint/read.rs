//! Reads and verifies checkpoints.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use shoal_protocol::ids::{ContentHash, RunId, Stage, Step};
use shoal_protocol::manifest::Manifest;

use super::{
    CheckpointError, CheckpointFile, DESCRIPTION, Description, StageState, TensorHasher,
    optimizer_file, optimizer_tensors, weights_file,
};
use crate::data::safetensors_file::{
    FileProblem, FileTensor, HEADER_CAP, SafetensorsFile, is_finite,
};
use crate::model::parameters::{Parameter, parameters};
use crate::optimizer::layout_of_run;

type Result<T> = std::result::Result<T, CheckpointError>;

/// A checkpoint folder with its parsed description.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
    description: Description,
    /// The description as a file.
    file: CheckpointFile,
}

impl Checkpoint {
    /// Reads the description of a folder.
    ///
    /// # Errors
    /// If there is no checkpoint, or its description is damaged.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(DESCRIPTION);
        let length = match fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(CheckpointError::NotACheckpoint { path: folder.to_owned() });
            }
            other => other.map_err(CheckpointError::io(&path))?.len(),
        };
        if length > HEADER_CAP {
            return Err(CheckpointError::damaged(&path, format!("it has {length} bytes")));
        }
        let text = fs::read(&path).map_err(CheckpointError::io(&path))?;
        Self::from_index(folder, &text)
    }

    /// Parses the description of a checkpoint that is elsewhere; `folder` is its place, for errors.
    ///
    /// # Errors
    /// If the description is damaged.
    pub fn from_index(folder: &Path, text: &[u8]) -> Result<Self> {
        let path = folder.join(DESCRIPTION);
        let description =
            Description::parse(text).map_err(|reason| CheckpointError::damaged(&path, reason))?;
        let (name, hash) = (DESCRIPTION.to_owned(), ContentHash::of(text));
        let file = CheckpointFile { name, bytes: text.len() as u64, hash };
        Ok(Self { folder: folder.to_owned(), description, file })
    }

    /// The run of the checkpoint.
    #[must_use]
    pub fn run(&self) -> RunId {
        self.description.run
    }

    /// Version of the weights: the optimizer updates applied.
    #[must_use]
    pub fn step(&self) -> Step {
        self.description.step
    }

    /// The run's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.description.manifest
    }

    /// The description as a file, whose hash names the checkpoint.
    #[must_use]
    pub fn description(&self) -> &CheckpointFile {
        &self.file
    }

    /// All files except the description.
    #[must_use]
    pub fn files(&self) -> &[CheckpointFile] {
        &self.description.files
    }

    /// Checks that the description lists the files of every stage.
    ///
    /// # Errors
    /// The first problem.
    pub fn check_list(&self) -> Result<()> {
        let damaged = |reason| CheckpointError::damaged(&self.folder.join(DESCRIPTION), reason);
        let manifest = self.manifest();
        for stage in manifest.stages() {
            for name in [weights_file(manifest, stage), optimizer_file(manifest, stage)] {
                if !self.files().iter().any(|file| file.name == name) {
                    return Err(damaged(format!("it does not list {name}")));
                }
            }
        }
        Ok(())
    }

    /// The files of a stage: its weights and its optimizer state.
    #[must_use]
    pub fn stage_files(&self, stage: Stage) -> Vec<CheckpointFile> {
        let manifest = self.manifest();
        let names = [weights_file(manifest, stage), optimizer_file(manifest, stage)];
        self.files().iter().filter(|file| names.contains(&file.name)).cloned().collect()
    }

    /// Checks that every file is intact and that each weight is present once, in its shape, and finite.
    ///
    /// # Errors
    /// The first problem.
    pub fn verify(&self) -> Result<()> {
        self.check_list()?;
        for file in self.files() {
            self.verify_file(file)?;
        }
        for stage in self.manifest().stages() {
            let path = self.folder.join(weights_file(self.manifest(), stage));
            let (file, list) = (TensorFile::open(&path)?, parameters(self.manifest(), stage));
            let data = file.tensors(&[("", list.clone())])?.into_iter().flatten();
            let broken = list.iter().zip(data).find(|(_, data)| !is_finite(Dtype::F32, data));
            if let Some((parameter, _)) = broken {
                let reason = format!("{} has a number that is NaN or infinite", parameter.name);
                return Err(CheckpointError::damaged(&path, reason));
            }
            TensorFile::open(&self.folder.join(optimizer_file(self.manifest(), stage)))?
                .tensors(&optimizer_tensors(self.manifest(), stage))?;
        }
        Ok(())
    }

    fn verify_file(&self, file: &CheckpointFile) -> Result<()> {
        check_bytes(&self.folder.join(&file.name), file)
    }

    /// The checkpoint hash: that of names, shapes, dtypes and bytes of all weights in the byte
    /// order of names, independent of the cut into stages (the encoding is that of `TensorHasher`).
    ///
    /// # Errors
    /// If a file is damaged or does not fit the manifest.
    pub fn hash(&self) -> Result<ContentHash> {
        let manifest = self.manifest();
        let files = manifest
            .stages()
            .map(|stage| TensorFile::open(&self.folder.join(weights_file(manifest, stage))))
            .collect::<Result<Vec<_>>>()?;
        let mut all = BTreeMap::new();
        for (stage, file) in manifest.stages().zip(&files) {
            let lists = [("", parameters(manifest, stage))];
            let data = file.tensors(&lists)?.into_iter().flatten();
            let [(_, parameters)] = lists;
            for (parameter, data) in parameters.into_iter().zip(data) {
                all.insert(parameter.name, (parameter.shape, data));
            }
        }
        let mut hasher = TensorHasher::new("shoal checkpoint v1");
        for (name, (shape, data)) in &all {
            hasher.add(name, shape, data);
        }
        Ok(hasher.finish())
    }

    /// Weights of one stage.
    ///
    /// # Errors
    /// If a file is missing, damaged or does not fit the manifest.
    pub fn weights(&self, stage: Stage) -> Result<Vec<f32>> {
        read_weights(&self.folder, self.manifest(), stage)
    }

    /// Weights and optimizer state of one stage.
    ///
    /// # Errors
    /// If a file is missing, damaged or does not fit the manifest.
    pub fn stage(&self, stage: Stage) -> Result<StageState> {
        read_stage(&self.folder, self.manifest(), stage)
    }
}

/// Checks that the file at a path has the length and the hash of a checkpoint's file.
pub(super) fn check_bytes(path: &Path, file: &CheckpointFile) -> Result<()> {
    let found = fs::metadata(path).map_err(CheckpointError::io(path))?.len();
    if found != file.bytes {
        let reason = format!("it has {found} bytes instead of {}", file.bytes);
        return Err(CheckpointError::damaged(path, reason));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update_mmap(path).map_err(CheckpointError::io(path))?;
    if ContentHash::from(hasher.finalize()) != file.hash {
        return Err(CheckpointError::damaged(path, "its bytes have another hash"));
    }
    Ok(())
}

/// Weights and optimizer state of one stage, from the files that [`super::write_stage`] wrote.
///
/// # Errors
/// If a file is missing, damaged or does not fit the manifest.
pub fn read_stage(folder: &Path, manifest: &Manifest, stage: Stage) -> Result<StageState> {
    let rest = TensorFile::open(&folder.join(optimizer_file(manifest, stage)))?;
    let lists = optimizer_tensors(manifest, stage);
    let mut vectors: Vec<Vec<f32>> =
        rest.tensors(&lists)?.iter().map(|pieces| flat(pieces)).collect();
    let slots = layout_of_run(manifest, &parameters(manifest, stage));
    let stale_weights = vectors.split_off(slots.len());
    let slots = slots.iter().map(|layout| layout.slot).zip(vectors).collect();
    Ok(StageState { weights: read_weights(folder, manifest, stage)?, stale_weights, slots })
}

fn read_weights(folder: &Path, manifest: &Manifest, stage: Stage) -> Result<Vec<f32>> {
    let file = TensorFile::open(&folder.join(weights_file(manifest, stage)))?;
    let lists = file.tensors(&[("", parameters(manifest, stage))])?;
    Ok(lists.iter().flat_map(|pieces| flat(pieces)).collect())
}

fn flat(pieces: &[&[u8]]) -> Vec<f32> {
    let words = pieces.iter().flat_map(|piece| piece.as_chunks::<4>().0);
    words.map(|word| f32::from_le_bytes(*word)).collect()
}

/// A safetensors file of a checkpoint.
pub(super) struct TensorFile {
    path: PathBuf,
    file: SafetensorsFile,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = SafetensorsFile::open(path).map_err(|problem| match problem {
            FileProblem::Io(error) => CheckpointError::io(path)(error),
            FileProblem::Damaged(reason) => CheckpointError::damaged(path, reason),
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Data of exactly these tensors: for each list, whose names begin with its prefix.
    pub(super) fn tensors(&self, lists: &[(&str, Vec<Parameter>)]) -> Result<Vec<Vec<&[u8]>>> {
        let mismatch = |reason| CheckpointError::Mismatch { path: self.path.clone(), reason };
        let mut found = Vec::new();
        for (prefix, parameters) in lists {
            let of_list = parameters.iter().map(|parameter| self.tensor(prefix, parameter));
            found.push(of_list.collect::<Result<Vec<_>>>()?);
        }
        let count = self.file.names().len();
        let expected: usize = found.iter().map(Vec::len).sum();
        if count != expected {
            return Err(mismatch(format!("it has {count} tensors instead of {expected}")));
        }
        Ok(found)
    }

    fn tensor(&self, prefix: &str, parameter: &Parameter) -> Result<&[u8]> {
        let mismatch = |reason| CheckpointError::Mismatch { path: self.path.clone(), reason };
        let name = format!("{prefix}{}", parameter.name);
        let FileTensor { dtype, shape, data } =
            self.file.tensor(&name).ok_or_else(|| mismatch(format!("{name} is missing")))?;
        if dtype == Dtype::F32 && shape == parameter.shape {
            return Ok(data);
        }
        let expected = &parameter.shape;
        Err(mismatch(format!("{name} is {dtype:?} {shape:?} instead of F32 {expected:?}")))
    }
}
