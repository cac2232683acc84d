//! Shards of streamed data: a file of a repository is downloaded, and its rows are made here.

use std::path::{Path, PathBuf};

use anyhow::Context;
use shoal_data::prepared::Index;
use shoal_data::stream::{TOKENIZER_FOLDER, make_shard};
use shoal_hub::{Hub, HubConfig, Reference};
use shoal_protocol::ids::{ContentHash, Stage};

use super::run_files::{RunFiles, SHARDS, Wanted};

/// The folder of downloaded files and of rows on their way, in the data directory.
const STREAM: &str = "stream";

impl RunFiles {
    /// Makes the shard of a file of streamed data, unless it is here, and returns its path.
    ///
    /// # Errors
    /// If the repository does not give the file, or it cannot become rows.
    pub(super) async fn obtain_streamed(
        &self,
        index: &Index,
        place: usize,
    ) -> anyhow::Result<PathBuf> {
        let path = self.own_shard(index.train[place].hash);
        if path.exists() {
            return Ok(path);
        }
        let tokenizer = self.obtain_tokenizer(index).await?;
        let folder = self.data_dir.join(STREAM);
        for folder in [&folder, &self.data_dir.join(SHARDS)] {
            std::fs::create_dir_all(folder)
                .with_context(|| format!("{} cannot be made", folder.display()))?;
        }
        let make = tokio::task::spawn_blocking({
            let (index, path) = (index.clone(), path.clone());
            move || make(&index, place, (&tokenizer, &folder), &path)
        });
        make.await.context("making rows panicked")??;
        Ok(path)
    }

    /// The folder with the tokenizer's files, which are fetched unless they are here.
    async fn obtain_tokenizer(&self, index: &Index) -> anyhow::Result<PathBuf> {
        let folder =
            self.data_dir.join(SHARDS).join(format!("{}.{TOKENIZER_FOLDER}", index.hash()));
        let files = index.stream.iter().flat_map(|stream| &stream.tokenizer);
        for file in files {
            let path = folder.join(&file.name);
            if let Some(known) = self.files.path(&file.hash).filter(|_| !path.exists()) {
                std::fs::create_dir_all(&folder)
                    .and_then(|()| std::fs::copy(&known, &path))
                    .with_context(|| format!("{} cannot be copied", known.display()))?;
            }
            let (hash, length, what) = (file.hash, file.bytes, "a file of the tokenizer");
            let mirrored = Some(format!("{TOKENIZER_FOLDER}/{}", file.name));
            let wanted = Wanted { hash, length, path: &path, what, mirrored };
            self.obtain(&[Stage(0)], wanted).await?;
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            anyhow::ensure!(ContentHash::of(&bytes) == hash, "{} is damaged", path.display());
        }
        Ok(folder)
    }
}

/// Downloads a file and makes its shard; then the file goes.
fn make(
    index: &Index,
    place: usize,
    (tokenizer, folder): (&Path, &Path),
    to: &Path,
) -> anyhow::Result<()> {
    let stream = index.stream.as_ref().context("the data is not streamed")?;
    let file = &stream.files[place];
    let sha256 = file.sha256;
    let origin: Reference = stream.origin.parse().context("the origin of the data")?;
    // The ending says what the file is.
    let name = Path::new(&file.path).file_name().unwrap_or_default().to_string_lossy();
    let source = folder.join(format!("{sha256}-{name}"));
    tracing::info!(file = file.path, bytes = file.bytes, "fetching a file of the data");
    let hub = Hub::new(HubConfig::from_environment()?)?;
    let commit = (origin.repository(), origin.revision());
    hub.fetch_file(commit, &file.path, &source, (sha256.0, file.bytes), &mut |_| {})?;
    let scratch = folder.join(format!("{sha256}.rows"));
    make_shard(index, (place, &source), tokenizer, &scratch, to)?;
    std::fs::remove_file(&source).with_context(|| source.display().to_string())
}
