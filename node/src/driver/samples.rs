//! The samples that a host of the first stage reads: from the token file, or from shards that are
//! fetched ahead of their use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use bytes::Bytes;
use shoal_data::batch::{BatchRow, Batches, SourceShard};
use shoal_data::prepared::{Shard, ShardEntry};
use shoal_engine::Batch;
use shoal_protocol::ids::{ContentHash, Microbatch, Step};
use tokio::task::JoinSet;

use super::engine_waits::EngineWaits;
use super::run_files::RunFiles;

/// Steps whose shards are fetched ahead.
const STEPS_AHEAD: u64 = 16;

/// The samples of a run.
#[derive(Debug)]
pub(crate) enum Samples {
    Text(shoal_engine::Samples),
    Prepared(Box<PreparedSamples>),
}

impl Samples {
    /// Inputs and labels of some rows of a microbatch.
    ///
    /// # Errors
    /// If a shard cannot be had.
    pub(crate) fn batch(
        &mut self,
        step: Step,
        microbatch: Microbatch,
        rows: Range<u64>,
    ) -> anyhow::Result<Batch> {
        match self {
            Self::Text(samples) => Ok(samples.batch_of(step, microbatch, rows)),
            Self::Prepared(samples) => samples.batch(step, microbatch, rows),
        }
    }
}

/// Samples of prepared data.
#[derive(Debug)]
pub(crate) struct PreparedSamples {
    batches: Batches,
    shards: ShardCache,
    /// The newest step that was read.
    step: Option<Step>,
}

impl PreparedSamples {
    pub(crate) fn new(batches: Batches, run_files: RunFiles, waits: EngineWaits) -> Self {
        let shards = ShardCache {
            run_files,
            waits,
            open: BTreeMap::new(),
            ahead: VecDeque::new(),
            fetching: None,
            task: JoinSet::new(),
            kept: BTreeSet::new(),
        };
        Self { batches, shards, step: None }
    }

    fn batch(
        &mut self,
        step: Step,
        microbatch: Microbatch,
        rows: Range<u64>,
    ) -> anyhow::Result<Batch> {
        if self.step.is_none_or(|newest| newest < step) {
            self.step = Some(step);
            let ahead = self.batches.shards(step, STEPS_AHEAD).into_iter();
            self.shards.expect(ahead.map(|shard| (shard.source, shard.entry.clone())).collect());
        }
        self.shards.fetch_next(&self.batches);
        let mut read = Vec::new();
        for BatchRow { shard, row } in self.batches.rows_of(step, microbatch, rows) {
            read.push(self.shards.open(shard, &self.batches)?.row(row)?);
        }
        let encoded = self.batches.encode(&read);
        Ok(Batch { inputs: Bytes::from(encoded.inputs), labels: Bytes::from(encoded.labels) })
    }
}

/// The shards of this machine.
#[derive(Debug)]
struct ShardCache {
    run_files: RunFiles,
    waits: EngineWaits,
    /// Shards in memory, which were checked.
    open: BTreeMap<ContentHash, Shard>,
    /// Shards to fetch ahead of their use, one after another, each with the number of its data set.
    ahead: VecDeque<(usize, ShardEntry)>,
    /// The shard that is being fetched ahead.
    fetching: Option<ContentHash>,
    /// Its task, which ends with this value. A failed fetch is tried again at the use.
    task: JoinSet<()>,
    /// Shards in the data directory, to be removed when they are too many.
    kept: BTreeSet<ContentHash>,
}

impl ShardCache {
    /// Plans to fetch shards that are read soon, and drops those that are not.
    fn expect(&mut self, ahead: Vec<(usize, ShardEntry)>) {
        let needed: BTreeSet<ContentHash> = ahead.iter().map(|(_, entry)| entry.hash).collect();
        self.open.retain(|hash, _| needed.contains(hash));
        self.kept.extend(&needed);
        self.remove_old(&needed);
        self.ahead = ahead.into();
    }

    /// Begins the next fetch ahead of use, unless one is going on.
    fn fetch_next(&mut self, batches: &Batches) {
        if self.task.try_join_next().is_some() {
            self.fetching = None;
        }
        while self.fetching.is_none()
            && let Some((source, entry)) = self.ahead.pop_front()
        {
            if self.run_files.has_shard(entry.hash) {
                continue;
            }
            self.fetching = Some(entry.hash);
            let (run_files, index) = (self.run_files.clone(), Arc::clone(batches.index_of(source)));
            let fetch = async move {
                if let Err(error) = run_files.obtain_shard((source, &index), &entry).await {
                    let error = format!("{error:#}");
                    tracing::warn!(shard = %entry.hash, error, "not fetched ahead");
                }
            };
            self.task.spawn_on(fetch, self.waits.runtime());
        }
    }

    /// Removes shards that no step reads soon, while there are too many.
    fn remove_old(&mut self, needed: &BTreeSet<ContentHash>) {
        let here = |hash: &ContentHash| {
            let path = self.run_files.own_shard(*hash);
            let size = std::fs::metadata(&path).ok()?.len();
            Some((*hash, size, path))
        };
        let here: Vec<(ContentHash, u64, PathBuf)> = self.kept.iter().filter_map(here).collect();
        let mut all: u64 = here.iter().map(|(_, size, _)| size).sum();
        for (hash, size, path) in here {
            if all <= self.run_files.cache.0 {
                return;
            }
            if needed.contains(&hash) {
                continue;
            }
            self.kept.remove(&hash);
            self.run_files.files.withdraw(&path);
            match std::fs::remove_file(&path) {
                Ok(()) => all -= size,
                Err(error) => tracing::warn!(path = %path.display(), %error, "not removed"),
            }
        }
    }

    /// A shard, fetched if it is not here.
    fn open(&mut self, shard: SourceShard<'_>, batches: &Batches) -> anyhow::Result<&Shard> {
        let SourceShard { source, entry } = shard;
        if self.fetching == Some(entry.hash) {
            self.waits.wait(self.task.join_next())?;
            self.fetching = None;
        }
        if !self.open.contains_key(&entry.hash) {
            let index = batches.index_of(source);
            let obtained = self.run_files.obtain_shard((source, index), entry);
            let path = self.waits.wait(obtained)??;
            self.kept.insert(entry.hash);
            let shard = Shard::open(&path, index, entry)?;
            // A streamed one was made here, and its name says of what.
            let checked = match index.streamed(entry) {
                Some(_) => Ok(()),
                None => shard.check_hash(),
            };
            if let Err(error) = checked {
                // Fetched again next time; the user's own files stay.
                if self.run_files.own_shard(entry.hash) == path {
                    self.run_files.files.withdraw(&path);
                    std::fs::remove_file(&path).with_context(|| path.display().to_string())?;
                }
                return Err(error.into());
            }
            self.open.insert(entry.hash, shard);
        }
        Ok(&self.open[&entry.hash])
    }
}
