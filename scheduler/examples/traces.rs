//! Prints the trace of each simulated swarm: `seed trace`, 600 without faults and 3,000 with them. A change that is meant to
//! change nothing prints the same before and after.
//!
//!     cargo run --release -p shoal-scheduler --example traces > before
//!     cargo run --release -p shoal-scheduler --example traces -- 20    # so many of each

use std::env;

use shoal_scheduler::sim::{self, Scenario};

/// Swarms without faults and with them.
const QUIET: u64 = 600;
const FAULTY: u64 = 3000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let few = env::args().nth(1).map(|few| few.parse::<u64>()).transpose()?;
    for seed in 0..few.unwrap_or(QUIET) {
        println!("quiet {seed} {:016x}", sim::run(&Scenario::from_seed(seed))?.trace);
    }
    for seed in 0..few.unwrap_or(FAULTY) {
        println!("faulty {seed} {:016x}", sim::run(&Scenario::faulty(seed))?.trace);
    }
    Ok(())
}
