//! The configuration of a coordinator.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::history::History;
use shoal_protocol::ids::{Member, PeerId, Term};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{Founding, Sealer};

use crate::coordinator::placing::locality::Load;
use crate::coordinator::placing::rebalance::Rebalance;
use crate::router::Routing;

/// The time after which the first all-reduce of the smallest stage is tried again, and the slowest link on which
/// a larger one has time for all of its bytes, in bytes per second.
const PATIENCE: Duration = Duration::from_secs(30);
const SLOWEST: u64 = 1_000_000;

/// The time after which an all-reduce of so many numbers is tried again at most, before any was late.
#[must_use]
pub fn round_patience(codec: SumCodec, numbers: u64) -> Duration {
    let both = [codec.part(), codec.result()].map(|element| element.bytes_of(numbers));
    let bytes: u64 = both.into_iter().flatten().sum();
    PATIENCE + Duration::from_secs(2 * bytes / SLOWEST)
}

/// The configuration of a coordinator.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// The manifest of the run.
    pub manifest: Arc<Manifest>,
    /// The history of the run, from the log.
    pub history: History,
    /// The term that the anchors elected this coordinator for.
    pub term: Term,
    /// The history to found, if the log is empty and the run continues from an archive.
    pub founding: Option<Founding>,
    /// The peers that keep the log.
    pub anchors: BTreeSet<PeerId>,
    /// The number of members that the first step waits for, besides a replica of every stage.
    pub wait_for: usize,
    /// The peer in whose process the coordinator runs.
    pub home: Member,
    /// The time after which a message without an effect is repeated.
    pub retry: Duration,
    /// The time after which an all-reduce without a result is tried again at most, before any was late. The first
    /// one has this long; later ones have less, by how long earlier ones took. See [`round_patience`].
    pub patience: Duration,
    /// How long a run that lost a stage waits for holders of its newest checkpoint, before it continues from an
    /// older one.
    pub return_trip: Duration,
    /// How long stages may be without a host before members take them beside their own.
    pub extend_after: Duration,
    /// The traffic of a step, from which the locality of members is computed.
    pub load: Load,
    /// When members migrate.
    pub rebalance: Rebalance,
    /// Checks the seals that members show, in a run with audits.
    pub sealer: Sealer,
    /// How the coordinator chooses between replicas of the first stage.
    pub routing: Routing,
}
