//! The flags of `shoal finetune`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use shoal_formats::config::loss_section::LossName;

/// `shoal finetune`
#[derive(Debug, Clone, Args)]
pub struct FinetuneArgs {
    /// Folder of a model in Hugging Face's format, or hf:OWNER/NAME[@REVISION].
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Data to train on, as `shoal data prepare` takes it: files, folders, patterns, or hf:datasets/OWNER/NAME[:PATTERN].
    #[arg(value_name = "DATA", required = true)]
    pub data: Vec<String>,
    /// Folder for all that is made; an interrupted fine-tuning in it is continued.
    #[arg(short, long, value_name = "RUN", default_value = "finetune")]
    pub out: PathBuf,
    /// Train adapters of this rank beside the frozen weights (LoRA); default: train all weights.
    #[arg(long, value_name = "RANK", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub lora: Option<u32>,
    /// Hold the frozen matrices in 4 bits (QLoRA).
    #[arg(long, requires = "lora")]
    pub nf4: bool,
    /// Passes over the data.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub epochs: u32,
    /// Tokens per sample; default: 1024, or the positions of the model if it has fewer.
    #[arg(long, value_name = "N")]
    pub context: Option<u32>,
    /// Loss to lower; of pairs, dpo and ipo first compute the log-probabilities of the base.
    #[arg(long, value_name = "LOSS", value_parser = losses(), default_value = "cross_entropy")]
    pub loss: LossName,
    /// Flags for `shoal start`, behind `--`: `-- --device cuda:0 --wait-for 2`.
    #[arg(last = true, value_name = "FLAGS")]
    pub start: Vec<OsString>,
}

/// The losses by their names. The configuration is also read without clap.
pub(super) fn losses() -> impl TypedValueParser<Value = LossName> {
    let value = |loss: LossName| {
        PossibleValue::new(loss.name()).help(match loss {
            LossName::CrossEntropy => "Cross-entropy of the next token",
            LossName::Dpo => "Direct preference optimisation, of pairs beside a reference",
            LossName::Ipo => "Identity preference optimisation, of pairs beside a reference",
            LossName::Simpo => "Simple preference optimisation, of pairs without a reference",
            LossName::Orpo => "Odds ratio preference optimisation, of pairs without a reference",
        })
    };
    PossibleValuesParser::new(LossName::ALL.map(value)).map(|name| {
        let named = LossName::ALL.into_iter().find(|loss| loss.name() == name);
        named.expect("clap takes no other")
    })
}
