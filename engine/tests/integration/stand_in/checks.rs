//! Checks that need a process of its own, or a stand-in that counts.

use shoal_engine::{Device, DeviceChoice, Engine, fingerprint};
use shoal_protocol::ids::{ContentHash, StageSpan};
use shoal_protocol::manifest::{Dtype, LayerAttention, Manifest};
use tch::{Kind, Tensor};

use super::counts::calls;
use crate::common::{Trainer, device, devices, manifest, samples, text};

fn open(choice: DeviceChoice, threads: usize) -> Device {
    Device::open(choice, threads).expect("the stand-in")
}

fn fingerprints(threads: [usize; 2]) -> [ContentHash; 2] {
    let devices = devices(2);
    [0, 1].map(|card| fingerprint(&manifest(), open(devices[card], threads[card])).expect("room"))
}

#[test]
#[ignore = "needs the stand-in with two cards"]
fn cards_of_one_model_have_one_fingerprint() {
    let [first, second] = fingerprints([1, 2]);
    assert_eq!(first, second, "neither its number nor the processor's threads decide bits");
    assert_ne!(first, fingerprint(&manifest(), open(DeviceChoice::Cpu, 1)).expect("room"));
}

#[test]
#[ignore = "needs the stand-in with cards of two models"]
fn cards_of_different_models_have_different_fingerprints() {
    let [first, second] = fingerprints([1, 1]);
    assert_ne!(first, second);
}

#[test]
#[ignore = "needs the stand-in in a process of its own"]
fn a_backward_pass_on_the_processor_comes_first() {
    let processor = open(DeviceChoice::Cpu, 1);
    fingerprint(&manifest(), processor).expect("a pass in both directions");
    tch::manual_seed(1);
    assert!(!DeviceChoice::Auto.is_processor());
    assert!(open(DeviceChoice::Cuda(0), 1).is_cuda());
}

#[test]
#[ignore = "needs a process of its own"]
fn the_environment_is_set_before_main() {
    // No device was opened: with threads, nothing may be set any more.
    for name in ["CUBLAS_WORKSPACE_CONFIG", "TORCH_FR_BUFFER_SIZE"] {
        assert!(std::env::var_os(name).is_some(), "{name}");
    }
}

/// The calls of each kernel of attention in a step, and of those that make a matrix of all pairs.
fn attention_of(change: impl FnOnce(&mut Manifest), packed: bool) -> [u64; 3] {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut manifest = manifest();
    assert!(manifest.model.heads > manifest.model.key_value_heads);
    change(&mut manifest);
    let samples = samples(&mut manifest, folder.path(), &text());
    let mut trainer = Trainer { packed, ..Trainer::new(&manifest, samples) };
    super::counts::reset();
    trainer.step(0);
    let pairs = ["aten::_softmax.out", "aten::_safe_softmax", "aten::_softmax"].map(calls);
    let kernels = ["aten::_flash_attention_forward", "aten::_efficient_attention_forward"];
    let [flash, efficient] = kernels.map(calls);
    [flash, efficient, pairs.iter().sum()]
}

/// What a case changes of the run.
type Change = fn(&mut Manifest);

fn with_window(manifest: &mut Manifest) {
    let layer = LayerAttention { rotary: Some(0), window: Some(5) };
    manifest.model.block.layers = vec![layer; manifest.model.layers as usize];
}

#[test]
#[ignore = "needs the stand-in"]
fn documents_and_grouped_keys_make_no_matrix_of_all_pairs() {
    let is_right = |dtype: Dtype, [flash, efficient, pairs]: [u64; 3], packed: bool| {
        // Without flash attention each document is computed by itself.
        let found = if dtype == Dtype::Bf16 { (flash, efficient) } else { (efficient, flash) };
        let by_itself = packed && dtype == Dtype::F32;
        let is_right = if by_itself { found.0 > 4 * 3 } else { found.0 == 4 * 3 };
        pairs == 0 && found.1 == 0 && is_right
    };
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for packed in [true, false] {
            let found = attention_of(|manifest| manifest.training.dtype = dtype, packed);
            assert!(is_right(dtype, found, packed), "{dtype:?}, packed: {packed}: {found:?}");
            let windowed = |manifest: &mut Manifest| {
                manifest.training.dtype = dtype;
                with_window(manifest);
            };
            let found = attention_of(windowed, packed);
            assert!(is_right(dtype, found, true), "{dtype:?}, packed: {packed}: {found:?}");
        }
    }
}

