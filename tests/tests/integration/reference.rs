//! A run compared with PyTorch and transformers, through the command line alone.

use std::f64::consts::PI;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::python::python;
use shoal_tests::run::{Run, Trained};

const STEPS: u64 = 12;
const MICROBATCHES: u64 = 2;

fn run_of(steps: u64) -> Run {
    let number = |number: u64| toml::Value::from(number as i64);
    Run::tiny(&[
        ("training.steps", number(steps)),
        ("training.microbatches", number(MICROBATCHES)),
        ("evaluation.every", number(0)),
    ])
}

/// The output of `shoal data show`.
fn batch(config: &Path, step: u64, microbatch: u64) -> Value {
    let command = shoal([
        "data".as_ref(),
        "show".as_ref(),
        config.as_os_str(),
        "--step".as_ref(),
        step.to_string().as_ref(),
        "--microbatch".as_ref(),
        microbatch.to_string().as_ref(),
    ]);
    let shown = Process::start("data show", command).end().success();
    serde_json::from_str(&shown).expect("it prints JSON")
}

/// The documented schedule: a linear warm-up, then half a cosine.
fn learning_rate(optimizer: &toml::Table, step: u64) -> f64 {
    let value = |name: &str| optimizer[name].as_float().expect("a number");
    let warmup = optimizer["warmup_steps"].as_integer().expect("a number") as f64;
    let (highest, lowest, step) =
        (value("learning_rate"), value("final_learning_rate"), step as f64);
    if step < warmup {
        return highest * (step + 1.0) / warmup;
    }
    let progress = (step - warmup) / (STEPS as f64 - 1.0 - warmup);
    lowest + (highest - lowest) * 0.5 * (1.0 + (PI * progress).cos())
}

#[test]
fn a_pytorch_loop_reproduces_the_losses_of_a_run() {
    let run = run_of(STEPS);
    let trained = run.local("trained");
    let ours = trained.losses();
    let untrained = run_of(0);
    let initial = untrained.local("initial");

    let config: toml::Table =
        fs::read_to_string(run.config()).expect("it is there").parse().expect("valid TOML");
    let optimizer = config["optimizer"].as_table().expect("a section");
    let step = |step| {
        let batches = (0..MICROBATCHES).map(|microbatch| batch(&run.config(), step, microbatch));
        json!({
            "microbatches": batches.collect::<Vec<_>>(),
            "learning_rate": learning_rate(optimizer, step),
        })
    };
    let mut request = json!({
        "checkpoint": initial.checkpoint(),
        "trained": trained.checkpoint(),
        "staleness": 0,
        "steps": (0..STEPS).map(step).collect::<Vec<_>>(),
    });
    for name in ["beta1", "beta2", "epsilon", "weight_decay", "gradient_clip"] {
        request[name] = optimizer[name].as_float().expect("a number").into();
    }
    let path = run.path("reference.json");
    fs::write(&path, request.to_string()).expect("room for a file");
    let answer = python(Path::new("engine/tests/python/reference.py"), [&path]);

    let theirs = answer["losses"].as_array().expect("a list");
    assert_eq!((ours.len(), theirs.len()), (STEPS as usize, STEPS as usize));
    for (step, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let theirs = theirs.as_f64().expect("a number");
        assert!((ours - theirs).abs() < 1e-3, "step {step}: {ours} and {theirs}");
    }
    let [off, moved] = ["off", "moved"].map(|what| answer[what].as_f64().expect("a number"));
    assert!(off < 0.1 * moved, "weights that moved by {moved} differ by {off}");
    assert!(ours[0] - ours[STEPS as usize - 1] > 0.5, "nothing was learnt: {ours:?}");
}

#[test]
fn transformers_loads_a_checkpoint_and_shoal_generates_text_with_it() {
    let run = run_of(2);
    let trained = run.local("trained");
    let tokens = json!([83, 104, 111, 97, 108]).to_string();
    // The script checks keys, generation settings and the tokenizer's round trip.
    let logits = python(
        Path::new("engine/tests/python/checkpoint.py"),
        [trained.checkpoint().as_os_str(), tokens.as_ref()],
    );
    assert_eq!(logits.as_array().expect("a list").len(), 5 * 256);
    let text = generate(&trained, "7");
    assert!(text.starts_with("Licensed under "), "{text:?}");
    assert_eq!(text, generate(&trained, "7"), "a seed decides the text");
    assert_ne!(text, generate(&trained, "8"));
}

fn generate(trained: &Trained, seed: &str) -> String {
    let folder = trained.checkpoint();
    let mut command = shoal(["generate".as_ref(), folder.as_os_str()]);
    command.args(["--prompt", "Licensed under ", "--tokens", "20", "--seed", seed]);
    Process::start("generate", command).end().success()
}
