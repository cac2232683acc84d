//! The checkpoints that this peer keeps parts of, archives or fetches from.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use shoal_protocol::history::History;
use shoal_protocol::ids::{ContentHash, PeerId, Stage, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{SavedCheckpoint, SnapshotPart, StoredFile, StoredStage};
use shoal_scheduler::action::PeerInput;

use super::archive::Archive;
use super::background_results::{Background, FilesResult};
use super::checkpoint_collect::{Collected, Scattered, checked_name, collect, obtain};
use super::checkpoint_staging::Staging;
use super::chunks::Label;
use super::context::Context;
use super::effect::{Effect, Effects};
use super::resume::{
    self, FETCHED, KEPT, UPLOADS, checkpoint_folder, forget_archived, newest_archived, part_folder,
};
use super::score_queue::ScoreQueue;
use super::setup::RoleSetup;
use super::shutdown::Ending;
use super::upload_queue::{Attempt, UploadQueue};
use crate::bucket::{BucketError, Upload, checkpoint_name, fetch_files};
use crate::events::RunEvent;

/// Steps for which a part outside of every checkpoint is kept: longer than any newcomer takes to
/// fetch it.
const KEPT_VERSIONS: u64 = 32;

/// The checkpoints that this peer knows of.
#[derive(Debug)]
pub(super) struct CheckpointShelf {
    /// Versions of checkpoints whose parts are kept here.
    kept: BTreeSet<Step>,
    /// The newest complete checkpoint, with each stage's holders.
    newest: Option<(Step, Vec<StoredStage>)>,
    /// Checkpoints on their way into the archive's folder.
    collecting: BTreeSet<Step>,
    /// Whether the last of them did not arrive there.
    archive_fails: bool,
    /// Checkpoints on their way into a bucket.
    uploads: UploadQueue,
    /// Checkpoints that a command of the user scores.
    scores: ScoreQueue,
}

impl CheckpointShelf {
    /// A shelf with the checkpoints of earlier lives, as the local log has them.
    pub(super) fn new(history: Option<&History>, role: &RoleSetup) -> Self {
        let logged = history.into_iter().flat_map(|history| history.checkpoints.keys());
        let founded = role.founding.iter().map(|founding| &founding.version);
        Self {
            kept: logged.chain(founded).copied().collect(),
            newest: None,
            collecting: BTreeSet::new(),
            archive_fails: false,
            uploads: UploadQueue::new(role.archive_patience),
            scores: ScoreQueue::new(role.on_checkpoint.clone()),
        }
    }

    pub(super) fn newest(&self) -> Option<&(Step, Vec<StoredStage>)> {
        self.newest.as_ref()
    }

    pub(super) fn is_archiving(&self) -> bool {
        !self.collecting.is_empty() || !self.uploads.is_empty()
    }

    /// Returns whether a checkpoint is on its way here, into a bucket, or to its scores.
    pub(super) fn is_busy(&self) -> bool {
        self.is_archiving() || !self.scores.is_empty()
    }

    /// Returns why the bucket lacks the run's last checkpoint, if its upload was given up.
    pub(super) fn lost_upload(&self, manifest: &Manifest) -> Option<&str> {
        self.uploads.lost(Step(manifest.training.steps))
    }

    /// Fails if the bucket lacks the last checkpoint of a run that is over.
    ///
    /// # Errors
    /// When its upload was given up, or is interrupted.
    pub(super) fn check_uploaded(&self, context: &Context) -> anyhow::Result<()> {
        let Some(archive) = &context.archive else { return Ok(()) };
        let lost = self.lost_upload(&context.manifest);
        let reason = lost.or(self.is_archiving().then_some("it was interrupted"));
        let Some(reason) = reason else { return Ok(()) };
        let folder = archive.folder().join(checkpoint_name(Step(0), true));
        anyhow::bail!(
            "the run is over, its model is in {}, and its upload is not complete: {reason}; start this peer again \
             to go on",
            folder.display()
        )
    }

    /// Uploads the newest checkpoint of an earlier process that the bucket may lack.
    pub(super) fn resume(&mut self, context: &Context, background: &Background) {
        let Some(archive) = &context.archive else { return };
        if archive.bucket().is_some()
            && let Some(version) = newest_archived(archive.folder(), context.manifest.run_id())
        {
            self.upload(context, background, version);
        }
    }

    fn upload(&mut self, context: &Context, background: &Background, version: Step) {
        let Some(archive) = &context.archive else { return };
        let Some(bucket) = archive.bucket() else { return };
        let name = checkpoint_name(version, is_last(context, version));
        let folder = archive.folder().join(&name);
        let upload = Upload { folder, name, records: context.data_dir.join(UPLOADS) };
        self.uploads.add(bucket, background, version, upload);
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
        let every = context.manifest.checkpoint.every;
        let keeps = |version: Step| archive.keeps() && every > 0 && version.0.is_multiple_of(every);
        let used = |version| {
            let read = self.uploads.needs(version) || self.scores.needs(version);
            read || keeps(version) || self.collecting.contains(&version)
        };
        forget_archived(archive.folder(), &context.files, oldest, used);
        // The coordinator sends the last one again until an archive has it.
        if self.uploads.needs(version) || !self.collecting.insert(version) {
            return;
        }
        let last = is_last(context, version);
        let destination = checkpoint_folder(archive.folder(), version, last);
        Staging::forget_others(&destination);
        let scattered = Scattered { version, stages, destination };
        let collecting = collect(scattered, context.run_files());
        background
            .spawn(async move { FilesResult::Archived { version, outcome: collecting.await } });
    }

    /// Takes in files that arrived, or could not.
    pub(super) fn finished(
        &mut self,
        context: &Context,
        background: &Background,
        result: FilesResult,
        out: &mut Effects,
    ) {
        match result {
            FilesResult::Archived { version, outcome } => {
                self.collecting.remove(&version);
                let failed_before = std::mem::replace(&mut self.archive_fails, outcome.is_err());
                match outcome {
                    Ok(Collected { directory, hash }) => {
                        if context.archive.as_ref().is_some_and(Archive::keeps) {
                            out.push(PeerInput::Archived { version }.into());
                        }
                        self.upload(context, background, version);
                        let (number, shown) = (version.0, directory.display().to_string());
                        let event =
                            RunEvent::Checkpoint { version: number, directory: shown, hash };
                        out.push(event.into());
                        let left_out = self.scores.add(background, version, directory);
                        out.extend(left_out.map(Effect::Note));
                    }
                    Err(error) => {
                        let error = format!("{error:#}");
                        // The coordinator sends the last one again every second.
                        match failed_before {
                            false => tracing::warn!(
                                %version, error, "a checkpoint could not be archived: later ones, and the last until it is there, are tried"
                            ),
                            true => tracing::debug!(%version, error, "not archived again"),
                        }
                    }
                }
            }
            FilesResult::Scored { outcome } => {
                out.extend(self.scores.finished(background, outcome).map(Effect::Note));
            }
            FilesResult::Uploaded { sent, outcome } => {
                self.uploaded(context, background, (sent, outcome), out);
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

    /// Takes in the outcome of an attempt to upload a checkpoint.
    fn uploaded(
        &mut self,
        context: &Context,
        background: &Background,
        (sent, outcome): (u64, Result<(), BucketError>),
        out: &mut Effects,
    ) {
        let Some(archive) = &context.archive else { return };
        let Some(bucket) = archive.bucket() else { return };
        let (attempt, event) = self.uploads.attempted(bucket, background, sent, outcome);
        out.extend(event.map(Effect::Note));
        match attempt {
            Attempt::Uploaded(version) if !archive.keeps() => {
                out.push(PeerInput::Archived { version }.into());
            }
            // Only the bucket counts as an archive here, and it cannot have the model.
            Attempt::Lost(version) if !archive.keeps() => {
                if let Some(reason) =
                    self.lost_upload(&context.manifest).filter(|_| is_last(context, version))
                {
                    out.push(Ending::NotArchived(reason.to_owned()).into());
                }
            }
            Attempt::Uploaded(_) | Attempt::Lost(_) | Attempt::Again => {}
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
        let run = context.manifest.run_id();
        resume::forget_parts(&context.data_dir, run, &context.files, old);
    }
}

fn is_last(context: &Context, version: Step) -> bool {
    version.0 == context.manifest.training.steps
}

/// Brings the files of a stage into one of the folders for parts, and offers them to other peers.
fn obtain_part(
    context: &Context,
    folder: &'static str,
    version: Step,
    part: SnapshotPart,
) -> impl Future<Output = anyhow::Result<()>> + Send + use<> {
    let (files, me, run) = (context.files.clone(), context.me.peer, context.manifest.run_id());
    let folder = part_folder(&context.data_dir, folder, run).join(version.to_string());
    let transport = context.transport.clone();
    let bucket = context.archive.as_ref().and_then(|archive| archive.bucket().cloned());
    let name = checkpoint_name(version, is_last(context, version));
    async move {
        tokio::fs::create_dir_all(&folder)
            .await
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        for StoredFile { name, hash, .. } in &part.stored.files {
            write_label(&folder, name, Label { run, hash: *hash })?;
        }
        let obtained = obtain(&part.stored, me, &folder, &files, transport.as_ref()).await;
        if let (Err(error), Some(bucket)) = (&obtained, &bucket) {
            // No peer has it; the bucket may.
            let hashes: Vec<ContentHash> = part.stored.files.iter().map(|file| file.hash).collect();
            let fetched = fetch_files(bucket, &name, &hashes, &folder).await;
            fetched.with_context(|| format!("{error:#}"))?;
        } else {
            obtained?;
        }
        for file in part.stored.files {
            files.offer(file.hash, folder.join(&file.name));
        }
        Ok(())
    }
}

fn write_label(folder: &Path, name: &str, label: Label) -> anyhow::Result<()> {
    label.write(folder, checked_name(name)?).context("no label is written")
}
