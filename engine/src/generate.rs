//! Generates tokens from a checkpoint.

use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use shoal_protocol::ids::{StageSpan, Step};
use shoal_protocol::manifest::Manifest;

use crate::checkpoint::Checkpoint;
use crate::device::Device;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::normal::unit;

/// A request for tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Number of tokens to add at most.
    pub tokens: usize,
    /// Seed of the random choice of tokens.
    pub seed: u64,
    /// Divisor of the logits; 0 always selects the likeliest token.
    pub temperature: f64,
    /// Tokens from this one on are never chosen: the model may have more than the tokenizer.
    pub vocabulary: u32,
    /// Tokens that end the text.
    pub ends: Vec<u32>,
}

/// A model that generates tokens.
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

    /// Continues a prompt, which has at least one token. The result has neither the prompt nor the token
    /// that ends the text.
    ///
    /// # Errors
    /// If libtorch fails, or a token of the prompt is not one of the model's.
    pub fn generate(&self, prompt: &[u32], sampling: &Sampling) -> Result<Vec<u32>> {
        let mut tokens = prompt.to_vec();
        let mut random = ChaCha8Rng::seed_from_u64(sampling.seed);
        let context = self.manifest.model.context as usize;
        let vocabulary = self.manifest.model.vocabulary;
        if let Some(token) = tokens.iter().find(|token| **token >= vocabulary) {
            return Err(EngineError::UnknownToken { token: *token, vocabulary });
        }
        for _ in 0..sampling.tokens {
            let window = &tokens[tokens.len().saturating_sub(context)..];
            let logits = self.engine.logits(window)?;
            let last = &logits[logits.len() - vocabulary as usize..];
            let last = &last[..sampling.vocabulary.min(vocabulary) as usize];
            let token = choose(last, sampling.temperature, random.next_u64());
            if sampling.ends.contains(&token) {
                break;
            }
            tokens.push(token);
        }
        Ok(tokens.split_off(prompt.len()))
    }

    /// The run's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
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
