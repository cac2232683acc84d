//! Saved state: complete, damaged, and resumed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, Trainer, manifest, samples, text};
use shoal_engine::checkpoint::{publish, write_index};
use shoal_engine::{Checkpoint, CheckpointError, Device, DeviceChoice, Generator, Sampling};
use shoal_protocol::ids::{Stage, Step};

/// Trains a little and writes a checkpoint into `folder`.
fn write(trainer: &Trainer, step: u64, folder: &Path) -> PathBuf {
    let unfinished = folder.join("unfinished");
    fs::create_dir(&unfinished).expect("writable");
    let mut files = Vec::new();
    for stage in trainer.manifest.stages() {
        files.extend(trainer.engine.write_stage(stage, &unfinished).expect("writable"));
    }
    write_index(&unfinished, &trainer.manifest, Step(step), &files, None, &[]).expect("writable");
    let place = folder.join("checkpoint");
    publish(&unfinished, &place).expect("writable");
    place
}

fn trainer(stages: u16, folder: &Path) -> Trainer {
    let mut manifest = manifest();
    manifest.training.stages = stages;
    let samples = samples(&mut manifest, folder, &text());
    Trainer::new(&manifest, samples)
}

#[test]
fn the_hash_does_not_depend_on_the_cut() {
    let hashes = [1, 2, 4].map(|stages| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let place = write(&trainer(stages, folder.path()), 0, folder.path());
        let checkpoint = Checkpoint::open(&place).expect("whole");
        checkpoint.verify().expect("whole");
        assert_eq!(checkpoint.step(), Step(0));
        checkpoint.hash().expect("whole")
    });
    assert_eq!(hashes[0], hashes[1]);
    assert_eq!(hashes[0], hashes[2]);
}

#[test]
fn a_run_resumed_from_a_checkpoint_has_the_same_bits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut first = trainer(2, folder.path());
    for step in 0..3 {
        first.step(step);
    }
    let checkpoint = Checkpoint::open(&write(&first, 3, folder.path())).expect("whole");
    let mut second = trainer(2, folder.path());
    for stage in second.manifest.stages() {
        let state = checkpoint.stage(stage).expect("whole");
        second.engine.set_state(stage, Step(3), &state).expect("the same stage");
        let hash = |trainer: &Trainer| trainer.engine.state_hash(stage).expect("hosted");
        assert_eq!(hash(&first), hash(&second));
    }
    for trainer in [&mut first, &mut second] {
        trainer.step(3);
    }
    assert_eq!(first.weights(), second.weights());
    // A newer checkpoint replaces the older one.
    let older = checkpoint.hash().expect("whole");
    let left_over = folder.path().join("checkpoint.replaced");
    fs::create_dir(&left_over).expect("writable");
    fs::copy(folder.path().join("checkpoint/shoal.json"), left_over.join("shoal.json"))
        .expect("writable");
    let newer = Checkpoint::open(&write(&first, 4, folder.path())).expect("whole");
    assert_eq!(newer.step(), Step(4));
    assert_ne!(newer.hash().expect("whole"), older);
    assert!(!left_over.exists());
}

