//! Fetches the token file for the peers that read it: the hosts of the first stage.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use shoal_engine::{Samples, TokenFile};
use shoal_protocol::ids::PeerId;
use shoal_protocol::manifest::{Manifest, Tokens};
use shoal_protocol::net::transport::Transport;

use super::chunks::is_partial;
use super::resume::paths_in;
use crate::data_dir::Files;

/// Attempts at all holders, and the time between two.
const ROUNDS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// The place of a run's token file, whether it is there or not.
#[derive(Debug, Clone)]
pub(crate) struct TokenFileSource {
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) data_dir: PathBuf,
    pub(crate) files: Files,
}

impl TokenFileSource {
    fn path(&self) -> PathBuf {
        let hash = self.manifest.tokens.hash;
        let own = || self.data_dir.join("tokens").join(format!("{hash}.tokens"));
        self.files.path(&hash).unwrap_or_else(own)
    }

    /// Opens the token file.
    ///
    /// # Errors
    /// When it is missing, or another file.
    pub(crate) fn open(&self) -> anyhow::Result<Samples> {
        let path = self.path();
        let file = TokenFile::open(&path, &self.manifest.tokens)?;
        self.files.offer(self.manifest.tokens.hash, path);
        Ok(Samples::new(&self.manifest, file))
    }

    /// Fetches the token file by its hash from one of the `holders`, unless it is here.
    ///
    /// # Errors
    /// When no holder gives it.
    pub(crate) async fn obtain(
        &self,
        transport: Option<Transport>,
        holders: Vec<PeerId>,
    ) -> anyhow::Result<()> {
        let Tokens { hash, count, width, .. } = self.manifest.tokens;
        let path = self.path();
        let Some(transport) = transport.filter(|_| !path.exists()) else { return Ok(()) };
        let length = count.saturating_mul(width.size() as u64);
        tracing::info!(%hash, length, "fetching the text");
        let folder = self.data_dir.join("tokens");
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        anyhow::ensure!(!holders.is_empty(), "the text cannot be fetched: no known peer has it");
        forget_others(&folder, &path);
        let mut fetched = Ok(());
        for round in 0..ROUNDS {
            if round > 0 {
                // A holder may be about to come back.
                tokio::time::sleep(PAUSE).await;
            }
            fetched = transport.fetch_file(&holders, hash, length, &path).await;
            if fetched.is_ok() {
                break;
            }
        }
        fetched.context("the text cannot be fetched")
    }
}

/// Removes the rests of fetches of other token files.
fn forget_others(folder: &Path, wanted: &Path) {
    let wanted = wanted.file_name().unwrap_or_default().to_string_lossy();
    for path in paths_in(folder).into_iter().filter(|path| is_partial(path)) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(&*wanted)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(path = %path.display(), %error, "not removed");
        }
    }
}
