//! The state that every component of a peer may read.

use std::collections::BTreeSet;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Era, Exchange, Member, Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::message::{Handed, InputId, View};
use shoal_protocol::units::Moment;

use super::Status;
use super::config::PeerConfig;
use super::links::LinkEstimates;
use crate::action::Payload;

/// A read-only view of the peer, which components receive along with an input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) now: Moment,
    pub(super) config: &'a PeerConfig,
    pub(super) view: &'a View,
    pub(super) links: &'a LinkEstimates,
    pub(super) position: Position,
    pub(super) target: Option<MigrationTarget>,
    pub(super) status: Status,
    /// Whether the peer is a member with the current weights.
    pub(super) is_serving: bool,
    /// Whether the peer leaves as soon as no counted work depends on it.
    pub(super) is_draining: bool,
}

/// The position of the peer in the run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Position {
    /// The newest known era.
    pub(super) era: Era,
    /// The stages to host, once the peer is a member.
    pub(super) span: Option<StageSpan>,
    /// The version of the weights: the number of steps whose commits were applied.
    pub(super) version: Step,
    /// The time at which the version was reached.
    pub(super) version_at: Moment,
}

/// The destination of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MigrationTarget {
    pub(super) span: StageSpan,
    /// The first step that the peer serves there, once the membership sets it.
    pub(super) from_step: Option<Step>,
}

impl Context<'_> {
    pub(super) fn me(&self) -> Member {
        self.config.me
    }

    pub(super) fn is_member(&self) -> bool {
        self.status == Status::Member
    }

    /// Whether the peer's part in the run ended.
    pub(super) fn is_over(&self) -> bool {
        self.status == Status::Over
    }

    /// The interval at which unanswered messages are repeated.
    pub(super) fn retry(&self) -> Duration {
        self.config.limits.retry
    }

    pub(super) fn version(&self) -> Step {
        self.position.version
    }

    /// A tensor that this peer made, with its seal in a run with audits. It is an input of other work.
    pub(super) fn sealed(&self, of: InputId, made: Payload) -> Payload {
        let sealer = &self.config.sealer;
        let seal = made.hash.map(|hash| sealer.seal(self.me(), self.position.era, of, hash));
        Payload { seal, ..made }
    }

    /// Whether a member sealed a tensor that it sent, in the present era; any in a run without audits.
    pub(super) fn is_sealed(&self, by: Member, of: InputId, tensor: &Payload) -> bool {
        let (sealer, era) = (&self.config.sealer, self.position.era);
        let is_right = |handed: Handed| sealer.is_sealed_by(by, era, of, &handed);
        let is_needed = self.config.manifest.audit.is_on() && by != self.me();
        !is_needed || tensor.handed().is_some_and(is_right)
    }

    /// Whether this work is at the last stage of the run.
    pub(super) fn is_last(&self, key: ClaimKey) -> bool {
        key.stage == self.config.manifest.last_stage()
    }

    /// Whether a microbatch is for evaluation alone, without a backward pass.
    pub(super) fn is_held_out(&self, key: ClaimKey) -> bool {
        key.microbatch.0 >= self.config.manifest.training.microbatches
    }

    /// Whether a step may have work. Work of a step is handed out while an earlier step whose update it
    /// reads is still reduced, and the commit of the step before that may still be on its way here.
    pub(super) fn is_open(&self, step: Step) -> bool {
        (self.version()..=self.newest_open()).contains(&step)
    }

    /// The newest step that may have work.
    pub(super) fn newest_open(&self) -> Step {
        self.newest_runnable().next().next()
    }

    /// The newest step whose weights are here.
    pub(super) fn newest_runnable(&self) -> Step {
        Step(self.version().0 + self.config.manifest.steps_at_once() - 1)
    }

    /// Whether the weights are here that the next forward pass of this work reads.
    pub(super) fn has_weights(&self, key: ClaimKey, exchange: Exchange) -> bool {
        let reads = self.config.manifest.exchange_reads(key.step, exchange);
        reads <= self.version()
    }

    /// The stages that the membership assigns to this peer in a step.
    pub(super) fn span_at(&self, step: Step) -> Option<StageSpan> {
        let there = self.target.filter(|target| target.from_step.is_some_and(|from| from <= step));
        there.map(|target| target.span).or(self.position.span)
    }

    /// Whether the peer migrates to a stage that it does not host.
    pub(super) fn is_moving_to(&self, stage: Stage) -> bool {
        let is_own = self.position.span.is_some_and(|span| span.contains(stage));
        !is_own && self.target.is_some_and(|target| target.span.contains(stage))
    }

    /// Whether the peer migrates to a stage that has these weights.
    pub(super) fn is_moving_to_weights(&self, weights: WeightGroup) -> bool {
        self.config.manifest.stages_of(weights).any(|stage| self.is_moving_to(stage))
    }

    /// Whether the peer hosts a stage with these weights, migrates to one, or has no assignment yet.
    pub(super) fn may_host(&self, weights: WeightGroup) -> bool {
        let hosts = |stage| self.position.span.is_none_or(|span| span.contains(stage));
        self.config.manifest.stages_of(weights).any(hosts) || self.is_moving_to_weights(weights)
    }

    /// The weight groups of these stages.
    pub(super) fn groups_of(&self, stages: &[Stage]) -> BTreeSet<WeightGroup> {
        stages.iter().flat_map(|stage| self.config.manifest.groups_of(*stage)).collect()
    }
}
