//! The flags of `shoal plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// What a better choice of devices has more of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PlanOrder {
    /// Tokens per second.
    Speed,
    /// Tokens per unit of the currency of the fleet's prices.
    Cost,
}

/// `shoal plan`
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The fleet, its links and the model's traffic, as TOML; docs/guide/sizes.md has the keys.
    #[arg(value_name = "fleet.toml")]
    pub fleet: PathBuf,
    /// Take the model and the batch of this run: the fleet then has `[device]` instead of `stages`, `activations`,
    /// `gradient` and `[training]`.
    #[arg(long = "for", value_name = "run.toml")]
    pub run: Option<PathBuf>,
    /// Take a model in Hugging Face's format instead, a folder or hf:OWNER/NAME[@REVISION], of which only config.json is read,
    /// and the values of `shoal init --from` it. Its head and embedding are two matrices.
    #[arg(long, value_name = "MODEL", conflicts_with = "run")]
    pub model: Option<String>,
    /// With --model: tokens of a sample.
    #[arg(long, value_name = "TOKENS", requires = "model", default_value_t = 1024)]
    pub context: u32,
    /// With --model: train adapters of this rank beside frozen weights.
    #[arg(long, value_name = "RANK", requires = "model")]
    pub lora: Option<u32>,
    /// With --lora: frozen matrices in 4 bits.
    #[arg(long, requires = "lora")]
    pub nf4: bool,
    /// Seed of the search.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// What the first choice has the most of, where the fleet has `[training]`.
    #[arg(long, value_enum, default_value_t = PlanOrder::Speed)]
    pub order: PlanOrder,
    /// Print JSON instead of text for people.
    #[arg(long)]
    pub json: bool,
}
