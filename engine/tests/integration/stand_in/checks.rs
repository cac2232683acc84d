//! Checks that need a process of its own, or a stand-in that counts.

use shoal_engine::{Device, DeviceChoice, fingerprint};
use shoal_protocol::ids::ContentHash;
use shoal_protocol::manifest::Dtype;
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

/// Documents need a mask. With it, no kernel of a GPU takes keys of groups of heads.
#[test]
#[ignore = "needs the stand-in"]
fn documents_and_grouped_keys_make_no_matrix_of_all_pairs() {
    for (dtype, packed) in [(Dtype::Bf16, true), (Dtype::F32, true), (Dtype::F32, false)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut manifest = manifest();
        manifest.training.dtype = dtype;
        assert!(manifest.model.heads > manifest.model.key_value_heads);
        let samples = samples(&mut manifest, folder.path(), &text());
        let mut trainer = Trainer { packed, ..Trainer::new(&manifest, samples) };
        super::counts::reset();
        trainer.step(0);
        let found = ["aten::_softmax.out", "aten::_safe_softmax", "aten::_softmax"].map(calls);
        let kernels = calls("aten::_efficient_attention_forward");
        assert_eq!(found, [0; 3], "{dtype:?}, packed: {packed}: softmax of a matrix of all pairs");
        assert!(kernels > 0, "{dtype:?}, packed: {packed}");
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
