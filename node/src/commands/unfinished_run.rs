//! An unfinished run in the data directory where another one is to begin.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use shoal_protocol::ids::{PeerId, RunId};
use shoal_protocol::manifest::Manifest;

use crate::anchor::kept_history;
use crate::driver::resume::newest_checkpoint;
use crate::other_run::difference;
use crate::whole_file;

/// The first peer's data directory has another run that is not over: starting this one beside it would begin at its first
/// step again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{difference}: the data directory {data_dir} has run {other:.8} at step {step} of {steps}, and run.toml describes \
     another run. Undo the change to go on with it; {reshape} to take its weights into a new run; or give another \
     --data-dir to begin anew"
)]
pub(super) struct UnfinishedRun {
    difference: String,
    data_dir: String,
    other: String,
    step: u64,
    steps: u64,
    /// The command.
    reshape: String,
}

/// The file in a run's folder with its manifest.
const MANIFEST: &str = "manifest";

/// The most bytes that are read of it.
const LARGEST: u64 = 16 << 20;

impl UnfinishedRun {
    /// Refuses to begin a run in a data directory whose last run is another one that is not over. A run that begins with
    /// a checkpoint is a new one on purpose.
    ///
    /// # Errors
    /// If there is such a run.
    pub(super) fn refuse(data_dir: &Path, me: PeerId, mine: &Manifest) -> Result<(), Self> {
        if mine.start.is_some() {
            return Ok(());
        }
        let Some((folder, found)) = last_run(data_dir) else { return Ok(()) };
        let run = found.run_id();
        let history = kept_history(&folder.join("log"), me, found.first_version());
        let unfinished = history.filter(|history| {
            run != mine.run_id() && !history.completed && history.version > found.first_version()
        });
        let Some(history) = unfinished else { return Ok(()) };
        let checkpoint = newest_checkpoint(&folder, run);
        let checkpoint =
            checkpoint.map_or_else(|| "CHECKPOINT".to_owned(), |path| path.display().to_string());
        Err(Self {
            difference: difference(&found, mine),
            data_dir: data_dir.display().to_string(),
            other: run.to_string(),
            step: history.version.0,
            steps: found.training.steps,
            reshape: format!("`shoal checkpoint reshape {checkpoint} run.toml -o later.toml`"),
        })
    }
}

/// The folder and the manifest of the run that the peer of a data directory took part in last, if it started that run.
pub(super) fn last_run(data_dir: &Path) -> Option<(PathBuf, Manifest)> {
    let run = std::fs::read_to_string(data_dir.join("run")).ok()?;
    let run: RunId = run.trim().parse().ok()?;
    let folder = data_dir.join("runs").join(run.to_string());
    let mut bytes = Vec::new();
    File::open(folder.join(MANIFEST)).ok()?.take(LARGEST).read_to_end(&mut bytes).ok()?;
    let manifest = Manifest::from_bytes(&bytes).ok()?;
    (manifest.run_id() == run).then_some((folder, manifest))
}

/// Keeps the manifest of a run that a peer starts.
///
/// # Errors
/// If it cannot be written.
pub(super) fn remember(data_dir: &Path, manifest: &Manifest) -> anyhow::Result<()> {
    let folder = data_dir.join("runs").join(manifest.run_id().to_string());
    let path = folder.join(MANIFEST);
    std::fs::create_dir_all(&folder)
        .and_then(|()| whole_file::write(&path, &manifest.to_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::example;

    use super::*;

    #[test]
    fn a_run_without_a_log_is_in_nobodys_way() {
        let home = tempfile::tempdir().expect("a folder");
        let (found, mut mine) = (example::small(), example::small());
        mine.training.steps += 1;
        let me = PeerId([1; 32]);
        assert_eq!(UnfinishedRun::refuse(home.path(), me, &mine), Ok(()));
        remember(home.path(), &found).expect("written");
        let run = found.run_id().to_string();
        std::fs::write(home.path().join("run"), &run).expect("written");
        let (folder, read) = last_run(home.path()).expect("it is there");
        assert_eq!((folder, read), (home.path().join("runs").join(&run), found));
        assert_eq!(UnfinishedRun::refuse(home.path(), me, &mine), Ok(()), "nothing is committed");
        std::fs::write(home.path().join("runs").join(&run).join(MANIFEST), "no manifest")
            .expect("written");
        assert_eq!(last_run(home.path()), None);
    }
}
