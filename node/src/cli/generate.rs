//! The flags of the commands that generate text: `shoal generate` and `shoal chat`.

use std::path::PathBuf;

use clap::Args;
use shoal_data::template::Date;

use crate::bucket::ArchivePlace;

/// `shoal generate`
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// Folder of a checkpoint, or of a base (`shoal import`); or a checkpoint or an archive in a bucket
    /// (s3://BUCKET/PATH, gs://..., az://...), which is fetched to a cache.
    #[arg(value_name = "DIR|URL")]
    pub model: ArchivePlace,
    /// The base of a run that trained adapters, for their checkpoint.
    #[arg(long, value_name = "BASE")]
    pub base: Option<PathBuf>,
    /// The text to continue.
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// Number of tokens to add at most.
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub tokens: usize,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `shoal chat`
#[derive(Debug, Clone, Args)]
pub struct ChatArgs {
    /// Folder of a checkpoint, or of a base (`shoal import`), whose model has a chat template; or a checkpoint or an
    /// archive in a bucket, as for `shoal generate`.
    #[arg(value_name = "DIR|URL")]
    pub model: ArchivePlace,
    /// The base of a run that trained adapters, for their checkpoint.
    #[arg(long, value_name = "BASE")]
    pub base: Option<PathBuf>,
    /// Begin the conversation with a system message.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Number of tokens of an answer at most.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub tokens: usize,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Chat template to use instead of the model's.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// The day that a chat template sees as today, if it asks for the date.
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub date: Option<Date>,
}

/// The choice of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Args)]
pub struct SamplingArgs {
    /// Seed of the sampling.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Sampling temperature: below 1 prefers likely tokens, 0 always takes the most likely one.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = parse_temperature)]
    pub temperature: f64,
    /// Choose from the fewest likeliest tokens whose probability reaches P; 1 chooses from all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = parse_probability)]
    pub top_p: f64,
}

fn parse_temperature(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|value: &f64| *value >= 0.0 && value.is_finite());
    parsed.ok_or_else(|| "it must be a number from 0 on".to_owned())
}

fn parse_probability(text: &str) -> Result<f64, String> {
    let parsed = text.parse().ok().filter(|value: &f64| *value > 0.0 && *value <= 1.0);
    parsed.ok_or_else(|| "it must be a number above 0 and up to 1".to_owned())
}
