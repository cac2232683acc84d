//! The tokenizer of a model's folder, as Hugging Face lays it out.

mod added;
mod kind;
mod scan;
mod steps;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::Value;
use shoal_protocol::ids::ContentHash;
use shoal_protocol::limits;
use tokenizers::Tokenizer;

pub use self::scan::OutOfRange;

/// Largest `tokenizer.json`, in bytes: three times the largest of known models.
const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Largest other file of a model's folder, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// The beginning of a pointer that Git LFS leaves in place of a file.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Files of tokenizers that are not read here.
const OTHER_KINDS: [&str; 5] =
    ["tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt"];

/// Why a folder's tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file cannot be read.
    #[error("{path}: {source}; name the folder of a Hugging Face model, with tokenizer.json", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The folder has a tokenizer of another kind.
    #[error(
        "{base} has {found} and no tokenizer.json: load it with transformers (AutoTokenizer.from_pretrained) and write it with save_pretrained, which makes one", base = base.display()
    )]
    OtherKind {
        /// The folder.
        base: PathBuf,
        /// The file that it has instead.
        found: &'static str,
    },
    /// A pointer in place of the file.
    #[error("{path} is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`", path = path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// A file is too large.
    #[error("{path} has more than {most} bytes, the most for such a file: fetch the model again, or use another", path = path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The largest size.
        most: u64,
    },
    /// A file is not JSON.
    #[error("{path} is not JSON: {source}; fetch the model again", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// `tokenizer.json` describes no tokenizer that this program knows.
    #[error("{path} is not a tokenizer: {reason}; fetch the model again, or update shoal", path = path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The error of the library.
        reason: String,
    },
    /// `tokenizer.json` would take far more memory or time than its bytes.
    #[error("{path}: {problem}; use the tokenizer of another model", path = path.display())]
    OutOfRange {
        /// The file.
        path: PathBuf,
        /// The key, its value and its range.
        problem: Box<OutOfRange>,
    },
    /// A text cannot be encoded.
    #[error("the tokenizer refuses a text: {0}; remove the text")]
    Encode(String),
    /// Tokens cannot be decoded.
    #[error("the tokenizer cannot decode: {0}; use the tokenizer that the data was prepared with")]
    Decode(String),
}

/// Tokens of a text, and the characters that each covers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// For each token the start and end in the text, in characters. Tokens that the tokenizer adds
    /// have an empty range.
    pub offsets: Vec<(usize, usize)>,
}

/// A tokenizer and its special tokens.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    tokenizer: Tokenizer,
    hash: ContentHash,
    vocabulary: u32,
    eos: Option<u32>,
    bos: Option<u32>,
    pad: Option<u32>,
    stops: Vec<u32>,
    starts: Vec<u32>,
    ends: Vec<u32>,
    special: BTreeMap<String, String>,
}

