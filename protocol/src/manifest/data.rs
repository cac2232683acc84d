//! The data of a run, by content: a token file, or prepared rows.

use serde::{Deserialize, Serialize};

use super::{Manifest, ManifestError, Mixture, Pairs, within};
use crate::ids::ContentHash;
use crate::limits;

/// The tokens trained on, by content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(rename_all = "lowercase")]
pub enum Data {
    /// A file of tokens, cut into samples of `model.context` tokens.
    Text(Tokens),
    /// Rows that `shoal data prepare` packed, with masks and documents.
    Prepared(Prepared),
    /// Several of these, by weights.
    Mixture(Mixture),
}

/// Prepared data, by content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Prepared {
    /// Hash of its index, which names the shards.
    pub index: ContentHash,
    /// Bytes of its index.
    pub bytes: u64,
    /// Rows to train on: an epoch.
    pub rows: u64,
    /// Rows that are never trained on.
    pub held_out_rows: u64,
    /// Inputs of a row; a sample is a row.
    pub context: u32,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Whether each row is a pair of a chosen and a rejected sequence.
    #[serde(default)]
    pub pairs: Option<Pairs>,
}

/// A token file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode)]
#[serde(deny_unknown_fields)]
pub struct Tokens {
    /// Hash of the token file.
    pub hash: ContentHash,
    /// Number of tokens in the file.
    pub count: u64,
    /// The size of a stored token; little-endian.
    pub width: TokenWidth,
    /// The tokenizer that produced the tokens.
    pub tokenizer: Tokenizer,
}

/// Bytes of one stored token.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, bincode::Encode, bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum TokenWidth {
    /// Vocabularies of up to 2^8.
    U8,
    /// Vocabularies of up to 2^16.
    U16,
    /// Larger vocabularies.
    U32,
}

impl TokenWidth {
    /// Bytes of one token.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}

/// The tokenizer that produces tokens from text.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// Token `b` is the byte `b`: a vocabulary of 256.
    #[default]
    Bytes,
}

impl Tokenizer {
    /// Number of different tokens that it produces.
    #[must_use]
    pub const fn vocabulary(self) -> u32 {
        match self {
            Self::Bytes => 256,
        }
    }
}

impl Manifest {
    /// The token file, if the run trains on one.
    #[must_use]
    pub fn text(&self) -> Option<&Tokens> {
        match &self.data {
            Data::Text(tokens) => Some(tokens),
            Data::Prepared(_) | Data::Mixture(_) => None,
        }
    }

    /// Tokens of the token file; 0 without one.
    fn token_count(&self) -> u64 {
        self.text().map_or(0, |tokens| tokens.count)
    }

    /// Tokens at the end of a text that are never trained on.
    #[must_use]
    pub fn held_out_tokens(&self) -> u64 {
        if self.evaluation.every == 0 {
            return 0;
        }
        (self.token_count() as f64 * self.evaluation.held_out) as u64
    }

    pub(super) fn check_data(&self) -> Result<(), ManifestError> {
        match &self.data {
            Data::Text(tokens) => self.check_tokens(tokens),
            Data::Prepared(prepared) => self.check_prepared(prepared),
            Data::Mixture(mixture) => self.check_mixture(mixture),
        }
    }

    fn check_prepared(&self, prepared: &Prepared) -> Result<(), ManifestError> {
        self.check_rows(prepared)?;
        if self.evaluation.every > 0 && prepared.held_out_rows == 0 {
            return Err(ManifestError::NothingHeldOut { every: self.evaluation.every });
        }
        Ok(())
    }

    pub(super) fn check_rows(&self, prepared: &Prepared) -> Result<(), ManifestError> {
        let context = prepared.context;
        within("model.context (of prepared data)", self.model.context, context..=context)?;
        let least = prepared.vocabulary;
        within(
            "model.vocabulary (of prepared data)",
            self.model.vocabulary,
            least..=limits::VOCABULARY,
        )?;
        within("rows of the data", prepared.rows, 1..=1 << 50)?;
        within("held-out rows of the data", prepared.held_out_rows, 0..=1 << 50)?;
        within("bytes of the data's index", prepared.bytes, 1..=limits::DATA_INDEX.0)
    }

    fn check_tokens(&self, tokens: &Tokens) -> Result<(), ManifestError> {
        let vocabulary = tokens.tokenizer.vocabulary();
        within("model.vocabulary", self.model.vocabulary, vocabulary..=limits::VOCABULARY)?;
        // A sample consists of `context` tokens and the token that follows them.
        let sample = u64::from(self.model.context) + 1;
        let held_out = self.held_out_tokens();
        let evaluable = self.evaluation.every == 0 || held_out >= sample;
        if tokens.count - held_out < sample || !evaluable {
            let share = if self.evaluation.every == 0 { 1.0 } else { self.evaluation.held_out };
            let smaller = if self.evaluation.every == 0 { 1.0 } else { share.min(1.0 - share) };
            return Err(ManifestError::TextTooShort {
                count: tokens.count,
                context: self.model.context,
                needed: (sample as f64 / smaller).ceil() as u64,
            });
        }
        Ok(())
    }
}
