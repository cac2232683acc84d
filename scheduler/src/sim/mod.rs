//! The simulator: this crate's state machines in a modelled world.
//!
//! A seed determines a swarm, its machines and its network ([`Scenario::from_seed`]), and every
//! event of the run. A model of small integers replaces the transformer, so that exactly-once
//! counting is checked on real values.

mod all_reduce;
#[cfg(test)]
mod audits;
mod corruption;
mod defaults;
mod drawn_peer;
mod engine;
mod flows;
mod founded;
mod hash_keys;
mod integer_model;
mod marks;
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
mod peer_scenario;
mod reference;
mod regions;
mod report;
mod scenario;
#[cfg(test)]
mod slow_peers;
mod spot;
#[cfg(test)]
mod step_times;
#[cfg(test)]
mod swapping;
#[cfg(test)]
mod tests;
mod tiers;
mod timeline;
mod watch;
mod world;

use shoal_protocol::ids::Member;

pub use self::all_reduce::{RoundTime, all_reduces, between_sites};
use self::corruption::Corruption;
pub use self::flows::{Port, Sites};
pub use self::hash_keys::HashKeys;
pub use self::marks::{Mark, Marks};
#[cfg(test)]
pub(crate) use self::omitted_rules::Omit;
pub use self::oracle::Violation;
pub use self::peer_scenario::{Clock, ComputeScenario, PeerScenario};
pub use self::regions::Regional;
pub use self::report::{Migrations, Report, StepTime, Swapped};
pub use self::scenario::{Fault, Faults, NetworkScenario, Scenario, SnapshotScenario};
pub use self::spot::{SpotError, SpotTrace, SpotUnit};
pub use self::tiers::{ElementBytes, TierScenario};
pub use self::timeline::{Part, Timeline};
pub use self::watch::{Seen, Sort, Watch};
use self::world::World;

/// Runs a swarm to its end.
///
/// # Errors
/// The first violated invariant.
pub fn run(scenario: &Scenario) -> Result<Report, Violation> {
    World::new(scenario, Corruption::Nothing, true).run()
}

/// Runs a swarm like [`run`] and prints every event to stderr.
///
/// # Errors
/// The errors of [`run`].
pub fn run_traced(scenario: &Scenario) -> Result<Report, Violation> {
    World::new(scenario, Corruption::Nothing, true).traced().run()
}

/// Runs a swarm like [`run`] under an observer.
///
/// # Errors
/// The errors of [`run`].
pub fn run_watched(scenario: &Scenario, watch: &mut dyn Watch) -> Result<Report, Violation> {
    World::new(scenario, Corruption::Nothing, true).watched(watch).run()
}

/// The index in its scenario of a peer that occurs in a log or message.
#[must_use]
pub fn place_of(member: Member) -> usize {
    world::index_of(member)
}
