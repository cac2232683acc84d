//! Generates text from a checkpoint.

use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use shoal_protocol::ids::{StageSpan, Step};
use shoal_protocol::manifest::Manifest;

use crate::checkpoint::Checkpoint;
use crate::device::Device;
use crate::engine::Engine;
use crate::error::Result;
use crate::normal::unit;
use crate::tokenizer;

/// A request for text.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// The beginning of the text; an empty one counts as a new line.
    pub text: String,
    /// Number of tokens to add.
    pub tokens: usize,
    /// Seed of the random choice of tokens.
    pub seed: u64,
    /// Divisor of the logits; 0 always selects the likeliest token.
    pub temperature: f64,
}

/// A model that generates text.
#[derive(Debug)]
pub struct Generator {
    engine: Engine,
    manifest: Manifest,
}

impl Generator {
    /// Loads a checkpoint's weights.
    ///
    /// # Errors
    /// If the checkpoint is damaged or the device has too little memory.
    pub fn open(folder: &Path, device: Device) -> Result<Self> {
        let checkpoint = Checkpoint::open(folder)?;
        let mut manifest = checkpoint.manifest().clone();
        // The previous version of the weights is not needed.
        manifest.training.staleness = 0;
        let span = StageSpan::all(manifest.training.stages);
        let mut engine = Engine::new(&manifest, span, device)?;
        for stage in manifest.stages() {
            engine.set_state(stage, Step(0), &checkpoint.stage(stage)?)?;
        }
        Ok(Self { engine, manifest })
    }

    /// Logits `[T, vocabulary]` that follow each of at most `context` tokens.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        self.engine.logits(tokens)
    }

    /// Continues the prompt; the result does not repeat it. Invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// If libtorch fails.
    pub fn generate(&self, prompt: &Prompt) -> Result<String> {
        let kind = self.manifest.tokens.tokenizer;
        let text = if prompt.text.is_empty() { "\n" } else { &prompt.text };
        let mut tokens = tokenizer::encode(kind, text.as_bytes());
        let start = tokens.len();
        let mut random = ChaCha8Rng::seed_from_u64(prompt.seed);
        let context = self.manifest.model.context as usize;
        let vocabulary = self.manifest.model.vocabulary as usize;
        for _ in 0..prompt.tokens {
            let window = &tokens[tokens.len().saturating_sub(context)..];
            let logits = self.engine.logits(window)?;
            let last = &logits[logits.len() - vocabulary..];
            // The model may have more tokens than the tokenizer.
            let last = &last[..kind.vocabulary() as usize];
            tokens.push(choose(last, prompt.temperature, random.next_u64()));
        }
        Ok(String::from_utf8_lossy(&tokenizer::decode(kind, &tokens[start..])).into_owned())
    }
}

/// The likeliest token, or one drawn by softmax of `logits / temperature`.
fn choose(logits: &[f32], temperature: f64, random: u64) -> u32 {
    let best = (0..logits.len()).max_by(|one, other| logits[*one].total_cmp(&logits[*other]));
    let best = best.expect("a vocabulary is not empty");
    if temperature <= 0.0 {
        return best as u32;
    }
    let largest = f64::from(logits[best]);
    let weight = |logit: &f32| libm::exp((f64::from(*logit) - largest) / temperature);
    let mut left = unit(random) * logits.iter().map(weight).sum::<f64>();
    for (token, logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token as u32;
        }
    }
    best as u32
}
