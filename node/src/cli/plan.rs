//! The flags of `shoal plan`.

use std::path::PathBuf;

use clap::Args;

use super::ListFormat;

/// `shoal plan`
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The fleet, its links and what the model sends, as TOML; docs/placement.md has the keys.
    #[arg(value_name = "fleet.toml")]
    pub fleet: PathBuf,
    /// Decides everything that the search leaves to chance.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// How the plan looks.
    #[arg(short, long, value_enum, default_value_t = ListFormat::Text)]
    pub output: ListFormat,
}
