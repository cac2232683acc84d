//! Mixtures of experts from noise: the same bits however stages, devices and memory are cut.

use crate::common::{self, Trainer, manifest, samples, text, with_workers};
use crate::{device_memory, islands, slices, stages, subspace, swapping};
use shoal_engine::parameters;
use shoal_protocol::ids::Stage;
use shoal_protocol::manifest::{
    Dtype, ExpertGroups, Experts, Lora, LoraTarget, Manifest, Quantisation, Router,
};

/// Turns a run's layers into mixtures, but the third one.
fn mix(manifest: &mut Manifest) {
    manifest.model.block.experts = Some(Experts {
        shared_intermediate: Some(16),
        dense_layers: vec![2],
        ..Experts::new(6, 2, 24)
    });
}

/// The same by sigmoids, with groups and biases that do not move, as in DeepSeek-V3.
fn mix_by_sigmoids(manifest: &mut Manifest) {
    mix(manifest);
    let experts = manifest.model.block.experts.as_mut().expect("they were just set");
    (experts.router, experts.biased, experts.wide_router) = (Router::Sigmoid, true, true);
    experts.groups = Some(ExpertGroups { count: 3, chosen: 2 });
    (experts.scale, experts.shared_gated) = (2.5, false);
}

#[test]
fn the_cut_and_repeated_passes_change_no_bit() {
    stages::assert_equal_bits_of_cuts(mix);
    stages::assert_equal_bits_of_cuts(mix_by_sigmoids);
}

#[test]
fn a_mixture_learns_with_every_expert() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    mix(&mut manifest);
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    let first = trainer.weights();
    let losses: Vec<f64> = (0..20).map(|step| trainer.step(step).0).collect();
    assert!(losses[0] - losses[19] > 0.5, "{losses:?}");
    let last = trainer.weights();
    let flat = |weights: &[u32], range: std::ops::Range<usize>| weights[range].to_vec();
    let all = parameters(&manifest, Stage(0));
    assert_eq!(all.iter().filter(|one| one.name.contains(".mlp.experts.")).count(), 3 * 6 * 3);
    for parameter in all.iter().filter(|one| one.name.contains(".mlp.")) {
        let [from, to] = [&first, &last].map(|weights| flat(weights, parameter.range()));
        assert!(from != to, "{} stays", parameter.name);
    }
}

#[test]
fn slices_have_the_losses_of_whole_experts() {
    let mut manifest = slices::divisible();
    mix(&mut manifest);
    for count in [2, 4] {
        let off = slices::difference(&manifest, count);
        assert!(off < 1e-3, "{count} slices: {off}");
    }
}

#[test]
fn devices_that_share_slices_of_experts_compute_the_bits_of_one() {
    slices::assert_bits_of_one_device(mix);
    slices::assert_bits_of_one_device(mix_by_sigmoids);
}

#[test]
fn islands_and_virtual_workers_compute_the_bits_of_one_device() {
    islands::compare(mix);
    islands::compare(|manifest| {
        mix(manifest);
        manifest.training.stages = 1;
        *manifest = with_workers(manifest.clone());
    });
}

#[test]
fn swapped_experts_compute_the_bits_of_resident_ones() {
    swapping::compare(mix_by_sigmoids);
    for rule in [common::muon(), common::adafactor()] {
        swapping::compare(|manifest| {
            mix(manifest);
            manifest.training.dtype = Dtype::Bf16;
            manifest.optimizer.rule = rule;
        });
    }
}

#[test]
fn experts_that_pass_through_the_device_compute_the_bits_of_those_that_stay() {
    device_memory::compare(|manifest| {
        mix(manifest);
        manifest.training.staleness = 1;
    });
}

#[test]
fn adapters_are_trained_beside_frozen_experts() {
    for (base, slices) in [(None, 1), (Some(Quantisation::Nf4), 1), (Some(Quantisation::Nf4), 2)] {
        device_memory::compare(|manifest| {
            mix_by_sigmoids(manifest);
            manifest.model.slices = slices;
            let targets = if slices == 1 { &LoraTarget::ALL[..] } else { &LoraTarget::ALL[..4] };
            manifest.lora = Some(Lora { rank: 2, alpha: 4.0, targets: targets.to_vec(), base });
        });
    }
}

#[test]
fn experts_stay_in_a_subspace() {
    subspace::assert_stays_in_the_subspace(mix);
}
