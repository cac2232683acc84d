//! The flags of `shoal plan`.

use std::path::PathBuf;

use clap::Args;

use super::ListFormat;

/// `shoal plan`
#[derive(Debug, Clone, Args)]
pub struct PlanArgs {
    /// The fleet, its links and the model's traffic, as TOML; docs/placement.md has the keys.
    #[arg(value_name = "fleet.toml")]
    pub fleet: PathBuf,
    /// Seed of the search.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = ListFormat::Text)]
    pub output: ListFormat,
}
