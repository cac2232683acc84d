//! The simulator: the state machines of this crate in a modelled world.
//!
//! One seed makes a swarm, its machines and its network ([`Scenario::from_seed`]), and everything
//! that happens follows from it, event for event. A model of small integers stands for the
//! transformer, so that whether every microbatch is counted exactly once is checked on real values.

mod all_reduce;
mod corruption;
mod defaults;
mod engine;
mod flows;
mod integer_model;
#[cfg(test)]
mod mending;
#[cfg(test)]
mod migrations;
mod network;
#[cfg(test)]
mod newcomers;
mod omitted_rules;
mod oracle;
mod payloads;
mod reference;
mod regions;
mod report;
mod scenario;
#[cfg(test)]
mod slow_peers;
mod spot;
#[cfg(test)]
mod tests;
mod timeline;
#[cfg(test)]
mod trace_hashes;
mod watch;
mod world;

use shoal_protocol::ids::Member;

pub use self::all_reduce::{RoundTime, all_reduces};
use self::corruption::Corruption;
pub use self::flows::Port;
#[cfg(test)]
pub(crate) use self::omitted_rules::Omit;
pub use self::oracle::Violation;
pub use self::regions::Regional;
pub use self::report::{Migrations, Rare, Recovery, Report, StepTime};
pub use self::scenario::{
    Clock, ComputeScenario, Fault, Faults, NetworkScenario, PeerScenario, Scenario,
};
pub use self::spot::{SpotError, SpotTrace, SpotUnit};
pub use self::timeline::{Part, Timeline};
pub use self::watch::{Seen, Sort, Watch};
use self::world::World;

/// Runs a swarm to its end.
///
/// # Errors
/// The first thing that did not hold though it must.
pub fn run(scenario: &Scenario) -> Result<Report, Violation> {
    World::new(scenario, Corruption::Nothing, true).run()
}

/// The same, with every event printed to stderr as it happens.
///
/// # Errors
/// As those of [`run`].
pub fn run_traced(scenario: &Scenario) -> Result<Report, Violation> {
    World::new(scenario, Corruption::Nothing, true).traced().run()
}

/// The same, watched.
///
/// # Errors
/// As those of [`run`].
pub fn run_watched(scenario: &Scenario, watch: &mut dyn Watch) -> Result<Report, Violation> {
    World::new(scenario, Corruption::Nothing, true).watched(watch).run()
}

/// The place in its scenario of a peer that a simulator's log or words name.
#[must_use]
pub fn place_of(member: Member) -> usize {
    world::index_of(member)
}
