//! Generates tokens with a checkpoint or a base.

use std::ops::ControlFlow;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use shoal_protocol::manifest::Tokenizer;

use crate::device::setup::Device;
use crate::error::{EngineError, Result};
use crate::text::language_model::{Cache, LanguageModel};
use crate::text::sampling::Sampling;

/// A model that generates tokens. It keeps the keys and values of the text that it has read last.
#[derive(Debug)]
pub struct Generator {
    model: LanguageModel,
    cache: Cache,
    /// The tokens in the cache.
    read: Vec<u32>,
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The model chose a token that ends texts.
    EndToken,
    /// It has as many tokens as were asked for.
    Tokens,
    /// It has as many tokens as the model has positions.
    Positions,
}

impl Generator {
    /// Loads the weights of a checkpoint or a base.
    ///
    /// # Errors
    /// If the folder has neither, a file is damaged or the device has too little memory.
    pub fn open(folder: &Path, device: Device) -> Result<Self> {
        Self::open_with_base(folder, None, device)
    }

    /// Like [`Generator::open`]; a checkpoint of adapters needs the `base` of its run.
    ///
    /// # Errors
    /// As there, and if the base is missing or another one.
    pub fn open_with_base(folder: &Path, base: Option<&Path>, device: Device) -> Result<Self> {
        let model = LanguageModel::open(folder, base, device)?;
        Ok(Self { cache: model.cache(), model, read: Vec::new() })
    }

    /// The longest text that the model can read, in tokens: the base's longest position or, without a
    /// base, the context that it was trained with.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.model.positions()
    }

    /// Number of tokens that the model knows.
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        self.model.vocabulary()
    }

    /// The tokenizer of the text that the model was trained on; `None` if `tokenizer.json` in its
    /// folder has it.
    #[must_use]
    pub fn tokenizer(&self) -> Option<Tokenizer> {
        self.model.tokenizer()
    }

    /// Logits `[T, vocabulary]` that follow each token of a text of at most [`Generator::positions`]
    /// tokens, computed at once.
    ///
    /// # Errors
    /// If the text is too long or has a token that is not one of the model's, or libtorch fails.
    pub fn logits(&mut self, text: &[u32]) -> Result<Vec<f32>> {
        self.check_length(text)?;
        self.fit_length(text.len())?;
        self.model.logits(text)
    }

    /// Logits that follow a text, which has at least one token. Reads only the tokens that follow
    /// the common beginning of this text and the one before.
    ///
    /// # Errors
    /// Like [`Generator::logits`].
    ///
    /// # Panics
    /// If the text is empty.
    pub fn next_logits(&mut self, text: &[u32]) -> Result<Vec<f32>> {
        self.check_length(text)?;
        self.fit_length(text.len())?;
        let common = text.iter().zip(&self.read).take_while(|(one, other)| one == other).count();
        // The last token is read again if it is in the cache: logits follow from a pass alone.
        self.forget(common.min(text.len().saturating_sub(1)));
        let new = &text[self.read.len()..];
        let logits = self.model.next_logits(new, &mut self.cache).inspect_err(|_| {
            // Some layers may have the tokens already.
            self.cache = self.model.cache();
            self.read.clear();
        })?;
        self.read.extend(new);
        Ok(logits)
    }

    /// Continues a prompt, which has at least one token. The result has neither the prompt nor the token
    /// that ends the text.
    ///
    /// # Errors
    /// If the prompt has more tokens than the model has positions.
    pub fn generate(&mut self, prompt: &[u32], sampling: Sampling) -> Result<Generation<'_>> {
        self.check_length(prompt)?;
        Ok(Generation {
            random: ChaCha8Rng::seed_from_u64(sampling.seed),
            text: prompt.to_vec(),
            left: sampling.tokens,
            sampling,
            has_ended: false,
            ending: None,
            generator: self,
        })
    }

    fn check_length(&self, text: &[u32]) -> Result<()> {
        let (tokens, positions) = (text.len(), self.positions());
        if tokens > positions {
            return Err(EngineError::TextTooLong { tokens, positions });
        }
        Ok(())
    }

    /// Prepares for a text of this length. Keys that were rotated by the wavelengths of another length are forgotten.
    fn fit_length(&mut self, tokens: usize) -> Result<()> {
        if self.model.fit_length(tokens)? {
            self.forget(0);
        }
        Ok(())
    }

    /// Takes all tokens but the first `length` out of the cache.
    fn forget(&mut self, length: usize) {
        self.read.truncate(length);
        self.cache.iter_mut().flatten().for_each(|layer| layer.truncate(length as i64));
    }
}

/// The tokens that continue a prompt, each computed when it is taken.
#[derive(Debug)]
pub struct Generation<'a> {
    generator: &'a mut Generator,
    sampling: Sampling,
    random: ChaCha8Rng,
    /// The prompt, and what follows so far.
    text: Vec<u32>,
    /// Tokens that may follow.
    left: usize,
    has_ended: bool,
    ending: Option<Ending>,
}

impl Generation<'_> {
    /// Why the text has ended; `None` before its end and after an error.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }

    /// The next token, or the reason why there is none.
    fn step(&mut self) -> Result<ControlFlow<Ending, u32>> {
        if self.left == 0 {
            return Ok(ControlFlow::Break(Ending::Tokens));
        }
        // As with `max_length` in transformers. A window that slides would change every key.
        if self.text.len() == self.generator.positions() {
            return Ok(ControlFlow::Break(Ending::Positions));
        }
        let logits = self.generator.next_logits(&self.text)?;
        if !logits.iter().all(|logit| logit.is_finite()) {
            return Err(EngineError::BrokenLogits { token: self.text.len() });
        }
        let known = logits.len().min(self.sampling.vocabulary as usize);
        let token = self.sampling.choose(&logits[..known], &mut self.random);
        if self.sampling.ends.contains(&token) {
            return Ok(ControlFlow::Break(Ending::EndToken));
        }
        self.text.push(token);
        self.left -= 1;
        Ok(ControlFlow::Continue(token))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let step = self.step();
        self.has_ended = !matches!(step, Ok(ControlFlow::Continue(_)));
        match step {
            Ok(ControlFlow::Continue(token)) => Some(Ok(token)),
            Ok(ControlFlow::Break(ending)) => {
                self.ending = Some(ending);
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}
