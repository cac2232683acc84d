//! Files of checkpoints that earlier lives of a peer left in its data directory.

use std::path::{Path, PathBuf};

use shoal_engine::Checkpoint;
use shoal_protocol::history::History;
use shoal_protocol::ids::{RunId, Step};
use shoal_protocol::manifest::Manifest;

use super::chunks::{self, Label};
use crate::bucket::checkpoint_name;
use crate::data_dir::Files;
use crate::other_run::OtherRun;

/// The folders for parts of checkpoints: those written here, fetched to begin from, and kept for
/// others. Each has a folder for each run, with a folder for each version.
pub(crate) const STORED: &str = "stored";
pub(crate) const FETCHED: &str = "fetched";
pub(crate) const KEPT: &str = "kept";
/// The newest checkpoints of an archive whose files are hashed before they are offered. A run goes back to no other.
const HASHED: usize = 2;

/// The folder for records of unfinished uploads.
pub(crate) const UPLOADS: &str = "uploads";

pub(crate) const PARTS: [&str; 3] = [STORED, FETCHED, KEPT];

/// Returns the folder for a run's parts of one kind.
pub(crate) fn part_folder(data_dir: &Path, kind: &str, run: RunId) -> PathBuf {
    data_dir.join(kind).join(run.to_string())
}

/// Returns the folders of all versions' parts. An earlier release had no folders of runs above them.
pub(crate) fn version_folders(data_dir: &Path) -> impl Iterator<Item = PathBuf> {
    PARTS.iter().flat_map(|kind| folders_in(&data_dir.join(kind))).flat_map(|folder| {
        match version_of(&folder) {
            Some(_) => vec![folder],
            None => folders_in(&folder),
        }
    })
}

/// Returns the version that a folder of parts is of.
pub(crate) fn version_of(folder: &Path) -> Option<Step> {
    folder.file_name().and_then(|name| name.to_str()?.parse().ok()).map(Step)
}

/// Returns the folder of a version's checkpoint.
pub(crate) fn checkpoint_folder(archive: &Path, version: Step, last: bool) -> PathBuf {
    archive.join(checkpoint_name(version, last))
}

/// Returns the folders of whole checkpoints.
fn checkpoint_folders(archive: &Path) -> Vec<PathBuf> {
    let last = Some(archive.join("checkpoint")).filter(|folder| folder.is_dir());
    folders_in(&archive.join("checkpoints")).into_iter().chain(last).collect()
}

/// Returns the version of a run's newest checkpoint in an archive's folder.
pub(crate) fn newest_archived(archive: &Path, run: RunId) -> Option<Step> {
    let folders = checkpoint_folders(archive).into_iter();
    let found = folders.filter_map(|folder| Checkpoint::open(&folder).ok());
    found.filter(|found| found.run() == run).map(|found| found.step()).max()
}

/// Returns the folder of a run's newest checkpoint in an archive's folder.
pub(crate) fn newest_checkpoint(archive: &Path, run: RunId) -> Option<PathBuf> {
    let folders = checkpoint_folders(archive).into_iter();
    let opened = folders.filter_map(|folder| Some((Checkpoint::open(&folder).ok()?, folder)));
    let found = opened.filter(|(found, _)| found.run() == run);
    found.max_by_key(|(found, _)| found.step()).map(|(_, folder)| folder)
}

/// Removes the checkpoints of versions before `oldest` from an archive's folder, but those in use.
pub(crate) fn forget_archived(
    archive: &Path,
    files: &Files,
    oldest: Step,
    is_used: impl Fn(Step) -> bool,
) {
    for folder in folders_in(&archive.join("checkpoints")) {
        let name = folder.file_name().and_then(|name| name.to_str());
        let version = name.and_then(|name| name.strip_prefix("version-")?.parse().ok()).map(Step);
        if version.is_some_and(|version| version < oldest && !is_used(version)) {
            files.withdraw(&folder);
            if let Err(error) = std::fs::remove_dir_all(&folder) {
                tracing::warn!(folder = %folder.display(), %error, "not removed");
            }
        }
    }
}