/// What flash attention reads of documents and windows gives what a processor computes.
#[test]
#[ignore = "needs the stand-in"]
fn documents_have_the_losses_and_gradients_of_a_processor() {
    let changes: [(&str, Change); 5] = [
        ("documents", |_| {}),
        ("f32", |manifest| manifest.training.dtype = Dtype::F32),
        ("windows in f32", |manifest| {
            manifest.training.dtype = Dtype::F32;
            with_window(manifest);
        }),
        ("windows", with_window),
        ("slices", |manifest| manifest.model.slices = 2),
    ];
    for (name, change) in changes {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut manifest = manifest();
        manifest.training.dtype = Dtype::Bf16;
        change(&mut manifest);
        let of = |device: DeviceChoice| {
            let mut manifest = manifest.clone();
            let samples = samples(&mut manifest, folder.path(), &text());
            let span = StageSpan::all(manifest.training.stages);
            let engine = Engine::new(&manifest, span, open(device, 1)).expect("room");
            let trainer = Trainer::with_engine(&manifest, samples, engine);
            let mut trainer = Trainer { packed: true, ..trainer };
            let loss = trainer.forward(0, 0);
            trainer.backward(0, 0);
            (loss, trainer.gradients(0))
        };
        let (one, other) = (of(DeviceChoice::Cuda(0)), of(DeviceChoice::Cpu));
        assert!((one.0 - other.0).abs() < 1e-3 * other.0, "{name}: {} and {}", one.0, other.0);
        let (mut off, mut whole) = (0.0, 0.0);
        for (found, expected) in one.1.iter().zip(&other.1) {
            for (found, expected) in found.as_chunks().0.iter().zip(expected.as_chunks().0) {
                let [found, expected] =
                    [found, expected].map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
                off += (found - expected).powi(2);
                whole += expected.powi(2);
            }
        }
        println!("{name}: gradients differ by {} of their norm", (off / whole).sqrt());
        assert!(whole > 0.0 && off < 1e-3 * whole, "{name}: {off} of {whole}");
    }
}

#[test]
#[ignore = "needs the stand-in with two cards"]
fn tensors_of_two_devices_are_refused() {
    let [one, other] = [0, 1].map(|card| {
        let _ = open(DeviceChoice::Cuda(card), 1);
        Tensor::ones([4], (Kind::Float, tch::Device::Cuda(card)))
    });
    let error = one.f_add(&other).expect_err("they are on two devices").to_string();
    assert!(error.contains("device"), "{error}");
    let sum = (one + other.to_device(tch::Device::Cuda(0))).sum(None);
    assert_eq!(f64::try_from(sum).expect("a number"), 8.0);
}

#[test]
#[ignore = "needs the stand-in, and ends its process"]
fn the_processor_reads_device_memory() {
    let _ = open(device(), 1);
    let tensor = Tensor::ones([4], (Kind::Float, tch::Device::Cuda(0)));
    // SAFETY: none; the stand-in ends the process.
    let read = unsafe { tensor.data_ptr().cast::<f32>().read_volatile() };
    println!("{read}");
}

#[test]
#[ignore = "needs the stand-in"]
fn a_card_has_the_kernels_of_the_engine() {
    let _ = open(DeviceChoice::Cuda(0), 1);
    assert_eq!(DeviceChoice::Cuda(0).lacks_kernels(), None);
}