impl TextTokenizer {
    /// Loads the tokenizer of a model's folder, as `AutoTokenizer` of `transformers` does:
    /// `tokenizer.json`, and where they exist `tokenizer_config.json`, `special_tokens_map.json`,
    /// `added_tokens.json`, `generation_config.json` and `config.json`.
    ///
    /// # Errors
    /// If a file cannot be read or is invalid.
    pub fn load(base: &Path) -> Result<Self, TokenizerError> {
        let path = base.join("tokenizer.json");
        let invalid = |reason: String| TokenizerError::Tokenizer { path: path.clone(), reason };
        let config = read_json(&base.join("config.json"))?;
        let generation = read_json(&base.join("generation_config.json"))?;
        let files = added::Files {
            config: read_json(&base.join("tokenizer_config.json"))?,
            map: read_json(&base.join("special_tokens_map.json"))?,
            added: read_json(&base.join("added_tokens.json"))?,
        };
        let bytes = tokenizer_bytes(base, &path)?;
        let tokenizer = build(&path, &bytes, &files, &config)?;
        let special = files.special();

        let largest = tokenizer.get_vocab(true).into_values().max();
        let used = largest.map_or(0, |id| u64::from(id) + 1);
        let model =
            config.get("vocab_size").or_else(|| config.get("text_config")?.get("vocab_size"));
        let most = u64::from(limits::VOCABULARY);
        let vocabulary = match model.and_then(Value::as_u64) {
            Some(model) if model > most => {
                let problem = OutOfRange::above("vocab_size", model, most);
                return Err(out_of_range(&base.join("config.json"))(problem));
            }
            _ if used > most => {
                let problem = OutOfRange::above("the largest id", used - 1, most - 1);
                return Err(out_of_range(&path)(problem));
            }
            // Tokens without a row of the embedding do no harm until a text has one, and then the
            // text is refused.
            Some(model) => model,
            None => used,
        };
        // It is at most 2^20.
        let vocabulary = vocabulary as u32;

        let id = |name: &str| {
            let by_text = special.get(&format!("{name}_token")).map(String::as_str);
            let key = format!("{name}_token_id");
            by_text
                .and_then(|text| tokenizer.token_to_id(text))
                .or_else(|| ids(generation.get(&key)).first().copied())
                .or_else(|| ids(config.get(&key)).first().copied())
                .filter(|id| *id < vocabulary)
        };
        let (eos, bos, pad) = (id("eos"), id("bos"), id("pad"));
        let listed = [&generation, &config].map(|file| ids(file.get("eos_token_id")));
        let listed = listed.into_iter().find(|ids| !ids.is_empty()).unwrap_or_default();
        let mut stops: Vec<u32> = eos.into_iter().chain(listed).collect();
        stops.retain(|id| *id < vocabulary);
        stops.sort_unstable();
        stops.dedup();
        let (starts, ends) = added_around(&tokenizer).map_err(invalid)?;
        let hash = ContentHash::of(&bytes);
        Ok(Self { tokenizer, hash, vocabulary, eos, bos, pad, stops, starts, ends, special })
    }

    /// The tokens of a text. `special`: with the tokens that the tokenizer adds around a text.
    ///
    /// # Errors
    /// If the tokenizer refuses the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoded = guarded(|| self.tokenizer.encode_fast(text, special));
        let encoded = encoded.map_err(TokenizerError::Encode)?;
        Ok(encoded.get_ids().to_vec())
    }

    /// The tokens of a text, with the characters that each covers.
    ///
    /// # Errors
    /// Like [`TextTokenizer::encode`].
    pub fn encode_with_offsets(
        &self,
        text: &str,
        special: bool,
    ) -> Result<Encoded, TokenizerError> {
        let encoded = guarded(|| self.tokenizer.encode_char_offsets(text, special));
        let encoded = encoded.map_err(TokenizerError::Encode)?;
        Ok(Encoded { tokens: encoded.get_ids().to_vec(), offsets: encoded.get_offsets().to_vec() })
    }

    /// The text of tokens. Ids without a token are omitted.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        guarded(|| self.tokenizer.decode(tokens, skip_special)).map_err(TokenizerError::Decode)
    }

    /// The text of a token as the vocabulary has it.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// BLAKE3 hash of `tokenizer.json`.
    #[must_use]
    pub const fn hash(&self) -> ContentHash {
        self.hash
    }

    /// The size of the model's vocabulary; without `config.json`, the largest id plus one.
    #[must_use]
    pub const fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// The token that ends a text.
    #[must_use]
    pub const fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The tokens at which generation stops: the one that ends a text, and all that
    /// `generation_config.json` (otherwise `config.json`) names. Sorted.
    #[must_use]
    pub fn stops(&self) -> &[u32] {
        &self.stops
    }

    /// The token that begins a text.
    #[must_use]
    pub const fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that fills rows.
    #[must_use]
    pub const fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Tokens that the tokenizer adds before a text.
    #[must_use]
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// Tokens that the tokenizer adds after a text.
    #[must_use]
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// Whether the tokenizer begins a text with its `bos` token.
    #[must_use]
    pub fn adds_bos(&self) -> bool {
        self.bos.is_some() && self.starts.first() == self.bos.as_ref()
    }

    /// The texts of the special tokens by their names, such as `eos_token`.
    #[must_use]
    pub const fn special(&self) -> &BTreeMap<String, String> {
        &self.special
    }
}