/// Offers files of earlier lives by their content: parts of checkpoints, and whole checkpoints of this
/// run. Returns the number of whole ones that belong to another run or are unreadable.
pub(crate) fn offer_kept(
    data_dir: &Path,
    archive: Option<&Path>,
    run: RunId,
    files: &Files,
) -> usize {
    for folder in version_folders(data_dir) {
        for path in paths_in(&folder).into_iter().filter(|path| chunks::is_whole(path)) {
            match chunks::hash(&path) {
                Ok(hash) if Label::read(&path).is_some_and(|label| label.hash != hash) => {
                    let path = path.display();
                    tracing::warn!(%path, "a part of a checkpoint is damaged: it is not offered");
                }
                Ok(hash) => files.offer(hash, path),
                Err(error) => {
                    let path = path.display();
                    tracing::warn!(%path, %error, "a part of a checkpoint is not offered");
                }
            }
        }
    }
    let Some(archive) = archive else { return 0 };
    let mut folders = checkpoint_folders(archive);
    // The last one has no version in its name.
    let version = |folder: &PathBuf| {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix("version-").map_or(Ok(u64::MAX), str::parse).unwrap_or_default()
    };
    folders.sort_by_key(|folder| std::cmp::Reverse(version(folder)));
    let offered = folders.iter().enumerate();
    offered.filter(|(age, folder)| !offer_checkpoint(folder, run, files, *age < HASHED)).count()
}

/// Offers the files of a whole checkpoint of this run, those alone that have their hashes if `hashed`. Returns whether it
/// is one.
fn offer_checkpoint(folder: &Path, run: RunId, files: &Files, hashed: bool) -> bool {
    let checkpoint = match Checkpoint::open(folder) {
        Ok(checkpoint) if checkpoint.run() == run => checkpoint,
        Ok(other) => {
            let other = other.run();
            tracing::warn!(folder = %folder.display(), %other, "a checkpoint of another run");
            return false;
        }
        Err(error) => {
            tracing::warn!(folder = %folder.display(), %error, "a checkpoint is of no use");
            return false;
        }
    };
    for file in checkpoint.files() {
        let path = folder.join(&file.name);
        match std::fs::symlink_metadata(&path) {
            // The folder may be a stranger's: a link in it would offer a file from elsewhere.
            Ok(found) if found.is_file() && found.len() == file.bytes => {
                if hashed && !chunks::hash(&path).is_ok_and(|hash| hash == file.hash) {
                    let path = path.display();
                    tracing::warn!(%path, "a file of a checkpoint is damaged: it is not offered");
                } else {
                    files.offer(file.hash, path);
                }
            }
            Ok(found) => {
                let (path, expected) = (path.display(), file.bytes);
                let (link, bytes) = (found.is_symlink(), found.len());
                tracing::warn!(
                    %path, link, bytes, expected,
                    "a file of a checkpoint is a link or has another size: it is not offered"
                );
            }
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "a file of a checkpoint is not offered");
            }
        }
    }
    true
}

/// Refuses an archive with checkpoints of another run, which those of this run would replace.
///
/// # Errors
/// When the archive has one; the error names what differs between the runs.
pub(crate) fn refuse_another_run(archive: &Path, manifest: &Manifest) -> anyhow::Result<()> {
    for folder in checkpoint_folders(archive) {
        if let Ok(found) = Checkpoint::open(&folder) {
            OtherRun::refuse(&folder.display().to_string(), found.manifest(), manifest)?;
        }
    }
    Ok(())
}

/// Returns whether the run is over by the log, and the archive, if any, has its last checkpoint.
pub(crate) fn is_complete(history: &History, manifest: &Manifest, archive: Option<&Path>) -> bool {
    history.completed && archive.is_none_or(|archive| is_archived(archive, manifest))
}

/// Returns whether the archive has a run's last checkpoint.
fn is_archived(archive: &Path, manifest: &Manifest) -> bool {
    let steps = Step(manifest.training.steps);
    let found = Checkpoint::open(&checkpoint_folder(archive, steps, true));
    found.is_ok_and(|whole| whole.run() == manifest.run_id() && whole.step() == steps)
}

pub(crate) fn folders_in(folder: &Path) -> Vec<PathBuf> {
    paths_in(folder).into_iter().filter(|path| path.is_dir()).collect()
}

pub(crate) fn paths_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}

