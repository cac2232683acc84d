//! Text and tokens of a model: by the byte tokenizer, or by the base's `tokenizer.json`.

use std::path::Path;

use anyhow::{Context, anyhow};
use shoal_data::tokenizer::TextTokenizer;
use shoal_engine::tokenizer;
use shoal_protocol::manifest::Tokenizer;

use crate::exit::{Exit, ExitWith};

/// The tokenizer of a checkpoint or a base.
pub(crate) enum TextCodec {
    Bytes,
    Text(Box<TextTokenizer>),
}

impl TextCodec {
    /// The tokenizer of a run's plain text, otherwise that in the folder of its model.
    ///
    /// # Errors
    /// If the folder has no tokenizer, or it is damaged.
    pub(crate) fn of(plain: Option<Tokenizer>, folder: &Path) -> anyhow::Result<Self> {
        if let Some(Tokenizer::Bytes) = plain {
            return Ok(Self::Bytes);
        }
        let tokenizer = TextTokenizer::load(folder).context("the model has no tokenizer");
        Ok(Self::Text(Box::new(tokenizer.exit_with(Exit::Corrupt)?)))
    }

    /// The tokens of a prompt: at least one.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub(crate) fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        let tokens = match self {
            Self::Bytes => tokenizer::encode(Tokenizer::Bytes, text.as_bytes()),
            Self::Text(tokenizer) => tokenizer.encode(text, true)?,
        };
        if !tokens.is_empty() {
            return Ok(tokens);
        }
        match self {
            Self::Bytes => Ok(tokenizer::encode(Tokenizer::Bytes, b"\n")),
            Self::Text(tokenizer) => {
                let start = tokenizer.bos().or(tokenizer.eos());
                let start =
                    start.ok_or_else(|| anyhow!("give a prompt: the model has no first token"));
                Ok(vec![start.exit_with(Exit::Usage)?])
            }
        }
    }

    /// The text of tokens. Invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// If the tokenizer does not know a token.
    pub(crate) fn decode(&self, tokens: &[u32]) -> anyhow::Result<String> {
        Ok(match self {
            Self::Bytes => {
                let text = tokenizer::decode(Tokenizer::Bytes, tokens);
                String::from_utf8_lossy(&text).into_owned()
            }
            Self::Text(tokenizer) => tokenizer.decode(tokens, true)?,
        })
    }

    /// Number of tokens of the tokenizer.
    pub(crate) fn vocabulary(&self) -> u32 {
        match self {
            Self::Bytes => Tokenizer::Bytes.vocabulary(),
            Self::Text(tokenizer) => tokenizer.vocabulary(),
        }
    }

    /// Tokens that end a text.
    pub(crate) fn ends(&self) -> Vec<u32> {
        match self {
            Self::Bytes => Vec::new(),
            Self::Text(tokenizer) => tokenizer.stops().to_vec(),
        }
    }
    /// The model's own tokenizer; `None` for bytes.
    pub(crate) fn tokenizer(&self) -> Option<&TextTokenizer> {
        match self {
            Self::Bytes => None,
            Self::Text(tokenizer) => Some(tokenizer),
        }
    }
}
