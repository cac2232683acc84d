//! Checkpoints: every writer produces the same files, and damage is detected.

use std::fs;
use std::path::{Path, PathBuf};

use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::run::{Run, checkpoint_hash};
use shoal_tests::swarm::Swarm;
use toml::Value;

fn verify(folder: &Path) -> Outcome {
    let command = shoal(["checkpoint".as_ref(), "verify".as_ref(), folder.as_os_str()]);
    Process::start("checkpoint verify", command).end()
}

/// Every file of a checkpoint.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    files
}

#[test]
fn a_swarm_saves_the_same_checkpoints_as_one_process() {
    let run = Run::tiny(&[("checkpoint.every", Value::from(2))]);
    let alone = run.local("alone");
    let mut swarm = Swarm::start(&run.config(), &["--wait-for", "3"]);
    swarm.join(&[]);
    swarm.join(&[]);
    let first = &mut swarm.peers[0];
    let (middle, last) = (first.event("checkpoint"), first.event("checkpoint"));
    assert_eq!((&middle["version"], &last["version"]), (&2.into(), &4.into()));
    let trained = swarm.finish();
    assert_eq!(last["hash"], trained.report["checkpoint_hash"]);
    assert_eq!(trained.hash(), alone.hash());

    let middle_folder = |folder: &Path| folder.join("checkpoints/version-2");
    let middle_hash = checkpoint_hash(&middle_folder(&trained.folder));
    assert_eq!(middle["hash"], middle_hash);
    assert_eq!(middle_hash, checkpoint_hash(&middle_folder(&alone.folder)));
    assert_ne!(middle["hash"], last["hash"]);
    let whole = verify(&trained.checkpoint()).success();
    assert!(whole.contains("version 4"), "{whole}");

    let content = |folder: &Path| -> Vec<_> {
        let content = |path: PathBuf| (path.file_name().map(ToOwned::to_owned), fs::read(path));
        let all = files(folder).into_iter().map(content);
        all.map(|(name, bytes)| (name, bytes.expect("readable"))).collect()
    };
    assert!(
        content(&trained.checkpoint()) == content(&alone.checkpoint()),
        "the optimizer's state and every other file are the same too"
    );
}

#[test]
fn damage_to_any_file_is_detected() {
    let one = || Value::from(1);
    let run = Run::tiny(&[("training.steps", one()), ("training.stages", one())]);
    let checkpoint = run.local("trained").checkpoint();
    assert_eq!(files(&checkpoint).len(), 8, "two files a stage and six more");
    for path in files(&checkpoint) {
        let name = path.file_name().and_then(|name| name.to_str()).expect("a plain name");
        let whole = fs::read(&path).expect("readable");
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        let damages: [(&str, Option<&[u8]>); 3] = [
            // A text without its last newline would still have the same meaning.
            ("truncated", Some(&whole[..whole.len() - 2])),
            ("flipped", Some(&flipped)),
            ("missing", None),
        ];
        for (damage, bytes) in damages {
            // A new file: the checkpoint's own may be a hard link to the writer's.
            fs::remove_file(&path).expect("it is there");
            if let Some(bytes) = bytes {
                fs::write(&path, bytes).expect("room for a file");
            }
            let outcome = verify(&checkpoint);
            assert_ne!(outcome.code, Some(0), "{name} {damage} is not noticed");
            let reason = outcome.failure(4);
            let blamed = if damage == "missing" && name == "shoal.json" {
                "it has no shoal.json"
            } else {
                name
            };
            assert!(reason.contains(blamed), "{name} {damage}: {reason}");
            fs::write(&path, &whole).expect("room for a file");
        }
    }
    let _ = verify(&checkpoint).success();
}
