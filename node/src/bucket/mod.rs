//! Archives in object stores: S3, Google Cloud Storage, Azure Blob Storage.
//!
//! [`url`] reads addresses, [`store`] is the client, [`layout`] finds checkpoints. [`upload`] and [`large_object`]
//! write them, [`download`] reads them, [`history`] marks the archive when a run is continued from it. A folder of
//! this machine can take the place of a bucket, so that an archive in either is read by the same code.

mod download;
mod error;
mod history;
mod large_object;
mod layout;
mod settings;
mod store;
#[cfg(test)]
mod tests;
mod upload;
pub mod url;

pub(crate) use download::{fetch_all, fetch_file, fetch_files, fetch_model, verify};
pub(crate) use error::BucketError;
pub(crate) use layout::{StoredCheckpoint, checkpoint_name};
pub(crate) use store::Bucket;
pub(crate) use upload::Upload;
pub use url::{ArchivePlace, BucketUrl, UrlError};