#[test]
fn what_every_optimizer_keeps_is_in_a_checkpoint() {
    for (rule, prefixes) in [
        (common::muon(), &["first_moment", "second_moment", "momentum"][..]),
        (common::adafactor(), &["second_moment", "row_factor", "column_factor"]),
        (common::sgd(), &["momentum"]),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut run = manifest();
        run.training.stages = 2;
        run.optimizer.rule = rule;
        let mut make = || samples(&mut run, folder.path(), &text());
        let [one, other] = [make(), make()];
        let mut first = Trainer::new(&run, one);
        (0..3).for_each(|step| _ = first.step(step));
        let place = write(&first, 3, folder.path());
        let checkpoint = Checkpoint::open(&place).expect("whole");
        checkpoint.verify().expect("whole");
        let bytes = fs::read(place.join("optimizer-00001-of-00002.safetensors")).expect("there");
        let text = String::from_utf8_lossy(&bytes);
        for prefix in ["first_moment", "second_moment", "momentum", "row_factor", "column_factor"] {
            let is_there = text.contains(&format!("\"{prefix}.model"));
            assert_eq!(is_there, prefixes.contains(&prefix), "{prefix} of {rule:?}");
        }
        let mut second = Trainer::new(&run, other);
        for stage in run.stages() {
            let state = checkpoint.stage(stage).expect("whole");
            second.engine.set_state(stage, Step(3), &state).expect("the same stage");
        }
        for trainer in [&mut first, &mut second] {
            trainer.step(3);
        }
        assert_eq!(first.weights(), second.weights(), "{rule:?}");
    }
}

#[test]
fn damage_is_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = write(&trainer(2, folder.path()), 0, folder.path());
    let names: Vec<_> = fs::read_dir(&place)
        .expect("readable")
        .map(|entry| entry.expect("readable").path())
        .collect();
    assert_eq!(names.len(), 4 + 6);
    for path in names {
        let whole = fs::read(&path).expect("readable");
        let mut flipped = whole.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 0x10;
        for damaged in [&whole[..whole.len() - 2], &whole[..7], &[], &flipped] {
            fs::write(&path, damaged).expect("writable");
            let result = Checkpoint::open(&place).and_then(|checkpoint| checkpoint.verify());
            let error = result.expect_err("it is damaged");
            assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
        fs::remove_file(&path).expect("writable");
        assert!(Checkpoint::open(&place).and_then(|checkpoint| checkpoint.verify()).is_err());
        fs::write(&path, whole).expect("writable");
    }
    Checkpoint::open(&place).expect("whole").verify().expect("whole again");
}

#[test]
fn a_huge_header_allocates_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = write(&trainer(1, folder.path()), 0, folder.path());
    let path = place.join("model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&path).expect("readable");
    bytes[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    fs::write(&path, bytes).expect("writable");
    let checkpoint = Checkpoint::open(&place).expect("its description is whole");
    assert!(matches!(checkpoint.hash(), Err(CheckpointError::Damaged { .. })));
    assert!(matches!(checkpoint.stage(Stage(0)), Err(CheckpointError::Damaged { .. })));
}

#[test]
fn only_a_checkpoint_is_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = folder.path().join("checkpoint");
    fs::create_dir(&place).expect("writable");
    fs::write(place.join("thesis.txt"), "years of work").expect("writable");
    let unfinished = folder.path().join("unfinished");
    fs::create_dir(&unfinished).expect("writable");
    assert!(matches!(publish(&unfinished, &place), Err(CheckpointError::NotACheckpoint { .. })));
    assert!(place.join("thesis.txt").exists());
    assert!(matches!(Checkpoint::open(&place), Err(CheckpointError::NotACheckpoint { .. })));
}

#[test]
fn text_follows_from_the_seed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut trainer = trainer(2, folder.path());
    for step in 0..20 {
        trainer.step(step);
    }
    let place = write(&trainer, 20, folder.path());
    let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
    let mut generator = Generator::open(&place, device).expect("whole");
    let mut text = |seed, temperature| {
        let (top_p, ends) = (0.95, Vec::new());
        let sampling = Sampling { tokens: 40, seed, temperature, top_p, vocabulary: 256, ends };
        let prompt: Vec<u32> = b"fn ".iter().map(|byte| u32::from(*byte)).collect();
        let tokens = generator.generate(&prompt, sampling).expect("a short prompt");
        tokens.collect::<Result<Vec<_>, _>>().expect("a small model")
    };
    assert_eq!(text(1, 1.0), text(1, 1.0));
    assert_ne!(text(1, 1.0), text(2, 1.0));
    assert_eq!(text(1, 0.0), text(2, 0.0));
}
