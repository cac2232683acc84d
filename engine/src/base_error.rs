//! Errors of imported models.

use std::path::{Path, PathBuf};

/// Why a base cannot be imported, read or exported.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    /// The file system failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// The folder has no model.
    #[error("{path} has no config.json: {found}", path = path.display())]
    NotAModel {
        /// The folder.
        path: PathBuf,
        /// What it has instead, and what would do.
        found: String,
    },
    /// The folder has no file of weights that is read.
    #[error("{path} has no model.safetensors and no model.safetensors.index.json: {found}",
            path = path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// What it has instead, and what would do.
        found: String,
    },
    /// A pointer in place of a file.
    #[error("{path} is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`, or \
             import the model as hf:OWNER/NAME", path = path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// A weight is infinite or NaN.
    #[error("{path}: {tensor} has a number that is NaN or infinite: the model is broken, import \
             another version of it", path = path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Two tensors for one weight.
    #[error("{path} has the tensor {tensor}, which another tensor or file has as well: remove the \
             one that is not the model's", path = path.display())]
    TwiceTensor {
        /// The file with the second.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The folder is no base.
    #[error("{path} is no base: `shoal import MODEL -o {path}` makes one", path = path.display())]
    NotABase {
        /// The folder.
        path: PathBuf,
    },
    /// The configuration asks for something that is not computed here.
    #[error("{path}: {error}", path = path.display())]
    Config {
        /// The folder.
        path: PathBuf,
        /// The key and its value.
        error: ConfigJsonError,
    },
    /// The shape is out of range.
    #[error("{path}: {reason}", path = path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The value and its range.
        reason: String,
    },
    /// A file is damaged.
    #[error("{path} is damaged: {reason}; fetch or import the model again", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damage.
        reason: String,
    },
    /// A file of the model's folder is a link to a file elsewhere.
    #[error("{path} is a link to {target}, outside of the model's folder: copy the file there if it belongs to the model",
            path = path.display(), target = target.display())]
    Link {
        /// The link.
        path: PathBuf,
        /// The file that it leads to.
        target: PathBuf,
    },
    /// A file of weights that the index of the model names is missing.
    #[error("{path} is missing: fetch the whole model", path = path.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
    },
    /// No file has a weight.
    #[error("no file of {path} has the tensor {tensor}: {remedy}", path = path.display())]
    MissingTensor {
        /// The folder or file.
        path: PathBuf,
        /// Its name there.
        tensor: String,
        /// What would do.
        remedy: &'static str,
    },
    /// A weight has another shape or dtype than the configuration implies.
    #[error("{tensor} in {path} is {found} instead of {expected}: config.json and weights differ",
            path = path.display())]
    WrongTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype and shape.
        found: String,
        /// The dtypes and shape that are expected.
        expected: String,
    },
    /// A matrix of a quantised model is not in the format that is read.
    #[error("{tensor} in {path} is not in NF4 with double quantisation: {reason}; import the unquantised model, with \
             --nf4 if it is to be packed", path = path.display())]
    NotNf4 {
        /// The file.
        path: PathBuf,
        /// The matrix.
        tensor: String,
        /// What it is.
        reason: String,
    },
    /// A tensor in MXFP4 that has no experts.
    #[error("{tensor} in {path} is in MXFP4, which is read of experts of GPT-OSS alone; import the unquantised model",
            path = path.display())]
    NotMxfp4 {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// Tensors that this engine would ignore.
    #[error("{path} has the tensor {tensor}, which a {family} model does not have: the model would \
             not be the one that was trained; {remedy}", path = path.display())]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The family.
        family: String,
        /// What would do.
        remedy: String,
    },
    /// The destination exists and is something else.
    #[error("{path} exists and is not empty: give another folder", path = path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// A checkpoint whose model no family has.
    #[error("{reason}")]
    NotExportable {
        /// The reason and a remedy.
        reason: String,
    },
}

impl BaseError {
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn damaged(path: &Path, reason: impl ToString) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// Why a `config.json` cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigJsonError {
    /// It is not an object.
    #[error("config.json is not a JSON object")]
    NotAnObject,
    /// A key is missing.
    #[error("config.json has no {key}: it is not the configuration of a decoder")]
    Missing {
        /// The key.
        key: String,
    },
    /// A value that is not computed here as `transformers` does.
    #[error("config.json has {key} = {value}, which is not supported: {remedy}")]
    Unsupported {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What to do.
        remedy: String,
    },
}