/// The bytes of `tokenizer.json`, or what the folder has instead.
fn tokenizer_bytes(base: &Path, path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let other = OTHER_KINDS.into_iter().find(|name| base.join(name).exists());
    if let Some(found) = other
        && !path.exists()
    {
        return Err(TokenizerError::OtherKind { base: base.to_owned(), found });
    }
    let bytes = read_capped(path, MAX_TOKENIZER_BYTES)?;
    match bytes.starts_with(POINTER) {
        true => Err(TokenizerError::Pointer { path: path.to_owned() }),
        false => Ok(bytes),
    }
}

/// The tokenizer of `tokenizer.json`, with what its class and the files beside it change.
fn build(
    path: &Path,
    bytes: &[u8],
    files: &added::Files,
    config: &Value,
) -> Result<Tokenizer, TokenizerError> {
    let invalid = |reason: String| TokenizerError::Tokenizer { path: path.to_owned(), reason };
    scan::scan(bytes).map_err(out_of_range(path))?;
    let mut tokenizer = if kind::rebuilds(files, config, bytes) {
        let mut value: Value = serde_json::from_slice(bytes)
            .map_err(|source| TokenizerError::Json { path: path.to_owned(), source })?;
        kind::rebuild(files, &mut value);
        let bytes = value.to_string().into_bytes();
        guarded(|| Tokenizer::from_bytes(&bytes)).map_err(invalid)?
    } else {
        guarded(|| Tokenizer::from_bytes(bytes)).map_err(invalid)?
    };
    kind::set_prefix(files, config, &mut tokenizer);
    added::complete(&mut tokenizer, files).map_err(|failure| match failure {
        added::Failure::Range(problem) => out_of_range(path)(problem),
        added::Failure::Library(reason) => invalid(reason),
    })?;
    // Rows are cut and padded here, not by the tokenizer.
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|error| invalid(error.to_string()))?;
    Ok(tokenizer)
}

/// Adds the path to a value that is out of range.
fn out_of_range(path: &Path) -> impl FnOnce(OutOfRange) -> TokenizerError {
    let path = path.to_owned();
    move |problem| TokenizerError::OutOfRange { path, problem: Box::new(problem) }
}

/// Turns an error of the library, or a panic that an unusual tokenizer causes, into its text.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the tokenizer's library failed".to_owned()),
    }
}

/// The tokens that the post-processor adds before and after a text.
fn added_around(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    let ids = |special| {
        let encoded = guarded(|| tokenizer.encode_fast("a", special))?;
        Ok::<_, String>(encoded.get_ids().to_vec())
    };
    let (with, without) = (ids(true)?, ids(false)?);
    let added = with.len().saturating_sub(without.len());
    let start = (0..=added).find(|start| with[*start..].starts_with(&without));
    let start = start.unwrap_or_default();
    let end = (start + without.len()).min(with.len());
    Ok((with[..start].to_vec(), with[end..].to_vec()))
}

/// The ids in a value, which is one id or a list of ids.
fn ids(value: Option<&Value>) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(id).collect(),
        other => other.and_then(id).into_iter().collect(),
    }
}

/// The JSON of a file; null if there is no file.
pub(crate) fn read_json(path: &Path) -> Result<Value, TokenizerError> {
    match read_capped(path, MAX_FILE_BYTES) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|source| TokenizerError::Json { path: path.to_owned(), source }),
        Err(TokenizerError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Value::Null)
        }
        Err(error) => Err(error),
    }
}

/// Reads a file of at most `most` bytes.
fn read_capped(path: &Path, most: u64) -> Result<Vec<u8>, TokenizerError> {
    let error = |source| TokenizerError::Read { path: path.to_owned(), source };
    let file = fs::File::open(path).map_err(error)?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(error)?;
    if bytes.len() as u64 > most {
        return Err(TokenizerError::TooLarge { path: path.to_owned(), most });
    }
    Ok(bytes)
}
