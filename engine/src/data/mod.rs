//! What is read from files: texts as tokens, the samples of a microbatch, and tensors.

pub(crate) mod safetensors_file;
pub(crate) mod samples;
pub(crate) mod token_file;
pub mod tokenizer;

pub use self::token_file::{read_text, write_tokens};
