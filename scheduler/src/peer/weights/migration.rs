//! Migration: a serving peer changes its span. It fetches the weights of the stages that it lacks and follows their
//! rounds, to host the other span from a step on that the membership sets. A span that is a part of its own needs
//! nothing.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::message::{Followed, Move};

use super::follower::{Follower, StepMessage};
use super::rounds::Results;
use super::{Weights, apply_at};
use crate::action::{PeerAction, PeerEvent};
use crate::peer::Out;
use crate::peer::context::{Context, MigrationTarget};

/// The migration of this peer, if there is one.
#[derive(Debug, Default)]
pub(super) struct Migration {
    current: Option<Ongoing>,
}

/// A span to which this peer changes.
#[derive(Debug)]
pub(super) struct Ongoing {
    target: MigrationTarget,
    /// The membership in which it began. Snapshots for an earlier one are not for it: results since then were not for
    /// this peer, or it dropped them.
    begun_in: u64,
    /// Its stages that this peer does not host, in order.
    pub(super) fetched: Vec<Stage>,
    /// Their weights.
    pub(super) weights: BTreeSet<WeightGroup>,
    /// Follows these weights. Of the messages about steps only commits wait.
    pub(super) follower: Follower,
}

/// A migration that ended.
pub(super) struct Ended {
    /// The stages that were to be fetched.
    pub(super) stages: Vec<Stage>,
    pub(super) weights: BTreeSet<WeightGroup>,
    /// Whether weights of these stages are fetched or here.
    pub(super) has_start: bool,
}

/// The membership's decision on a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::peer) enum Decision {
    Pending,
    /// This peer hosts the other span from this step on.
    From(Step, StageSpan),
    /// This peer stays where it is, and does not get this span.
    Cancelled(StageSpan),
}

impl Migration {
    pub(super) fn target(&self) -> Option<MigrationTarget> {
        self.current.as_ref().map(|current| current.target)
    }

    /// The span of a migration whose first step is not set yet. Only such a migration can start over:
    /// later the peer lacks its own weights, even if the membership names its next span already.
    pub(super) fn undecided(&self) -> Option<StageSpan> {
        self.target().filter(|target| target.from_step.is_none()).map(|target| target.span)
    }

    /// The membership's decision on the current migration.
    pub(super) fn decision(&self, ctx: &Context<'_>) -> Decision {
        let (Some(to), Some(record)) = (self.undecided(), ctx.view.record(ctx.me())) else {
            return Decision::Pending;
        };
        let moves = record.moves.filter(|moves| moves.era == ctx.position.era && moves.to == to);
        match moves.map(|moves| moves.at) {
            Some(Some(at)) => Decision::From(at, to),
            Some(None) => Decision::Pending,
            // The step that it was decided for is committed already.
            None if record.span == to => Decision::From(ctx.version(), to),
            None => Decision::Cancelled(to),
        }
    }

    /// Begins the migration that the membership assigns to a serving peer, unless one goes on.
    pub(super) fn begin_assigned(&mut self, ctx: &Context<'_>, out: &mut Out) {
        let moves = ctx.view.record(ctx.me()).and_then(|record| record.moves);
        let moves = moves.filter(|moves| moves.era == ctx.position.era && moves.at.is_none());
        if let Some(Move { to, reason, .. }) = moves.filter(|_| self.current.is_none()) {
            let target = MigrationTarget { span: to, from_step: None };
            let own = ctx.position.span.unwrap_or(StageSpan::none());
            let fetched: Vec<Stage> = to.outside(own).collect();
            self.current = Some(Ongoing {
                target,
                begun_in: ctx.view.number,
                weights: ctx.groups_of(&fetched),
                fetched,
                follower: Follower::default(),
            });
            out.push(PeerAction::Event(PeerEvent::MoveBegun { to, reason }));
        }
    }

    /// Ends the migration.
    pub(super) fn end(&mut self) -> Option<Ended> {
        let Ongoing { fetched, weights, follower, .. } = self.current.take()?;
        Some(Ended { stages: fetched, weights, has_start: follower.has_start() })
    }

    /// Sets the first step with the other span.
    pub(super) fn decide(&mut self, from_step: Step) {
        if let Some(current) = &mut self.current {
            current.target.from_step = Some(from_step);
        }
    }

    /// The stages to open to other members' work: the first step is set, and the weights are at the
    /// served version or a later one.
    pub(super) fn stages_to_open(&self, served: Step) -> Vec<Stage> {
        let is_level = |current: &&Ongoing| {
            let version = current.follower.version();
            current.target.from_step.is_some() && version.is_some_and(|version| version >= served)
        };
        self.current.as_ref().filter(is_level).map_or_else(Vec::new, |one| one.fetched.clone())
    }

    /// The span to change to at a version.
    pub(super) fn span_due(&self, version: Step) -> Option<StageSpan> {
        let target = self.target()?;
        target.from_step.is_some_and(|from| from <= version).then_some(target.span)
    }

    /// Whether the weights are at the served version, or none are needed, in a migration whose first step is not set.
    pub(super) fn is_ready(&self, served: Step) -> bool {
        self.current.as_ref().is_some_and(|current| {
            let is_level = !current.fetches() || current.follower.version() == Some(served);
            current.target.from_step.is_none() && is_level
        })
    }

    /// Whether the first step is set while there are no weights.
    pub(super) fn has_lost_weights(&self) -> bool {
        self.current.as_ref().filter(|current| current.fetches()).is_some_and(|current| {
            current.target.from_step.is_some() && !current.follower.has_start()
        })
    }

