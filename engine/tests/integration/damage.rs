//! Damaged files of a checkpoint are read or refused without a panic.

use std::fs;
use std::path::Path;

use crate::common::{Trainer, manifest, samples, text};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use shoal_engine::Checkpoint;
use shoal_engine::checkpoint::{read_stage, weights_file, write_index};
use shoal_protocol::decoder::{Decoder, Edit};
use shoal_protocol::ids::{Stage, Step};

/// Changes of a file at a few places, most of them in its header.
fn changes() -> impl Strategy<Value = Vec<(u16, Edit)>> {
    let change = (any::<u16>(), any::<u8>(), any::<u8>());
    let edit = |(place, kind, byte)| (place, Edit::of(kind, byte));
    prop::collection::vec(change.prop_map(edit), 1..4)
}

/// Reads a file of the folder after each of many changes, and restores it.
fn damage(folder: &Path, name: &str, read: impl Fn()) {
    let path = folder.join(name);
    let whole = fs::read(&path).expect("a file of the checkpoint");
    let outcome = TestRunner::new(ProptestConfig::with_cases(500)).run(&changes(), |changes| {
        fs::write(&path, Decoder::changed(whole.clone(), &changes)).expect("writable");
        read();
        Ok(())
    });
    fs::write(&path, whole).expect("writable");
    outcome.expect("nothing that a file says panics");
}

#[test]
fn a_damaged_file_of_a_checkpoint_never_panics() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut run = manifest();
    let samples = samples(&mut run, folder.path(), &text());
    let trainer = Trainer::new(&run, samples);
    let stage = Stage(0);
    let files: Vec<_> = run
        .stages()
        .flat_map(|stage| trainer.engine.write_stage(stage, folder.path()).expect("writable"))
        .collect();
    write_index(folder.path(), &run, Step(0), &files, None, &[]).expect("writable");
    damage(folder.path(), &weights_file(&run, stage), || {
        let _ = read_stage(folder.path(), &run, stage);
    });
    damage(folder.path(), "shoal.json", || {
        let _ = Checkpoint::open(folder.path()).map(|checkpoint| checkpoint.verify());
    });
    Checkpoint::open(folder.path()).and_then(|checkpoint| checkpoint.verify()).expect("as it was");
}
