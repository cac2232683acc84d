//! The log-probabilities that a base gives texts.

use std::path::Path;

use shoal_protocol::manifest::Dtype;

use crate::device::setup::Device;
use crate::error::{EngineError, Result};
use crate::text::language_model::LanguageModel;

/// A base that computes the log-probabilities of texts.
#[derive(Debug)]
pub struct Scorer(LanguageModel);

impl Scorer {
    /// Loads the weights of the base in a folder, for passes in this number format over rows of `context` tokens, which decide
    /// the rotary embeddings of texts too.
    ///
    /// # Errors
    /// If the folder has none, a file is damaged or the device has too little memory.
    pub fn open(folder: &Path, context: u32, dtype: Dtype, device: Device) -> Result<Self> {
        let mut model = LanguageModel::of_base(folder, dtype, device)?;
        model.fit_length(context as usize)?;
        Ok(Self(model))
    }

    /// The log-probability of the tokens of a text that `counts` is true of, each given all tokens before it. The first
    /// token has none.
    ///
    /// # Errors
    /// If the text is too long or has a token that is not one of the model's, or libtorch fails.
    pub fn log_probability(&self, text: &[u32], counts: &[bool]) -> Result<f64> {
        let (tokens, positions) = (text.len(), self.0.positions());
        if tokens > positions {
            return Err(EngineError::TextTooLong { tokens, positions });
        }
        self.0.log_probability(text, counts)
    }
}