/// Withdraws and removes a run's parts of old versions. Those of other runs stay.
pub(crate) fn forget_parts(data_dir: &Path, run: RunId, files: &Files, old: impl Fn(Step) -> bool) {
    for folder in PARTS.iter().flat_map(|kind| folders_in(&part_folder(data_dir, kind, run))) {
        if version_of(&folder).is_some_and(&old) {
            files.withdraw(&folder);
            if let Err(error) = std::fs::remove_dir_all(&folder) {
                tracing::warn!(folder = %folder.display(), %error, "not removed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_engine::{CheckpointFile, checkpoint};
    use shoal_protocol::ids::ContentHash;
    use shoal_protocol::manifest::example;

    use super::*;

    #[test]
    fn a_link_in_a_checkpoint_is_not_offered() {
        let folder = tempfile::tempdir().expect("a folder");
        let (archive, secret) = (folder.path().join("archive"), folder.path().join("secret"));
        let version = archive.join("checkpoints/version-3");
        std::fs::create_dir_all(&version).expect("a folder");
        std::fs::write(&secret, "key").expect("a file");
        let file = |name: &str| {
            let hash = ContentHash::of(name.as_bytes());
            CheckpointFile { name: name.to_owned(), bytes: 1, hash }
        };
        let listed = ["a", "b", "c", "d"].map(file);
        let manifest = example::small();
        checkpoint::write_index(&version, &manifest, Step(3), &listed, None, &[]).expect("written");
        std::fs::write(version.join("a"), "a").expect("a file");
        std::os::unix::fs::symlink(&secret, version.join("b")).expect("a link");
        std::fs::write(version.join("c"), "longer").expect("a file");
        // A bit flipped.
        std::fs::write(version.join("d"), "e").expect("a file");
        let files = Files::default();
        assert_eq!(offer_kept(folder.path(), Some(&archive), manifest.run_id(), &files), 0);
        assert_eq!(files.path(&listed[0].hash), Some(version.join("a")));
        assert!(listed[1..].iter().all(|file| files.path(&file.hash).is_none()));
    }

    #[test]
    fn parts_of_another_run_in_the_same_directory_stay() {
        let home = tempfile::tempdir().expect("a folder");
        let (mine, other) = (RunId::of(b"mine"), RunId::of(b"other"));
        let files = Files::default();
        let paths = [mine, other].map(|run| {
            let folder = part_folder(home.path(), STORED, run).join("7");
            std::fs::create_dir_all(&folder).expect("a folder");
            std::fs::write(folder.join("part"), run.to_string()).expect("a file");
            folder.join("part")
        });
        // A part of an earlier release.
        std::fs::create_dir_all(home.path().join("kept/7")).expect("a folder");
        std::fs::write(home.path().join("kept/7/part"), "early").expect("a file");
        offer_kept(home.path(), None, mine, &files);
        let early = ContentHash::of(b"early");
        assert_eq!(files.path(&early), Some(home.path().join("kept/7/part")));
        forget_parts(home.path(), mine, &files, |version| version == Step(7));
        assert_eq!(paths.map(|path| path.exists()), [false, true]);
    }

    #[test]
    fn an_archive_with_any_checkpoint_of_another_run_is_refused() {
        let archive = tempfile::tempdir().expect("a folder");
        let (mine, mut other) = (example::small(), example::small());
        other.training.steps += 1;
        let version = archive.path().join("checkpoints/version-3");
        std::fs::create_dir_all(&version).expect("a folder");
        checkpoint::write_index(&version, &other, Step(3), &[], None, &[]).expect("written");
        refuse_another_run(archive.path(), &other).expect("its own");
        let error = refuse_another_run(archive.path(), &mine).expect_err("another run's");
        assert!(error.to_string().contains("training.steps"), "{error}");
    }

    #[test]
    fn a_folder_that_is_no_checkpoint_of_this_run_is_counted_and_stays() {
        let archive = tempfile::tempdir().expect("a folder");
        let damaged = archive.path().join("checkpoints/version-3");
        std::fs::create_dir_all(&damaged).expect("a folder");
        std::fs::write(damaged.join("shoal.json"), "{").expect("a file");
        let (files, run) = (Files::default(), RunId::of(b"a run"));
        let empty = archive.path().join("nothing");
        assert_eq!(offer_kept(&empty, Some(archive.path()), run, &files), 1);
        assert_eq!(offer_kept(&empty, None, run, &files), 0);
        assert!(damaged.join("shoal.json").exists());
    }
}
