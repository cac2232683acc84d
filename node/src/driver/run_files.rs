//! The files that the manifest names by their content: the data, for the hosts of the first stage, and
//! the base and the checkpoint that the run goes on from, each stage's part for its hosts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use shoal_data::batch::Batches;
use shoal_data::prepared::{INDEX_FILE, Index, SHARDS_FOLDER, ShardEntry};
use shoal_engine::base::BaseFile;
use shoal_engine::{BaseFiles, BaseIndex, Origin, StartFiles, TokenFile};
use shoal_hub::{Hub, HubConfig};
use shoal_protocol::ids::{ContentHash, PeerId, Stage, StageSpan, Step};
use shoal_protocol::manifest::{Base, Data, Manifest, Prepared, Start};
use shoal_protocol::message::View;
use shoal_protocol::net::transport::Transport;
use shoal_protocol::units::Bytes;
use tokio::sync::watch;

use super::chunks::is_partial;
use super::engine_waits::EngineWaits;
use super::resume::paths_in;
use super::samples::{PreparedSamples, Samples};
use crate::data_dir::Files;

/// Attempts at all holders, and the time between two.
const ROUNDS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// The folders of the token file, of prepared data, of the base and of the checkpoint that the run goes
/// on from, in the data directory.
const TOKENS: &str = "tokens";
pub(super) const SHARDS: &str = "shards";
const BASE: &str = "base";
const START: &str = "start";

/// The peers that may have files of the run.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileHolders {
    hosts: Vec<(PeerId, StageSpan)>,
    /// Archives, which fetch everything, and the coordinator.
    others: Vec<PeerId>,
}

impl FileHolders {
    /// The other members of a run.
    pub(crate) fn new(view: &View, me: PeerId, coordinator: Option<PeerId>) -> Self {
        let members = || view.members.iter().filter(|record| record.member.peer != me);
        let archives = members().filter(|record| record.duties.archive);
        let others = archives.map(|record| record.member.peer).chain(coordinator);
        Self {
            hosts: members().map(|record| (record.member.peer, record.span)).collect(),
            others: others.filter(|peer| *peer != me).collect(),
        }
    }

    /// Peers that may have any file.
    pub(crate) fn any(peers: Vec<PeerId>) -> Self {
        Self { hosts: Vec::new(), others: peers }
    }

    /// The peers that may have files of these stages.
    fn of(&self, stages: &[Stage]) -> Vec<PeerId> {
        let has = |span: &StageSpan| stages.iter().any(|stage| span.contains(*stage));
        let hosts = self.hosts.iter().filter(|(_, span)| has(span));
        let mut all: Vec<PeerId> = hosts.map(|(peer, _)| *peer).collect();
        for peer in &self.others {
            if !all.contains(peer) {
                all.push(*peer);
            }
        }
        all
    }
}

/// A file to be fetched.
pub(super) struct Wanted<'a> {
    pub(super) hash: ContentHash,
    pub(super) length: u64,
    pub(super) path: &'a Path,
    /// For messages.
    pub(super) what: &'static str,
    /// The path in a mirror, if mirrors have such files.
    pub(super) mirrored: Option<String>,
}

/// The files that the manifest names, here or at other peers.
#[derive(Clone)]
pub(crate) struct RunFiles {
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) data_dir: PathBuf,
    pub(crate) files: Files,
    /// Web servers with a copy of the prepared data's folder.
    pub(crate) mirrors: Arc<[String]>,
    /// Shards that stay on the disk, besides those that are read soon.
    pub(crate) cache: Bytes,
    pub(crate) transport: Option<Transport>,
    pub(crate) holders: watch::Receiver<FileHolders>,
}

impl RunFiles {
    fn place(&self, folder: &str, hash: ContentHash, extension: &str) -> PathBuf {
        let own = || self.data_dir.join(folder).join(format!("{hash}.{extension}"));
        self.files.path(&hash).unwrap_or_else(own)
    }

