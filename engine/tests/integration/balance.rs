//! Biases that keep experts equally busy: each token of a step counts once, and all cuts have the same bits.

use std::ops::Range;

use bytes::Bytes;

use crate::common::{self, Trainer, key, manifest, samples, text};
use crate::{device_memory, islands, slices, stages, swapping};
use shoal_engine::{
    AllReduce, EngineError, FixedPoint, group_elements, group_square_norm, parameters, square_norm,
};
use shoal_protocol::ids::{Stage, Step, WeightGroup};
use shoal_protocol::manifest::{Balance, Dtype, Experts, Manifest};

/// Turns a run's layers into mixtures with biases, but the third one.
fn balance(manifest: &mut Manifest) {
    manifest.model.block.experts = Some(Experts {
        shared_intermediate: Some(16),
        dense_layers: vec![2],
        balance: Balance::Bias,
        balance_rate: 0.01,
        ..Experts::new(6, 2, 24)
    });
}

/// The ranges of biases in a stage's flat vector.
fn biases_of(manifest: &Manifest, stage: Stage) -> Vec<Range<usize>> {
    let all = parameters(manifest, stage);
    all.iter().filter(|one| one.is_biases_of_experts()).map(|one| one.range()).collect()
}

/// A trainer's sums of a step, i64.
fn sums(trainer: &Trainer, step: u64) -> Bytes {
    let all = 0..group_elements(&trainer.manifest, WeightGroup(0));
    trainer.engine.export(WeightGroup(0), Step(step), all).expect("hosted")
}

/// The tokens of each expert in some ranges of sums.
fn counts(sums: &[u8], ranges: &[Range<usize>]) -> Vec<Vec<i64>> {
    let words: Vec<i64> =
        sums.as_chunks::<8>().0.iter().map(|word| i64::from_le_bytes(*word)).collect();
    ranges.iter().map(|range| words[range.clone()].to_vec()).collect()
}

/// The largest number of tokens of an expert over the mean, in the layer where that is largest.
fn largest_load(counts: &[Vec<i64>]) -> f64 {
    let load = |counts: &Vec<i64>| {
        let (all, most) = (counts.iter().sum::<i64>(), counts.iter().max().expect("some"));
        *most as f64 * counts.len() as f64 / all as f64
    };
    counts.iter().map(load).fold(0.0, f64::max)
}

/// The largest load and the mean loss of the last steps of 300 from noise.
fn trained(rate: f64) -> (f64, f64) {
    const STEPS: u64 = 300;
    const LAST: u64 = 20;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    balance(&mut manifest);
    let experts = manifest.model.block.experts.as_mut().expect("some");
    (experts.count, experts.dense_layers, experts.balance_rate) = (8, Vec::new(), rate);
    manifest.model.layers = 2;
    manifest.training.steps = STEPS;
    manifest.training.microbatches = 2;
    manifest.training.microbatch_size = 16;
    let samples = samples(&mut manifest, folder.path(), &text());
    let ranges = biases_of(&manifest, Stage(0));
    let mut trainer = Trainer::new(&manifest, samples);
    let mut all = vec![vec![0; 8]; 2];
    let mut loss = 0.0;
    for step in 0..STEPS {
        for microbatch in 0..2 {
            let share = trainer.forward(step, microbatch);
            trainer.backward(step, microbatch);
            loss += if step + LAST >= STEPS { f64::from(share) } else { 0.0 };
        }
        if step + LAST >= STEPS {
            for (all, of_step) in all.iter_mut().zip(counts(&sums(&trainer, step), &ranges)) {
                all.iter_mut().zip(of_step).for_each(|(all, count)| *all += count);
            }
        }
        trainer.finish(step);
    }
    assert!(all.iter().all(|counts| counts.iter().sum::<i64>() == 20 * 2 * 16 * 16 * 2));
    (largest_load(&all), loss / (2 * LAST) as f64)
}

#[test]
fn biases_level_the_load_of_experts() {
    // Biases that reach 3e-6 choose as none do.
    let (without, loss_without) = trained(1e-8);
    let (with, loss) = trained(Experts::BALANCE_RATE);
    println!("load {without} without and {with} with biases, loss {loss_without} and {loss}");
    assert!(without > 1.2 && with <= 1.2, "load {without} without and {with} with biases");
    assert!(loss <= 1.02 * loss_without, "loss {loss_without} without and {loss} with biases");
}

