//! Marks in an archive: each history of a run that was founded on one of its checkpoints.
//!
//! A mark is created and never replaced, so of two processes that continue a run from an archive at the same time,
//! one is refused. Its number orders the histories.

use bytes::Bytes;
use serde::Serialize;
use shoal_protocol::ids::{PeerId, RunId, Step};

use super::error::BucketError;
use super::store::Bucket;

type Result<T> = std::result::Result<T, BucketError>;

/// The folder of the marks.
const FOLDER: &str = "histories";

/// The content of a mark, for people.
#[derive(Debug, Serialize)]
struct Mark {
    run: RunId,
    /// The version that the history begins at.
    version: Step,
    /// The peer that founds it.
    founder: PeerId,
}

impl Bucket {
    /// The number of the newest history that was founded on this archive; 0 for none.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) async fn newest_history(&self) -> Result<u16> {
        let names = self.list(FOLDER).await?;
        Ok(names.keys().filter_map(|name| name.parse().ok()).max().unwrap_or(0))
    }

    /// Marks the archive with the next history.
    ///
    /// # Errors
    /// If another process was first, or the store fails.
    pub(crate) async fn mark_history(
        &self,
        number: u16,
        (run, version, founder): (RunId, Step, PeerId),
    ) -> Result<()> {
        let mark = Mark { run, version, founder };
        let text = serde_json::to_vec_pretty(&mark).expect("it has only string keys");
        if self.create(&format!("{FOLDER}/{number}"), Bytes::from(text)).await? {
            Ok(())
        } else {
            Err(BucketError::Continued { place: self.place().to_owned() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_process_founds_a_history() {
        let folder = tempfile::tempdir().expect("a folder");
        let bucket = Bucket::in_folder(folder.path()).expect("a folder");
        assert_eq!(bucket.newest_history().await.expect("readable"), 0);
        let founded = (RunId::of(b"a run"), Step(3), PeerId([1; 32]));
        bucket.mark_history(1, founded).await.expect("the first");
        let again = bucket.mark_history(1, founded).await;
        assert!(matches!(again, Err(BucketError::Continued { .. })), "{again:?}");
        bucket.mark_history(2, founded).await.expect("the next");
        assert_eq!(bucket.newest_history().await.expect("readable"), 2);
    }
}