    /// Fetches what a host of the first stage needs to begin: the token file, or the index of prepared
    /// data. Nothing is fetched that is here.
    ///
    /// # Errors
    /// When no holder gives it.
    pub(crate) async fn obtain_data(&self) -> anyhow::Result<()> {
        if let Data::Text(tokens) = &self.manifest.data {
            let length = tokens.count.saturating_mul(tokens.width.size() as u64);
            let (hash, path) = (tokens.hash, self.place(TOKENS, tokens.hash, "tokens"));
            forget_others(&self.data_dir.join(TOKENS), &path);
            let wanted = Wanted { hash, length, path: &path, what: "the text", mirrored: None };
            self.obtain(&[Stage(0)], wanted).await?;
        }
        for (source, data) in self.manifest.data.prepared().into_iter().enumerate() {
            let (hash, length, what) = (data.index, data.bytes, "the index of the data");
            let path = self.place(SHARDS, data.index, "json");
            let mirrored = Some(self.mirrored(source, INDEX_FILE));
            self.obtain(&[Stage(0)], Wanted { hash, length, path: &path, what, mirrored }).await?;
        }
        Ok(())
    }

    /// Opens the samples.
    ///
    /// # Errors
    /// When the token file or index is missing, or another file.
    pub(crate) fn open_samples(&self, waits: &EngineWaits) -> anyhow::Result<Samples> {
        match &self.manifest.data {
            Data::Text(tokens) => {
                let path = self.place(TOKENS, tokens.hash, "tokens");
                let file = TokenFile::open(&path, tokens)?;
                self.files.offer(tokens.hash, path);
                Ok(Samples::Text(shoal_engine::Samples::new(&self.manifest, file)))
            }
            Data::Prepared(_) | Data::Mixture(_) => {
                let indexes = self.manifest.data.prepared().into_iter();
                let indexes =
                    indexes.map(|data| self.open_index(data)).collect::<Result<_, _>>()?;
                let batches = Batches::new(&self.manifest, indexes);
                let samples = PreparedSamples::new(batches, self.clone(), waits.clone());
                Ok(Samples::Prepared(Box::new(samples)))
            }
        }
    }

    /// Opens the index of prepared data, and offers it to others.
    fn open_index(&self, data: &Prepared) -> anyhow::Result<Index> {
        let path = self.place(SHARDS, data.index, "json");
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        let index = Index::parse(&bytes)?;
        let found = index.prepared();
        anyhow::ensure!(found == *data, "{} is another run's index", path.display());
        self.files.offer(data.index, path);
        Ok(index)
    }

    /// Fetches the source of the chat template that the data was written with, if its model has another.
    ///
    /// # Errors
    /// Like [`Self::obtain_data`] and [`Self::open_samples`].
    pub(crate) async fn obtain_chat_template(&self) -> anyhow::Result<Option<String>> {
        // All data sets of a mixture have one template.
        let Some(data) = self.manifest.data.prepared().into_iter().next() else { return Ok(None) };
        self.obtain_data().await?;
        Ok(self.open_index(data)?.chat_template)
    }

    /// The place of a shard in the data directory.
    pub(super) fn own_shard(&self, hash: ContentHash) -> PathBuf {
        self.data_dir.join(SHARDS).join(format!("{hash}.shard"))
    }

    /// Whether a shard is on this machine.
    pub(super) fn has_shard(&self, hash: ContentHash) -> bool {
        self.place(SHARDS, hash, "shard").exists()
    }

    /// The path in a mirror of a file of a data set: of a mixture, a mirror has a folder for each source.
    fn mirrored(&self, source: usize, file: &str) -> String {
        let named = self.manifest.data.mixture().and_then(|mixture| mixture.sources.get(source));
        named.map_or_else(|| file.to_owned(), |source| format!("{}/{file}", source.name))
    }

