//! Invariants of every run, each checked on its own.

mod exactly_once;
mod limits;
mod monotone;
mod progress;
mod replicas;
mod results;
pub(super) mod tiers;
mod views;

use shoal_protocol::units::Moment;

pub(super) use self::exactly_once::ExactlyOnce;
pub(super) use self::limits::Limits;
pub(super) use self::monotone::Monotone;
pub(super) use self::progress::Progress;
pub(super) use self::replicas::Replicas;
pub(super) use self::results::Results;
pub(super) use self::views::Views;
use super::reference::Reference;
use super::scenario::Scenario;

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("after {:?}, {oracle}: {detail}", at.0)]
pub struct Violation {
    /// The time of the violation.
    pub at: Moment,
    /// The invariant.
    pub oracle: &'static str,
    /// The violation.
    pub detail: String,
}

/// All oracles of one run.
#[derive(Debug)]
pub(super) struct Oracles {
    pub(super) exactly_once: ExactlyOnce,
    pub(super) replicas: Replicas,
    pub(super) results: Results,
    pub(super) monotone: Monotone,
    pub(super) views: Views,
    pub(super) limits: Limits,
    pub(super) progress: Progress,
}

impl Oracles {
    pub(super) fn new(scenario: &Scenario) -> Self {
        Self {
            exactly_once: ExactlyOnce::new(&scenario.manifest),
            replicas: Replicas::new(Reference::of(scenario)),
            results: Results::new(scenario),
            monotone: Monotone::default(),
            views: Views::default(),
            limits: Limits::new(scenario),
            progress: Progress::new(scenario),
        }
    }
}
