//! Code for GPUs, on a stand-in for CUDA that computes with the processor (`engine/tests/stand_in`).
//!
//! The tests here run other tests of this program in processes of their own, which find the stand-in in place of
//! PyTorch's library. Those that only a stand-in can pass are ignored otherwise.

mod budgets;
mod checks;
mod counts;
mod expected;
mod peaks;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

/// Builds the stand-in, unless it is there. Returns its folder.
fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in/build.sh");
    let status = Command::new(script).arg(&folder).status().expect("bash");
    assert!(status.success(), "{script} failed");
    folder
}

/// Where such a process finds libraries: the stand-in, and NVRTC, which a libtorch of its own lacks and the tests'
/// Python has.
fn libraries() -> OsString {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/lib");
    let versions = fs::read_dir(python).into_iter().flatten().flatten();
    let compilers = versions.map(|version| version.path().join("site-packages/nvidia/cu13/lib"));
    env::join_paths([folder()].into_iter().chain(compilers))
        .expect("no folder has a colon in its name")
}

/// A process that runs tests of this program on so many equal cards of the stand-in.
fn tests(cards: usize, names: &[&str]) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    let devices: Vec<String> = (0..cards).map(|card| format!("cuda:{card}")).collect();
    command
        .args(names)
        .arg("--include-ignored")
        .env("LD_LIBRARY_PATH", libraries())
        .env("STAND_IN_CARDS", vec!["stand-in"; cards].join(","))
        .env("SHOAL_TEST_DEVICE", devices.join(","));
    command
}

/// Runs a process to its end, and prints its output where it fails.
fn passes(mut command: Command) {
    let output = command.stdin(Stdio::null()).output().expect("this program runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}\n{out}{error}", output.status);
    for name in command.get_args().filter_map(|name| name.to_str()) {
        let is_name = name.contains("::") && !name.starts_with("--");
        assert!(!is_name || out.contains(&format!("test {name}")), "no test is named {name}");
    }
}

#[test]
fn one_card_passes_the_tests_of_engines() {
    let names = [
        "stages::",
        "device_memory::with",
        "device_memory::checkpoints_restarts",
        "swapping::swapped_stages",
        "lora::",
        "generation::",
    ];
    passes(tests(1, &names));
}

#[test]
fn two_cards_pass_the_tests_of_islands() {
    let names = [
        "device_memory::several_devices",
        "device_memory::weights_are_fetched",
        "islands::islands_compute_the_bits_of_one_device_in_bf16",
        "islands::islands_compute_the_bits_of_one_device_with_adapters",
        "islands::a_device_that_panics",
        "islands::an_island_loads",
        "slices::devices_that_share_slices_compute_the_bits_of_one_within_a_subspace",
    ];
    let mut command = tests(2, &names);
    // Virtual workers take minutes.
    command.args(["--skip", "virtual_workers"]);
    passes(command);
}

#[test]
fn kernels_waits_and_bytes_are_within_their_budgets() {
    let mut command = tests(1, &["stand_in::budgets", "stand_in::peaks", "stand_in::expected"]);
    // The counts are those of the process.
    command.arg("--test-threads=1");
    passes(command);
}

#[test]
fn equal_cards_have_equal_fingerprints() {
    passes(tests(2, &["stand_in::checks::cards_of_one_model_have_one_fingerprint"]));
}

#[test]
fn cards_of_two_models_have_two_fingerprints() {
    let mut command = tests(2, &["stand_in::checks::cards_of_different_models"]);
    command.env("STAND_IN_CARDS", "stand-in,another");
    passes(command);
}

#[test]
fn work_of_the_processor_does_not_turn_cuda_off() {
    passes(tests(1, &["stand_in::checks::a_backward_pass_on_the_processor_comes_first"]));
    passes(tests(1, &["stand_in::checks::the_environment_is_set_before_main"]));
}

#[test]
fn documents_and_grouped_keys_take_a_kernel_of_attention() {
    passes(tests(1, &["stand_in::checks::documents_and_grouped_keys"]));
    passes(tests(1, &["stand_in::checks::documents_have_the_losses"]));
    passes(tests(1, &["stand_in::checks::a_card_has_the_kernels_of_the_engine"]));
}

#[test]
fn the_stand_in_sees_what_a_gpu_would_do_wrong() {
    passes(tests(2, &["stand_in::checks::tensors_of_two_devices"]));
    let mut command = tests(1, &["stand_in::checks::the_processor_reads_device_memory"]);
    assert!(!command.output().expect("this program runs").status.success(), "it was read");
}