#[test]
fn replicas_count_each_token_once_and_agree_with_one_process() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    balance(&mut manifest);
    // So coarse that counts would show in the norm.
    manifest.training.gradient_fraction_bits = 20;
    let mut make = || {
        let samples = samples(&mut manifest, folder.path(), &text());
        Trainer::new(&manifest, samples)
    };
    let [mut alone, mut one, mut other] = [make(), make(), make()];
    let ranges = biases_of(&manifest, Stage(0));
    let tokens = 2 * 2 * 16;
    for step in 0..3 {
        for microbatch in [2, 0, 1] {
            alone.forward(step, microbatch);
            alone.backward(step, microbatch);
        }
        for (replica, own) in [(&mut one, &[0, 2][..]), (&mut other, &[1])] {
            for microbatch in own {
                // A first attempt that is lost, as after a death.
                let key = key(step, Stage(0), *microbatch);
                replica.forward(step, *microbatch);
                replica.engine.backward(key, None).expect("a backward pass");
                replica.engine.discard(key);
                replica.forward(step, *microbatch);
                replica.backward(step, *microbatch);
                let again = replica.engine.accumulate(key);
                assert!(matches!(again, Err(EngineError::NotInFlight(_))));
            }
        }
        let (whole, parts) = (sums(&alone, step), [sums(&one, step), sums(&other, step)]);
        for of_layer in counts(&whole, &ranges) {
            assert_eq!(of_layer.iter().sum::<i64>(), 3 * tokens, "{of_layer:?}");
        }
        let fixed_point = FixedPoint::of(&manifest);
        let mean = fixed_point.reduce(&[&whole]).expect("one part");
        assert!(mean == fixed_point.reduce(&parts).expect("two parts"), "step {step}");
        let mut reduced = AllReduce::of_group(&manifest, WeightGroup(0)).expect("room");
        let all = 0..group_elements(&manifest, WeightGroup(0));
        reduced.reduce(all, &parts[0], &parts[1..]).expect("two parts");
        let norm = group_square_norm(&manifest, WeightGroup(0), &mean);
        assert_eq!(reduced.outcome().1, norm);
        assert!(square_norm(&mean) > norm, "counts are not part of the norm");
        let targets = alone.targets[&step];
        for trainer in [&mut alone, &mut one, &mut other] {
            trainer.targets.insert(step, targets);
            trainer.apply(step, std::slice::from_ref(&mean));
        }
        let expected = alone.states();
        assert!(one.states() == expected && other.states() == expected, "step {step}");
    }
}

#[test]
fn a_microbatch_that_counted_twice_would_move_biases() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    balance(&mut manifest);
    // So many that some are near the mean.
    manifest.model.block.experts.as_mut().expect("some").count = 32;
    let mut make = || {
        let samples = samples(&mut manifest, folder.path(), &text());
        Trainer::new(&manifest, samples)
    };
    let [mut once, mut twice] = [make(), make()];
    let ranges = biases_of(&manifest, Stage(0));
    for (trainer, microbatches) in [(&mut once, &[0, 1, 2][..]), (&mut twice, &[0, 1, 2, 1])] {
        for microbatch in microbatches {
            trainer.forward(0, *microbatch);
            trainer.backward(0, *microbatch);
        }
    }
    let [right, wrong] = [&once, &twice].map(|trainer| counts(&sums(trainer, 0), &ranges));
    let total = |counts: &[Vec<i64>]| counts.iter().flatten().sum::<i64>();
    assert_eq!(total(&wrong) - total(&right), 3 * 2 * 2 * 16);
    let biases = [once, twice].map(|mut trainer| {
        trainer.finish(0);
        let weights = trainer.states().remove(&Stage(0)).expect("hosted").weights;
        ranges.iter().map(|range| weights[range.clone()].to_vec()).collect::<Vec<_>>()
    });
    for (counts, biases) in right.iter().zip(&biases[0]) {
        let mean = counts.iter().sum::<i64>() as f64 / 32.0;
        for (count, bias) in counts.iter().zip(biases) {
            let towards = (mean - *count as f64).partial_cmp(&0.0).expect("numbers") as i8;
            assert_eq!(*bias, 0.01 * f32::from(towards), "{counts:?}");
        }
    }
    assert_ne!(biases[0], biases[1]);
}

#[test]
fn the_cut_and_repeated_passes_change_no_bit() {
    stages::assert_equal_bits_of_cuts(balance);
}

#[test]
fn slices_have_the_losses_of_whole_experts_and_the_bits_of_one_device() {
    let mut manifest = slices::divisible();
    balance(&mut manifest);
    let off = slices::difference(&manifest, 2);
    assert!(off < 1e-2, "2 slices: {off}");
    slices::assert_bits_of_one_device(balance);
}

#[test]
fn devices_and_swapped_stages_have_the_bits_of_one_device() {
    islands::compare(balance);
    for rule in [common::muon(), common::adafactor()] {
        swapping::compare(|manifest| {
            balance(manifest);
            manifest.training.dtype = Dtype::Bf16;
            manifest.optimizer.rule = rule;
        });
    }
    device_memory::compare(|manifest| {
        balance(manifest);
        manifest.training.dtype = Dtype::Bf16;
        manifest.training.staleness = 1;
    });
}

#[test]
fn checkpoints_have_the_biases_by_name() {
    let (folder, mut manifest) = common::four_stages(balance);
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer::new(&manifest, samples);
    trainer.step(0);
    let place = common::write(&trainer, 1, folder.path());
    let checkpoint = shoal_engine::Checkpoint::open(&place).expect("whole");
    for (stage, state) in trainer.states() {
        let weights = checkpoint.weights(stage).expect("whole");
        assert!(weights == state.weights);
        for range in biases_of(&manifest, stage) {
            assert!(weights[range].iter().any(|bias| *bias != 0.0), "they moved");
        }
    }
    let index = std::fs::read_to_string(place.join("model.safetensors.index.json"));
    let name = "model.layers.1.mlp.gate.e_score_correction_bias";
    assert!(index.expect("written").contains(name));
}