    /// Fetches a shard of a data set with this index, or makes it, unless it is here, and returns its path.
    ///
    /// # Errors
    /// When no holder gives it.
    pub(super) async fn obtain_shard(
        &self,
        (source, index): (usize, &Index),
        entry: &ShardEntry,
    ) -> anyhow::Result<PathBuf> {
        if let Some(place) = index.streamed(entry) {
            return self.obtain_streamed(index, place).await;
        }
        let layout = index.layout();
        let length = entry.rows.saturating_mul(layout.row_bytes() as u64);
        let path = self.place(SHARDS, entry.hash, "shard");
        let what = "a shard of the data";
        let hash = entry.hash;
        let mirrored = Some(self.mirrored(source, &format!("{SHARDS_FOLDER}/{hash}.shard")));
        self.obtain(&[Stage(0)], Wanted { hash, length, path: &path, what, mirrored }).await?;
        Ok(path)
    }

    /// Fetches the files that a stage's weights at a version come from, unless they are here: those of
    /// the base if the stage lacks its weights (`lacks_base`), and at the first version those of the
    /// checkpoint that the run goes on from.
    ///
    /// # Errors
    /// When no holder gives one, or it is not the one of the manifest.
    pub(crate) async fn obtain_origin(
        &self,
        stage: Stage,
        version: Step,
        lacks_base: bool,
    ) -> anyhow::Result<Origin> {
        let mut origin = Origin::default();
        if lacks_base && self.manifest.needs_base(version) {
            origin.base = self.obtain_base(stage).await?;
        }
        if self.manifest.is_initial(version) {
            origin.start = self.obtain_start(stage).await?;
        }
        Ok(origin)
    }

    /// `None` if the run starts from no base.
    async fn obtain_base(&self, stage: Stage) -> anyhow::Result<Option<BaseFiles>> {
        let Some(base) = self.base_index(stage).await? else { return Ok(None) };
        for file in base.index.files_of(&self.manifest, stage) {
            self.obtain_base_file(stage, file).await?;
        }
        Ok(Some(base))
    }

    /// `None` if the run begins at step 0.
    async fn obtain_start(&self, stage: Stage) -> anyhow::Result<Option<StartFiles>> {
        let Some(Start { checkpoint, bytes, .. }) = self.manifest.start else { return Ok(None) };
        let what = "the description of the checkpoint to go on from";
        let path = self.place(START, checkpoint, "json");
        let wanted = Wanted { hash: checkpoint, length: bytes, path: &path, what, mirrored: None };
        self.obtain(&[stage], wanted).await?;
        let text = std::fs::read(&path).with_context(|| format!("{}", path.display()))?;
        anyhow::ensure!(ContentHash::of(&text) == checkpoint, "{} is damaged", path.display());
        let files = self.files.clone();
        let start = StartFiles::new(self.manifest.clone(), &text, move |hash| files.path(hash))
            .map_err(|reason| anyhow::anyhow!("the checkpoint to go on from: {reason}"))?;
        for file in start.files_of(stage)? {
            let (hash, length) = (file.hash, file.bytes);
            let path = self.place(START, hash, "part");
            let what = "a file of the checkpoint to go on from";
            let wanted = Wanted { hash, length, path: &path, what, mirrored: None };
            self.obtain(&start.stages_with(file), wanted).await?;
        }
        Ok(Some(start))
    }

    /// Fetches the base's configuration and tokenizer, for a checkpoint.
    ///
    /// # Errors
    /// Like [`Self::obtain_base`].
    pub(crate) async fn obtain_base_description(&self) -> anyhow::Result<Option<BaseFiles>> {
        let Some(base) = self.base_index(Stage(0)).await? else { return Ok(None) };
        for file in &base.index.others {
            self.obtain_base_file(Stage(0), file).await?;
        }
        Ok(Some(base))
    }

