//! The auxiliary loss that keeps experts equally busy: all cuts have the same bits. `families.rs` compares it with PyTorch.

use crate::common::{self, Trainer, manifest, samples, text, with_workers};
use crate::{device_memory, islands, slices, stages, swapping};
use shoal_engine::EngineError;
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{Balance, Dtype, Experts, Manifest};

/// Turns a run's layers into mixtures that a loss balances, but the third one.
fn balance(manifest: &mut Manifest) {
    manifest.model.block.experts = Some(Experts {
        shared_intermediate: Some(16),
        dense_layers: vec![2],
        balance: Balance::Loss,
        balance_coefficient: 0.2,
        ..Experts::new(6, 2, 24)
    });
}

#[test]
fn the_loss_changes_what_is_learnt_in_every_layer_before_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let trained = |kind| {
        let mut manifest = manifest();
        balance(&mut manifest);
        let experts = manifest.model.block.experts.as_mut().expect("some");
        // The last layer alone.
        (experts.balance, experts.dense_layers) = (kind, (0..manifest.model.layers - 1).collect());
        let samples = samples(&mut manifest, folder.path(), &text());
        let mut trainer = Trainer::new(&manifest, samples);
        let loss = trainer.step(0).0;
        (loss, trainer.weights(), manifest)
    };
    let (loss, plain, manifest) = trained(Balance::None);
    let (balanced_loss, balanced, _) = trained(Balance::Loss);
    assert_eq!(loss, balanced_loss, "reports have the loss of the text alone");
    for parameter in shoal_engine::parameters(&manifest, Stage(0)) {
        let [one, other] = [&plain, &balanced].map(|all| all[parameter.range()].to_vec());
        let last = format!("model.layers.{}.", manifest.model.layers - 1);
        let is_before =
            !parameter.name.starts_with(&last) && parameter.name.starts_with("model.layers");
        let is_router = parameter.name.ends_with("mlp.gate.weight");
        assert!(one != other || !(is_before || is_router), "{}", parameter.name);
    }
}

#[test]
fn the_cut_and_repeated_passes_change_no_bit() {
    stages::assert_equal_bits_of_cuts(balance);
}

#[test]
fn slices_have_the_losses_of_whole_experts_and_the_bits_of_one_device() {
    let mut manifest = slices::divisible();
    balance(&mut manifest);
    for count in [2, 4] {
        let off = slices::difference(&manifest, count);
        assert!(off < 1e-2, "{count} slices: {off}");
    }
    slices::assert_bits_of_one_device(balance);
}

#[test]
fn devices_workers_and_swapped_stages_have_the_bits_of_one_device() {
    islands::compare(balance);
    islands::compare(|manifest| {
        balance(manifest);
        manifest.training.stages = 1;
        *manifest = with_workers(manifest.clone());
    });
    swapping::compare(|manifest| {
        balance(manifest);
        manifest.training.dtype = Dtype::Bf16;
        manifest.optimizer.rule = common::muon();
    });
    device_memory::compare(|manifest| {
        balance(manifest);
        manifest.training.staleness = 1;
    });
}

#[test]
fn a_stage_before_the_last_needs_the_labels() {
    let (folder, mut manifest) = common::four_stages(balance);
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let inputs = vec![0; 4 * manifest.tokens_per_microbatch() as usize].into();
    let key = common::key(0, Stage(0), 0);
    let error = trainer.engine.forward(key, &inputs, None).expect_err("no labels");
    assert!(matches!(error, EngineError::MissingLabels(_)), "{error}");
}
