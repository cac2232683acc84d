//! A small blocking client of the Hugging Face Hub.
//!
//! [`Hub`] resolves an `hf:` [`Reference`], downloads the files of a snapshot into the cache that
//! Python's `huggingface_hub` uses, pushes a folder as one commit, and fetches content-addressed
//! files from plain mirrors. Every file is resumed after a failure and checked against its hash.
//! Every wait has an end: see [`Timeouts`] and [`RetryPolicy`].

mod cache;
mod client;
mod config;
mod digest;
mod download;
mod error;
mod folder;
mod http;
mod lfs;
mod lock;
mod mirror;
mod origin;
mod pattern;
mod progress;
mod push;
mod reference;
mod refusal;
mod retry;
mod transfer;

pub use client::{Hub, RemoteFile};
pub use config::{HubConfig, RetryPolicy, Timeouts, Token};
pub use digest::FileHash;
pub use download::{Snapshot, SnapshotFile};
pub use error::HubError;
pub use pattern::Pattern;
pub use progress::Progress;
pub use push::{Push, Pushed};

pub use reference::{Reference, ReferenceError, Repository, RepositoryKind};
