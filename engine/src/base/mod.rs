//! A base: an imported model, as a folder of files that are named by their content.
//!
//! ```text
//! base.json                 family, shape, and every file's size and hash
//! embedding.safetensors     the first weights
//! layer-00000.safetensors   those of each decoder layer
//! head.safetensors          the last norm and the head
//! config.json, tokenizer.json, tokenizer_config.json, ...   as imported
//! ```
//!
//! A packed matrix ([`crate::numeric::nf4`]) is a tensor of bytes, under the name of its weight with the format behind it.
//!
//! The weights have the names of this engine ([`crate::model::parameters`]) and the dtype of the import. A
//! manifest names a base by the hash of `base.json`, so the cut into stages is free, and a peer needs
//! only the files of its stage.

mod adapter_export;
mod export;
mod import;
mod index;
mod model_files;
mod mxfp4;
mod quantised;
mod staging;
mod weights;
mod what;

pub use adapter_export::export_adapter;
pub use export::{ExportDtype, export, export_base};
pub use import::{ImportOptions, Imported, describe, import, import_with};
#[cfg(test)]
pub(crate) use index::DECODER;
pub use index::{BaseFile, BaseIndex, INDEX};
pub use weights::BaseFiles;
pub(crate) use weights::{Find, StageFiles, stage_weights};

pub use crate::base_error::{BaseError, ConfigJsonError};

type Result<T> = std::result::Result<T, BaseError>;
