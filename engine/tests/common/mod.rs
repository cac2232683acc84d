//! A training run in one thread: the driver's work without a network.

#![allow(dead_code, reason = "each test uses its part")]

#[path = "../../src/testing.rs"]
mod testing;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bytes::Bytes;
use serde_json::Value;
use shoal_engine::checkpoint::write_index;
use shoal_engine::{
    BaseFiles, Device, DeviceChoice, Engine, FixedPoint, ForwardOutput, Samples, TokenFile, data,
    square_norm,
};
use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, StageSpan, Step};
use shoal_protocol::manifest::{Manifest, Model, Tokenizer};

/// The small run of the crate's own tests, a little larger.
pub(crate) fn manifest() -> Manifest {
    let mut run = testing::manifest();
    run.model = Model {
        hidden: 32,
        layers: 4,
        heads: 4,
        key_value_heads: 2,
        intermediate: 48,
        context: 16,
        ..run.model
    };
    run.training.steps = 20;
    run.training.microbatches = 3;
    run.optimizer.warmup_steps = 4;
    run.tokens.count = 0;
    run
}

/// Writes a text's token file into `folder`, adds it to the manifest and returns the samples.
pub(crate) fn samples(manifest: &mut Manifest, folder: &Path, text: &[u8]) -> Samples {
    let path = folder.join("tokens.bin");
    manifest.tokens = data::write_tokens(text, Tokenizer::Bytes, &path).expect("writable");
    manifest.check().expect("a valid manifest");
    Samples::new(manifest, TokenFile::open(&path, &manifest.tokens).expect("just written"))
}

/// Some text, long enough for the small run.
pub(crate) fn text() -> Vec<u8> {
    include_bytes!("../../../LICENSE-APACHE").to_vec()
}

/// One run and its state.
pub(crate) struct Trainer {
    pub(crate) manifest: Manifest,
    pub(crate) engine: Engine,
    pub(crate) samples: Samples,
    /// The model that it starts from.
    pub(crate) base: Option<BaseFiles>,
}

impl Trainer {
    pub(crate) fn new(manifest: &Manifest, samples: Samples) -> Self {
        let device = Device::open(DeviceChoice::Cpu, 1).expect("a CPU");
        let span = StageSpan::all(manifest.training.stages);
        let engine = Engine::new(manifest, span, device).expect("room for a small model");
        Self { manifest: manifest.clone(), engine, samples, base: None }
    }

    /// Like [`Trainer::new`], from the weights of a base.
    pub(crate) fn from_base(manifest: &Manifest, samples: Samples, base: &BaseFiles) -> Self {
        let mut trainer = Self::new(manifest, samples);
        for stage in manifest.stages() {
            trainer.engine.load_base(stage, base).expect("a whole base");
        }
        trainer.base = Some(base.clone());
        trainer
    }

    /// Forward through all stages; returns the loss.
    pub(crate) fn forward(&mut self, step: u64, microbatch: u32) -> f32 {
        let batch = self.samples.batch(Step(step), Microbatch(microbatch));
        let mut input = batch.inputs;
        for stage in self.manifest.stages() {
            match self.engine.forward(key(step, stage, microbatch), &input, Some(&batch.labels)) {
                Ok(ForwardOutput::Activation(activation)) => input = activation,
                Ok(ForwardOutput::Loss(loss)) => return loss,
                Err(error) => panic!("{error}"),
            }
        }
        panic!("the last stage gives a loss")
    }

    /// Backward through all stages; counts the microbatch.
    pub(crate) fn backward(&mut self, step: u64, microbatch: u32) {
        let mut gradient: Option<Bytes> = None;
        for stage in self.manifest.stages().collect::<Vec<_>>().into_iter().rev() {
            let key = key(step, stage, microbatch);
            gradient = self.engine.backward(key, gradient.as_ref()).expect("a backward pass");
            self.engine.accumulate(key).expect("gradients in range");
        }
    }

    /// Reduces and applies; returns the global norm.
    pub(crate) fn finish(&mut self, step: u64) -> f64 {
        let gradients = self.gradients(step);
        self.apply(step, &gradients)
    }

    /// The mean gradient of every stage.
    pub(crate) fn gradients(&self, step: u64) -> Vec<Bytes> {
        let fixed_point = FixedPoint::of(&self.manifest);
        let mean = |stage| {
            let all = 0..self.engine.parameters(stage).expect("hosted");
            let part = self.engine.export(stage, Step(step), all).expect("hosted");
            fixed_point.reduce(&[part]).expect("one part")
        };
        self.manifest.stages().map(mean).collect()
    }

    /// Applies; returns the global norm.
    pub(crate) fn apply(&mut self, step: u64, gradients: &[Bytes]) -> f64 {
        let norm = gradients.iter().map(|gradient| square_norm(gradient)).sum::<f64>().sqrt();
        for (stage, gradient) in self.manifest.stages().zip(gradients) {
            self.engine.apply(stage, Step(step), gradient, norm).expect("a whole gradient");
        }
        norm
    }

    /// Runs a whole step; returns its mean loss and the gradient's norm.
    pub(crate) fn step(&mut self, step: u64) -> (f64, f64) {
        let microbatches = self.manifest.training.microbatches;
        let mut loss = 0.0;
        for microbatch in 0..microbatches {
            loss += f64::from(self.forward(step, microbatch));
            self.backward(step, microbatch);
        }
        (loss / f64::from(microbatches), self.finish(step))
    }

    /// All weights in the order of an uncut model, as bits.
    pub(crate) fn weights(&self) -> Vec<u32> {
        let state = |stage| self.engine.state(stage).expect("hosted").weights;
        self.manifest.stages().flat_map(state).map(f32::to_bits).collect()
    }
}

pub(crate) fn key(step: u64, stage: Stage, microbatch: u32) -> ClaimKey {
    ClaimKey { step: Step(step), stage, microbatch: Microbatch(microbatch) }
}

/// Runs a script of `tests/python` and parses the JSON that it prints.
pub(crate) fn python(script: &str, arguments: &[&str]) -> Value {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = crate_folder.join("../.venv/bin/python");
    assert!(
        python.exists(),
        "this test needs PyTorch and transformers: run scripts/setup.sh --tests"
    );
    let output = Command::new(python)
        .arg(crate_folder.join("tests/python").join(script))
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("python starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {complaint}");
    serde_json::from_slice(&output.stdout).expect("the script prints JSON")
}

/// The numbers of a JSON list.
pub(crate) fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list");
    list.iter().map(|number| number.as_f64().expect("a number")).collect()
}

/// Writes a checkpoint.
pub(crate) fn write(trainer: &Trainer, step: u64, folder: &Path) -> PathBuf {
    let place = folder.join(format!("checkpoint-{step}"));
    fs::create_dir(&place).expect("writable");
    let mut files = Vec::new();
    for stage in trainer.manifest.stages() {
        files.extend(trainer.engine.write_stage(stage, &place).expect("writable"));
    }
    let base = trainer.base.as_ref();
    write_index(&place, &trainer.manifest, Step(step), &files, base).expect("writable");
    place
}
