//! An archive in a folder, which the same code reads as one in a bucket.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use shoal_engine::checkpoint::{INDEX, write_index, write_stage};
use shoal_engine::{CheckpointFile, Slot, StageState, parameter_count};
use shoal_protocol::ids::Step;
use shoal_protocol::manifest::{Manifest, example};

use super::*;

/// Writes a checkpoint of a version, as an archive has it.
fn write(archive: &Path, manifest: &Manifest, version: u64, last: bool) {
    let folder = archive.join(checkpoint_name(Step(version), last));
    fs::create_dir_all(&folder).expect("room for a folder");
    let mut files: Vec<CheckpointFile> = Vec::new();
    for stage in manifest.stages() {
        let vector = || vec![version as f32; parameter_count(manifest, stage)];
        let state = StageState {
            weights: vector(),
            stale_weights: Vec::new(),
            slots: [Slot::FirstMoment, Slot::SecondMoment].map(|slot| (slot, vector())).into(),
        };
        files.extend(write_stage(&folder, manifest, stage, &state).expect("written"));
    }
    write_index(&folder, manifest, Step(version), &files, None, &[]).expect("written");
}

fn manifest(seed: u64) -> Manifest {
    let mut manifest = example::small();
    manifest.training.seed = seed;
    manifest
}

async fn newest(bucket: &Bucket, manifest: &Manifest) -> Option<u64> {
    let found = bucket.newest(Some(manifest.run_id()), &BTreeSet::new()).await.expect("readable");
    found.map(|found| found.index.step().0)
}

#[tokio::test]
async fn the_newest_whole_checkpoint_of_the_run_is_found() {
    let archive = tempfile::tempdir().expect("room for a folder");
    let (mine, other) = (manifest(1), manifest(2));
    let bucket = Bucket::in_folder(archive.path()).expect("a folder");
    assert_eq!(newest(&bucket, &mine).await, None);
    for version in [2, 9, 10] {
        write(archive.path(), &mine, version, false);
    }
    write(archive.path(), &other, 11, false);
    assert_eq!(newest(&bucket, &mine).await, Some(10), "versions are numbers and not texts");
    assert_eq!(newest(&bucket, &other).await, Some(11));

    let ten = archive.path().join("checkpoints/version-10");
    fs::write(ten.join("model-00002-of-00002.safetensors"), "half").expect("written");
    assert_eq!(newest(&bucket, &mine).await, Some(9), "an object has another size");
    let nine = archive.path().join("checkpoints/version-9");
    fs::remove_file(nine.join("optimizer-00001-of-00002.safetensors")).expect("it is there");
    assert_eq!(newest(&bucket, &mine).await, Some(2), "an object is missing");
    let two = archive.path().join("checkpoints/version-2");
    fs::remove_file(two.join(INDEX)).expect("it is there");
    assert_eq!(newest(&bucket, &mine).await, None, "the index is missing");
    assert!(bucket.checkpoint("checkpoints/version-9").await.is_err());
    assert!(bucket.checkpoint("checkpoints/version-2").await.expect("readable").is_none());
}

#[tokio::test]
async fn an_address_means_a_checkpoint_or_the_newest_of_an_archive() {
    let archive = tempfile::tempdir().expect("room for a folder");
    let mine = manifest(1);
    write(archive.path(), &mine, 4, false);
    write(archive.path(), &mine, 10, true);
    let meant = async |folder: &Path| {
        let bucket = Bucket::in_folder(folder).expect("a folder");
        bucket.meant().await.map(|found| found.index.step().0)
    };
    assert_eq!(meant(archive.path()).await.ok(), Some(10));
    let four = archive.path().join("checkpoints/version-4");
    assert_eq!(meant(&four).await.ok(), Some(4));
    let nothing = meant(&archive.path().join("checkpoints")).await;
    assert!(matches!(nothing, Err(BucketError::NoCheckpoint { .. })), "{nothing:?}");
    let bucket = Bucket::in_folder(archive.path()).expect("a folder");
    bucket.refuse_another_run(&mine).await.expect("its own");
    fs::remove_dir_all(archive.path().join("checkpoint")).expect("it is there");
    let refused = bucket.refuse_another_run(&manifest(2)).await;
    assert!(matches!(refused, Err(BucketError::OtherRun(_))), "{refused:?}");
}

#[tokio::test]
async fn what_is_fetched_is_what_was_written() {
    let archive = tempfile::tempdir().expect("room for a folder");
    write(archive.path(), &manifest(1), 10, true);
    let bucket = Bucket::in_folder(archive.path()).expect("a folder");
    let found = bucket.meant().await.expect("it is there");
    verify(&bucket, &found).await.expect("whole");
    let fetched = tempfile::tempdir().expect("room for a folder");
    let name = "model-00001-of-00002.safetensors";
    let original = fs::read(archive.path().join("checkpoint").join(name)).expect("it is there");
    // An earlier attempt has fetched a half.
    let part = fetched.path().join(format!("{name}.part"));
    fs::write(&part, &original[..original.len() / 2]).expect("written");
    fetch_all(&bucket, &found, fetched.path()).await.expect("fetched");
    assert_eq!(fs::read(fetched.path().join(name)).expect("it is there"), original);
    assert!(!part.exists() && fetched.path().join(INDEX).exists());

    let mut damaged = original.clone();
    damaged[100] ^= 1;
    fs::write(archive.path().join("checkpoint").join(name), damaged).expect("written");
    let damaged = verify(&bucket, &found).await;
    assert!(matches!(damaged, Err(BucketError::Damaged { .. })), "{damaged:?}");
    let again = tempfile::tempdir().expect("room for a folder");
    let damaged = fetch_all(&bucket, &found, again.path()).await;
    assert!(matches!(damaged, Err(BucketError::Damaged { .. })), "{damaged:?}");
    assert!(!again.path().join(INDEX).exists() && !again.path().join(name).exists());
}

#[tokio::test]
async fn an_upload_replaces_another_checkpoint_index_first() {
    let (from, to) = (tempfile::tempdir(), tempfile::tempdir());
    let (from, to) = (from.expect("room for a folder"), to.expect("room for a folder"));
    write(from.path(), &manifest(1), 10, true);
    write(to.path(), &manifest(2), 10, true);
    let bucket = Bucket::in_folder(to.path()).expect("a folder");
    let upload = Upload {
        folder: from.path().join("checkpoint"),
        name: "checkpoint".to_owned(),
        records: from.path().join("records"),
    };
    // A folder takes no hashes beside its files: the upload ends after the index is gone.
    let sent = std::sync::atomic::AtomicU64::new(0);
    let ended = upload.run(&bucket, &sent).await;
    assert!(ended.is_err(), "a folder takes no metadata");
    assert!(!to.path().join("checkpoint").join(INDEX).exists());
}
