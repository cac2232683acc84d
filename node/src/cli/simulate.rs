//! The flags of `shoal simulate`.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;

/// `shoal simulate`
#[derive(Debug, Clone, Args)]
pub struct SimulateArgs {
    /// The swarm and its faults, as TOML; default: a small swarm over three regions.
    #[arg(value_name = "scenario.toml")]
    pub scenario: Option<PathBuf>,
    /// Seed of the simulation.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Simulate one swarm for each of these seeds.
    #[arg(long, value_name = "A..B", conflicts_with = "seed")]
    pub seeds: Option<Seeds>,
    /// Write the run's course over time to this file, and a picture of it beside it (FILE.svg).
    #[arg(short, long, value_name = "FILE.json", conflicts_with_all = ["seeds", "trace"])]
    pub out: Option<PathBuf>,
    /// Print every event to stderr.
    #[arg(long)]
    pub trace: bool,
}

/// A range of seeds, as `A..B`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(pub Range<u64>);

impl std::str::FromStr for Seeds {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (from, to) = text.split_once("..").ok_or("a range of seeds is A..B")?;
        let number = |text: &str| text.parse().map_err(|_| "a range of seeds is A..B");
        let seeds = number(from)?..number(to)?;
        if seeds.is_empty() {
            Err("there is no seed in it: B must be more than A")
        } else {
            Ok(Self(seeds))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_seeds_has_two_dots() {
        assert!("3..7".parse::<Seeds>().is_ok() && "3-7".parse::<Seeds>().is_err());
    }
}