    /// Whether the result of a step for some weights may be useful; unknown where these are not among those that
    /// are fetched.
    pub(super) fn needs(&self, weights: WeightGroup, step: Step) -> Option<bool> {
        let current = self.current.as_ref().filter(|current| current.weights.contains(&weights))?;
        Some(current.needs(step))
    }

    /// Whether the served weights must wait with the commit of a step. Once the first step is set, the
    /// fetched weights are never older than the served ones.
    pub(super) fn holds_up(&self, step: Step) -> bool {
        self.current.as_ref().is_some_and(|current| {
            current.fetches()
                && current.target.from_step.is_some()
                && current.follower.version().is_none_or(|version| version <= step)
        })
    }

    /// Whether a snapshot may be the start: it is newer than the last one and for this migration, and no first step is
    /// set.
    pub(super) fn accepts_snapshot(&self, version: Step, view: u64) -> bool {
        self.undecided().is_some()
            && self.current.as_ref().is_some_and(|current| {
                current.fetches() && view >= current.begun_in && current.follower.is_newer(version)
            })
    }

    /// Whether the commit of a step is new and may be useful.
    pub(super) fn accepts_commit(&self, step: Step) -> bool {
        self.current.as_ref().is_some_and(|current| {
            let known = current.follower.last().is_some_and(|last| last.step() >= step);
            !known && current.needs(step)
        })
    }

    /// Follows the fetched weights.
    pub(super) fn follower(&self) -> Option<&Follower> {
        self.current.as_ref().map(|current| &current.follower)
    }

    pub(super) fn ongoing(&mut self) -> Option<&mut Ongoing> {
        self.current.as_mut()
    }
}

impl Ongoing {
    /// Whether the span has stages that this peer does not host.
    fn fetches(&self) -> bool {
        !self.fetched.is_empty()
    }

    fn needs(&self, step: Step) -> bool {
        self.fetches() && !self.follower.is_past(step)
    }
}

/// Migrations as a part of the weights.
impl Weights {
    /// The destination of the migration, if there is one.
    pub(in crate::peer) fn target(&self) -> Option<MigrationTarget> {
        self.migration.target()
    }

    /// Begins the migration that the membership assigns to a serving peer, unless one goes on.
    pub(in crate::peer) fn begin_migration(&mut self, ctx: &Context<'_>, out: &mut Out) {
        self.migration.begin_assigned(ctx, out);
    }

    /// Follows the membership's decision on the migration, which it returns.
    pub(in crate::peer) fn follow_decision(&mut self, ctx: &Context<'_>) -> Decision {
        let decision = self.migration.decision(ctx);
        if let Decision::From(step, _) = decision {
            self.migration.decide(step);
        }
        decision
    }

    /// The fetched stages to open to other members' work, if their weights are at the served version or a later one.
    pub(in crate::peer) fn stages_to_open(&self, served: Step) -> Vec<Stage> {
        self.migration.stages_to_open(served)
    }

    /// Changes from a span to the other one, if its first step is reached at this version and all of its stages are open.
    /// Returns that span.
    pub(in crate::peer) fn change_over(
        &mut self,
        version: Step,
        from: StageSpan,
        is_open: impl Fn(Stage) -> bool,
        out: &mut Out,
    ) -> Option<StageSpan> {
        let to = self.migration.span_due(version).filter(|to| to.stages().all(is_open))?;
        self.migration.end();
        for stage in from.outside(to) {
            self.snapshots.leave(stage, out);
        }
        Some(to)
    }

    /// Ends the migration without a change. Returns the stages of which the engine may hold weights for it.
    #[must_use]
    pub(in crate::peer) fn cancel_migration(&mut self, out: &mut Out) -> Vec<Stage> {
        let Some(ended) = self.migration.end() else { return Vec::new() };
        self.rounds.forget_results_of(&ended.weights, Step(u64::MAX), out);
        self.rounds.drop_early_of(&ended.weights, out);
        if ended.has_start { ended.stages } else { Vec::new() }
    }

    /// Applies commits to the weights that the migration fetches, as far as their results are here. Returns whether no
    /// commit is left that could be applied.
    #[must_use]
    pub(in crate::peer) fn catch_up_migration(&mut self, ctx: &Context<'_>, out: &mut Out) -> bool {
        loop {
            let can_start_over = self.migration.undecided().is_some();
            let Some(ongoing) = self.migration.ongoing() else { return true };
            let Ongoing { follower, fetched, weights, .. } = ongoing;
            let (Some(version), Some(next)) = (follower.version(), follower.first()) else {
                return true;
            };
            if next.step() > version && can_start_over {
                // A commit was lost, or it is one from before this start: the received results may fit
                // the next snapshot.
                follower.forget_start();
                self.behind.report(Followed::Destination, self.serves, out);
                return false;
            }
            let is_next = next.step() == version;
            let results =
                is_next.then(|| follower.results(ctx.now, &mut self.rounds, weights, out));
            let rounds = match results {
                Some(Results::Here(rounds)) => rounds,
                Some(Results::Missing | Results::Assembling) => return false,
                Some(Results::Differ) | None => {
                    self.fall_behind(ctx, Followed::Destination, out);
                    return false;
                }
            };
            if let Some(StepMessage::Commit(record)) = follower.pop() {
                apply_at(ctx, fetched, &rounds, &record, out);
                follower.note_applied();
                self.rounds.forget_results_of(weights, record.step, out);
            }
        }
    }

    /// Forgets the weights that the migration fetched, and waits for a newer snapshot.
    pub(super) fn reset_migration(&mut self, out: &mut Out) {
        if let Some(Ongoing { follower, weights, .. }) = self.migration.ongoing() {
            follower.forget_start();
            follower.clear();
            self.rounds.forget_results_of(weights, Step(u64::MAX), out);
            self.rounds.drop_early_of(weights, out);
        }
    }
}