    async fn base_index(&self, stage: Stage) -> anyhow::Result<Option<BaseFiles>> {
        let Some(Base { index, bytes, .. }) = self.manifest.model.base else { return Ok(None) };
        let what = "the index of the base";
        let path = self.place(BASE, index, "json");
        let wanted = Wanted { hash: index, length: bytes, path: &path, what, mirrored: None };
        self.obtain(&[stage], wanted).await?;
        let text = std::fs::read(&path).with_context(|| format!("{}", path.display()))?;
        anyhow::ensure!(ContentHash::of(&text) == index, "{} is damaged", path.display());
        let parsed =
            BaseIndex::parse(&text).map_err(|reason| anyhow::anyhow!("{what}: {reason}"))?;
        anyhow::ensure!(
            parsed.fits(&self.manifest.model),
            "the base has another shape than the manifest: it is not the base of this run"
        );
        let files = self.files.clone();
        Ok(Some(BaseFiles::new(Arc::new(parsed), move |hash| files.path(hash))))
    }

    async fn obtain_base_file(&self, stage: Stage, file: &BaseFile) -> anyhow::Result<()> {
        let (hash, length) = (file.hash, file.bytes);
        let path = self.place(BASE, hash, "part");
        let what = "a file of the base";
        self.obtain(&[stage], Wanted { hash, length, path: &path, what, mirrored: None }).await
    }

    /// Fetches a file from a mirror, or from a peer that has it because it hosts one of these stages, unless
    /// it is here, and offers it to others.
    pub(super) async fn obtain(&self, stages: &[Stage], wanted: Wanted<'_>) -> anyhow::Result<()> {
        let Wanted { hash, length, path, what, .. } = wanted;
        if !path.exists() && (self.transport.is_some() || !self.mirrors.is_empty()) {
            tracing::info!(%hash, length, "fetching {what}");
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("{} cannot be made", folder.display()))?;
            }
            self.fetch(stages, &wanted).await?;
        }
        anyhow::ensure!(path.exists(), "{what} is nowhere: {} is missing", path.display());
        self.files.offer(hash, path.to_owned());
        Ok(())
    }

    async fn fetch(&self, stages: &[Stage], wanted: &Wanted<'_>) -> anyhow::Result<()> {
        let Wanted { hash, length, path, what, .. } = wanted;
        let mut fetched = Ok(());
        for round in 0..ROUNDS {
            if round > 0 {
                // A holder may be about to come back.
                tokio::time::sleep(PAUSE).await;
            }
            if self.fetch_mirrored(wanted).await {
                return Ok(());
            }
            let Some(transport) = &self.transport else {
                anyhow::bail!("{what} cannot be fetched: no mirror gives it");
            };
            let holders = self.holders.borrow().of(stages);
            anyhow::ensure!(!holders.is_empty(), "{what} cannot be fetched: no known peer has it");
            fetched = transport.fetch_file(&holders, *hash, *length, path).await;
            if fetched.is_ok() {
                break;
            }
        }
        fetched.with_context(|| format!("{what} cannot be fetched"))
    }

    /// Fetches a file from the first mirror that gives it; returns whether one does.
    async fn fetch_mirrored(&self, wanted: &Wanted<'_>) -> bool {
        let Some(name) = &wanted.mirrored else { return false };
        for mirror in self.mirrors.iter() {
            let url = format!("{}/{name}", mirror.trim_end_matches('/'));
            let (hash, length, path) = (wanted.hash.0, wanted.length, wanted.path.to_owned());
            let fetch = tokio::task::spawn_blocking({
                let url = url.clone();
                move || {
                    let mut config = HubConfig::from_environment()?;
                    // The next mirror, or a peer, is asked instead.
                    config.retry.attempts = 1;
                    Hub::new(config)?.fetch_url(&url, &path, hash, length, &mut |_| {})
                }
            });
            match fetch.await {
                Ok(Ok(())) => return true,
                Ok(Err(error)) => tracing::warn!(%error, "a mirror does not give a file"),
                Err(error) => tracing::warn!(%error, "a download panicked"),
            }
        }
        false
    }
}

impl std::fmt::Debug for RunFiles {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RunFiles").field("data_dir", &self.data_dir).finish_non_exhaustive()
    }
}

/// Removes the rests of fetches of other files.
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
