//! The checkpoints that this peer keeps parts of, archives or fetches from.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use shoal_protocol::ids::{PeerId, Stage, Step};
use shoal_protocol::message::{SavedCheckpoint, SnapshotPart, StoredFile, StoredStage};
use shoal_scheduler::action::PeerInput;

use super::background_results::{Background, FilesResult};
use super::checkpoint_collect::{Collected, Scattered, checked_name, collect, obtain};
use super::checkpoint_staging::Staging;
use super::chunks::Label;
use super::context::Context;
use super::effect::Effects;
use super::resume::{self, FETCHED, KEPT, checkpoint_folder};
use crate::events::RunEvent;

/// Steps for which a part outside of every checkpoint is kept: longer than any newcomer takes to
/// fetch it.
const KEPT_VERSIONS: u64 = 32;

/// The checkpoints that this peer knows of.
#[derive(Debug, Default)]
pub(super) struct CheckpointShelf {
    /// Versions of checkpoints whose parts are kept here.
    kept: BTreeSet<Step>,
    /// The newest complete checkpoint, with each stage's holders.
    newest: Option<(Step, Vec<StoredStage>)>,
    /// Checkpoints on their way into the archive.
    archiving: usize,
}

impl CheckpointShelf {
    pub(super) fn newest(&self) -> Option<&(Step, Vec<StoredStage>)> {
        self.newest.as_ref()
    }

    pub(super) fn is_archiving(&self) -> bool {
        self.archiving > 0
    }

    /// Takes in a complete checkpoint: archives it if this peer archives, and keeps no version
    /// before `oldest`.
    pub(super) fn completed(
        &mut self,
        context: &Context,
        background: &Background,
        (version, stages): (Step, Vec<StoredStage>),
        oldest: Step,
    ) {
        self.kept.insert(version);
        self.kept.retain(|kept| *kept >= oldest);
        self.newest = Some((version, stages.clone()));
        let Some(archive) = &context.archive else { return };
        let last = version.0 == context.manifest.training.steps;
        let destination = checkpoint_folder(archive, version, last);
        Staging::forget_others(&destination);
        let scattered = Scattered { version, stages, destination };
        let collecting = collect(scattered, context.run_files());
        self.archiving += 1;
        background
            .spawn(async move { FilesResult::Archived { version, outcome: collecting.await } });
    }

    /// Takes in files that arrived, or could not.
    pub(super) fn finished(&mut self, result: FilesResult, out: &mut Effects) {
        match result {
            FilesResult::Archived { version, outcome } => {
                self.archiving -= 1;
                match outcome {
                    Ok(Collected { directory, hash }) => {
                        out.push(PeerInput::Archived { version }.into());
                        let (version, directory) = (version.0, directory.display().to_string());
                        out.push(RunEvent::Checkpoint { version, directory, hash }.into());
                    }
                    Err(error) => {
                        let error = format!("{error:#}");
                        tracing::warn!(%version, error, "a checkpoint could not be archived");
                    }
                }
            }
            FilesResult::Kept { version, stage, outcome } => {
                if let Err(error) = &outcome {
                    let error = format!("{error:#}");
                    tracing::warn!(%version, %stage, error, "a checkpoint's part is not kept");
                }
                out.push(PeerInput::Kept { version, stage, whole: outcome.is_ok() }.into());
            }
            FilesResult::Fetched { version, stage, outcome } => {
                if let Err(error) = &outcome {
                    let error = format!("{error:#}");
                    tracing::warn!(%version, %stage, error, "a snapshot could not be fetched");
                }
                out.push(PeerInput::Fetched { version, stage, whole: outcome.is_ok() }.into());
            }
        }
    }

    /// Returns the newest checkpoint with its holders and their addresses; `logged` gives the one in
    /// the log where this life saw none.
    pub(super) fn saved(
        &self,
        logged: impl FnOnce() -> Option<(Step, Vec<StoredStage>)>,
        addresses_of: impl Fn(PeerId) -> Vec<SocketAddr>,
    ) -> Option<SavedCheckpoint> {
        let (version, stages) = self.newest.clone().or_else(logged)?;
        let holders = stages.iter().flat_map(|stored| &stored.holders);
        let holders: BTreeSet<PeerId> = holders.copied().collect();
        let holders = holders.into_iter().map(|peer| (peer, addresses_of(peer))).collect();
        Some(SavedCheckpoint { version, holders, stages })
    }

    /// Fetches a stage of a snapshot into a folder of its own. A peer that moves to the first stage
    /// reads the token file from then on, so it fetches that too.
    pub(super) fn fetch(
        &self,
        context: &Context,
        background: &Background,
        (version, part): (Step, SnapshotPart),
    ) {
        let stage = part.stage;
        let fetching = obtain_part(context, FETCHED, version, part);
        let run_files = context.run_files();
        background.spawn(async move {
            let mut outcome = fetching.await;
            if stage == Stage(0) && outcome.is_ok() {
                outcome = run_files.obtain_data().await;
            }
            FilesResult::Fetched { version, stage, outcome }
        });
    }

    /// Keeps a stage of a checkpoint for other peers.
    pub(super) fn keep(
        &mut self,
        context: &Context,
        background: &Background,
        version: Step,
        part: SnapshotPart,
    ) {
        self.kept.insert(version);
        let stage = part.stage;
        let keeping = obtain_part(context, KEPT, version, part);
        background
            .spawn(async move { FilesResult::Kept { version, stage, outcome: keeping.await } });
    }

    /// Removes the parts of versions that no peer fetches any more.
    pub(super) fn forget_old_parts(&self, context: &Context, committed: Step) {
        let old = |version: Step| {
            version.0 + KEPT_VERSIONS <= committed.0 && !self.kept.contains(&version)
        };
        resume::forget_parts(&context.data_dir, &context.files, old);
    }
}

/// Brings the files of a stage into one of the folders for parts, and offers them to other peers.
fn obtain_part(
    context: &Context,
    folder: &'static str,
    version: Step,
    part: SnapshotPart,
) -> impl Future<Output = anyhow::Result<()>> + Send + use<> {
    let folder = context.data_dir.join(folder).join(version.to_string());
    let (files, me, run) = (context.files.clone(), context.me.peer, context.manifest.run_id());
    let transport = context.transport.clone();
    async move {
        tokio::fs::create_dir_all(&folder)
            .await
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        for StoredFile { name, hash, .. } in &part.stored.files {
            write_label(&folder, name, Label { run, hash: *hash })?;
        }
        obtain(&part.stored, me, &folder, &files, transport.as_ref()).await?;
        for file in part.stored.files {
            files.offer(file.hash, folder.join(&file.name));
        }
        Ok(())
    }
}

fn write_label(folder: &Path, name: &str, label: Label) -> anyhow::Result<()> {
    label.write(folder, checked_name(name)?).context("no label is written")
}
