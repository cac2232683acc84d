//! Trains on request and reports the duration: Shoal's side of `make bench`.
//!
//! The only argument is a model as JSON. Each line on stdin requests some steps as JSON, each line
//! on stdout answers. In between the process is idle, so that a benchmark can alternate between
//! several.
//!
//! ```text
//! train_rounds '{"device":"cpu","threads":1,"hidden":256,"layers":4,"heads":4,"intermediate":688,
//!                "context":128,"batch":32,"text":"README.md"}'
//! {"dtype":"f32","microbatches":4,"steps":3}
//! ```

#[path = "../tests/integration/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shoal_engine::{Device, DeviceChoice, Engine};
use shoal_protocol::ids::StageSpan;
use shoal_protocol::manifest::{
    Codecs, Dtype, Experts, Lora, LoraTarget, Quantisation, QueryKeyNorm,
};

/// The model and the data.
#[derive(Deserialize)]
struct Model {
    device: String,
    threads: usize,
    hidden: u32,
    layers: u32,
    heads: u32,
    intermediate: u32,
    context: u32,
    /// Samples of one step.
    batch: u32,
    text: PathBuf,
    vocabulary: u32,
    /// `None` is as many as query heads.
    key_value_heads: Option<u32>,
    tied: bool,
    /// Experts of a layer, each as wide inside as `intermediate`; 0 has one feed-forward block.
    #[serde(default)]
    experts: u32,
    /// Experts of a token.
    #[serde(default)]
    experts_per_token: u32,
    /// Whether each head's queries and keys are normalised.
    #[serde(default)]
    query_key_norm: bool,
    /// Rank of adapters beside every matrix of a layer; `None` trains all weights.
    #[serde(default)]
    lora_rank: Option<u32>,
    /// How the matrices beside adapters are held; `None` in the dtype of passes.
    #[serde(default)]
    lora_base: Option<Quantisation>,
    /// Whether samples are packed of documents, which attention does not cross.
    #[serde(default)]
    packed: bool,
}

#[derive(Deserialize)]
struct Order {
    dtype: Dtype,
    /// Microbatches of one step; a divisor of `batch`.
    microbatches: u32,
    steps: u64,
}

#[derive(Serialize)]
struct Answer {
    tokens: u64,
    seconds: f64,
    loss: f64,
}

/// A trainer and its next step.
struct Run {
    trainer: common::Trainer,
    step: u64,
}

fn main() {
    let model = std::env::args().nth(1).expect("a model as JSON");
    let model: Model = serde_json::from_str(&model).expect("a model as JSON");
    let choice: DeviceChoice = model.device.parse().expect("auto, cpu or cuda:N");
    let device = Device::open(choice, model.threads).expect("a device that works");
    let text = std::fs::read(&model.text).expect("a text");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut runs = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line.expect("text")).expect("an order as JSON");
        let name = format!("{:?}-{}", order.dtype, order.microbatches);
        let run = runs
            .entry(name.clone())
            .or_insert_with(|| begin(&model, &order, device, &text, &folder.path().join(&name)));
        let answer = serde_json::to_string(&train(run, order.steps)).expect("plain data");
        println!("{answer}");
        std::io::stdout().flush().expect("the output is read");
    }
}

fn begin(model: &Model, order: &Order, device: Device, text: &[u8], folder: &Path) -> Run {
    let mut manifest = common::manifest();
    manifest.model.hidden = model.hidden;
    manifest.model.layers = model.layers;
    manifest.model.heads = model.heads;
    manifest.model.key_value_heads = model.key_value_heads.unwrap_or(model.heads);
    manifest.model.vocabulary = model.vocabulary;
    manifest.model.block.tied = model.tied;
    manifest.model.intermediate = model.intermediate;
    manifest.model.block.experts = (model.experts > 0).then(|| experts(model));
    if model.query_key_norm {
        manifest.model.block.query_key_norm = QueryKeyNorm::Head;
    }
    manifest.model.context = model.context;
    manifest.lora = model.lora_rank.map(|rank| Lora {
        rank,
        alpha: 2.0 * f64::from(rank),
        targets: LoraTarget::ALL.to_vec(),
        base: model.lora_base,
    });
    manifest.training.dtype = order.dtype;
    manifest.codec = Codecs::all(order.dtype.into());
    manifest.training.microbatches = order.microbatches;
    manifest.training.microbatch_size = model.batch / order.microbatches;
    manifest.training.steps = 1 << 20;
    std::fs::create_dir_all(folder).expect("a folder for the tokens");
    let samples = common::samples(&mut manifest, folder, text);
    let engine = Engine::new(&manifest, StageSpan::all(1), device).expect("room for the model");
    Run {
        trainer: common::Trainer {
            manifest,
            engine,
            samples,
            base: None,
            packed: model.packed,
            spread: (model.vocabulary / 256).max(1),
            targets: Default::default(),
            given: Default::default(),
        },
        step: 0,
    }
}

fn experts(model: &Model) -> Experts {
    Experts::new(model.experts, model.experts_per_token, model.intermediate)
}

fn train(run: &mut Run, steps: u64) -> Answer {
    let start = Instant::now();
    let mut loss = 0.0;
    for _ in 0..steps {
        loss = run.trainer.step(run.step).0;
        run.step += 1;
    }
    let tokens = steps * run.trainer.manifest.tokens_per_step();
    Answer { tokens, seconds: start.elapsed().as_secs_f64(), loss }
}
