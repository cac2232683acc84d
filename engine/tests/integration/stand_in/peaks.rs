//! The most memory of a device, against the formulas of `memory.rs`.

use shoal_engine::{Device, gpu_overhead, memory_floor};
use shoal_protocol::ids::StageSpan;
use shoal_protocol::manifest::{Dtype, LayerAttention, Manifest};

use super::counts;
use crate::common::{Trainer, device, manifest, samples, text};

/// What a case changes of the run.
type Change = fn(&mut Manifest);

fn with(change: impl FnOnce(&mut Manifest)) -> Manifest {
    let mut manifest = manifest();
    let model = &mut manifest.model;
    (model.hidden, model.heads, model.key_value_heads) = (128, 4, 4);
    (model.intermediate, model.layers, model.context) = (352, 3, 32);
    manifest.training.dtype = Dtype::Bf16;
    manifest.training.microbatches = 3;
    manifest.training.microbatch_size = 4;
    change(&mut manifest);
    manifest
}

/// The most memory that a run with all microbatches in flight has in use, and what is stated.
fn peak(change: impl FnOnce(&mut Manifest), packed: bool) -> (u64, u64) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = with(change);
    let samples = samples(&mut manifest, folder.path(), &text().repeat(4));
    let _ = Device::open(device(), 1).expect("the stand-in");
    let before = counts::memory().1;
    counts::reset();
    let mut trainer = Trainer { packed, ..Trainer::new(&manifest, samples) };
    let microbatches = manifest.training.microbatches;
    for step in 0..2 {
        for microbatch in 0..microbatches {
            trainer.forward(step, microbatch);
            // The last stage, as a peer runs it, makes both passes of a microbatch at once.
            if manifest.training.recompute {
                trainer.backward(step, microbatch);
            }
        }
        if !manifest.training.recompute {
            (0..microbatches).rev().for_each(|microbatch| trainer.backward(step, microbatch));
        }
        trainer.finish(step);
    }
    let found = counts::memory().0 - before;
    let span = StageSpan::all(manifest.training.stages);
    let floor = memory_floor(&manifest, span, microbatches);
    let further = gpu_overhead(&manifest, span, microbatches, device().lacks_kernels().is_none());
    (found, (floor + further).0)
}

#[test]
#[ignore = "needs the stand-in"]
fn the_most_memory_is_what_is_stated() {
    let changes: [(&str, Change); 8] = [
        ("bf16", |_| {}),
        ("documents", |_| {}),
        ("documents in f32", |manifest| {
            manifest.training.dtype = Dtype::F32;
            manifest.model.key_value_heads = 1;
        }),
        ("f32", |manifest| manifest.training.dtype = Dtype::F32),
        ("many layers", |manifest| manifest.model.layers = 8),
        ("groups", |manifest| manifest.model.key_value_heads = 1),
        ("recompute", |manifest| manifest.training.recompute = true),
        ("long", |manifest| manifest.training.microbatch_size = 16),
    ];
    for (name, change) in changes {
        let (found, stated) = peak(change, name.starts_with("documents"));
        println!("{name}: {found} of {stated}");
        assert!(found <= stated, "{name}: {found} bytes are more than {stated}");
        assert!(10 * found > 7 * stated, "{name}: {stated} is far more than {found}");
    }
}

/// The most memory of the first two steps of a sample of so many tokens.
fn peak_of_row(tokens: u32, window: Option<u32>, dtype: Dtype) -> u64 {
    let change = |manifest: &mut Manifest| {
        manifest.training.dtype = dtype;
        manifest.model.context = tokens;
        let layer = LayerAttention { rotary: Some(0), window };
        manifest.model.block.layers = vec![layer; manifest.model.layers as usize];
        (manifest.training.microbatches, manifest.training.microbatch_size) = (1, 1);
    };
    peak(change, window.is_none()).0
}

#[test]
#[ignore = "needs the stand-in"]
fn documents_and_windows_take_memory_as_their_tokens() {
    for (window, dtype) in
        [(None, Dtype::Bf16), (Some(64), Dtype::Bf16), (None, Dtype::F32), (Some(64), Dtype::F32)]
    {
        let of = |tokens| peak_of_row(tokens, window, dtype);
        let [few, more, most] = [512, 1024, 2048].map(of);
        println!("{dtype:?}, window {window:?}: {few}, {more} and {most} bytes");
        let (first, second) = (more - few, most - more);
        assert!(second < 2 * first + first / 10, "{window:?}: {second} bytes more after {first}");
    }
}
