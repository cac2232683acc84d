//! Facts of one life in a run that do not change.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use shoal_protocol::ids::Member;
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Sealer, Signatures};
use shoal_protocol::net::transport::Transport;
use shoal_protocol::units::{Bytes, Moment};
use tokio::sync::watch;

use super::archive::Archive;
use super::peer_names::PeerNames;
use super::run_files::{FileHolders, RunFiles};
use crate::data_dir::Files;

/// Identity, clock and places of one life in a run. Every component reads it, none writes it.
pub(super) struct Context {
    pub(super) manifest: Arc<Manifest>,
    /// This peer in this life.
    pub(super) me: Member,
    /// The folder for this peer's files.
    pub(super) data_dir: PathBuf,
    /// The place of whole checkpoints, if this peer archives them.
    pub(super) archive: Option<Archive>,
    /// The files that other peers may fetch from this one.
    pub(super) files: Files,
    /// Web servers with prepared data.
    pub(super) mirrors: Arc<[String]>,
    /// Disk for shards that no step reads soon.
    pub(super) data_cache: Bytes,
    /// The names of the members, for log lines and events.
    pub(super) names: PeerNames,
    /// The key of this peer, which signs for coordinators and checks the signatures of anchors.
    pub(super) keys: Arc<dyn Signatures>,
    /// The data plane; `None` in a run on one machine alone.
    pub(super) transport: Option<Transport>,
    /// The peers that may have files of the run.
    pub(super) file_holders: watch::Receiver<FileHolders>,
    /// The zero of every [`Moment`].
    pub(super) clock: Instant,
}

impl Context {
    /// Returns the time since this life began.
    pub(super) fn now(&self) -> Moment {
        Moment(self.clock.elapsed())
    }

    /// Seals with the key of this peer.
    pub(super) fn sealer(&self) -> Sealer {
        Sealer::new(self.manifest.run_id(), self.keys.clone())
    }

    /// Converts a moment of this life to the system's clock.
    pub(super) fn instant(&self, moment: Moment) -> Instant {
        self.clock + moment.0
    }

    /// Returns the files that the manifest names.
    pub(super) fn run_files(&self) -> RunFiles {
        RunFiles {
            manifest: self.manifest.clone(),
            data_dir: self.data_dir.clone(),
            files: self.files.clone(),
            mirrors: self.mirrors.clone(),
            cache: self.data_cache,
            transport: self.transport.clone(),
            holders: self.file_holders.clone(),
        }
    }
}
