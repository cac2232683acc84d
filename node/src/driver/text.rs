//! Gets the text to the peers that read it: those of the first stage.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use shoal_engine::{Samples, TokenFile};
use shoal_protocol::ids::PeerId;
use shoal_protocol::manifest::{Manifest, Tokens};
use shoal_protocol::net::transport::Transport;

use super::chunks::is_partial;
use super::home::Files;
use super::resume::paths_in;

/// How often each holder is asked, and how long in between.
const ROUNDS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// Opens the token file of a run; where it is not here yet, fetches it by its hash from one of the
/// `holders`.
///
/// # Errors
/// When it is neither here nor to be had, or is another file.
pub(crate) async fn obtain(
    manifest: &Manifest,
    folder: &Path,
    files: &Files,
    transport: Option<Transport>,
    holders: Vec<PeerId>,
) -> anyhow::Result<Samples> {
    let Tokens { hash, count, width, .. } = manifest.tokens;
    let folder = folder.join("tokens");
    let path = files.path(&hash).unwrap_or_else(|| folder.join(format!("{hash}.tokens")));
    if let (false, Some(transport)) = (path.exists(), transport) {
        let length = count.saturating_mul(width.size() as u64);
        tracing::info!(%hash, length, "fetching the text");
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        anyhow::ensure!(
            !holders.is_empty(),
            "the text cannot be fetched: nobody is known who has it"
        );
        forget_others(&folder, &path);
        let mut fetched = Ok(());
        for round in 0..ROUNDS {
            if round > 0 {
                // Who has it may be about to come back.
                tokio::time::sleep(PAUSE).await;
            }
            fetched = transport.fetch_blob(&holders, hash, length, &path).await;
            if fetched.is_ok() {
                break;
            }
        }
        fetched.context("the text cannot be fetched")?;
    }
    let file = TokenFile::open(&path, &manifest.tokens)?;
    files.offer(hash, path);
    Ok(Samples::new(manifest, file))
}

/// Removes what is left of fetches of other texts.
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
