//! Migration: a serving peer changes its span. It fetches the weights of the stages that it lacks and follows their
//! rounds, to host the other span from a step on that the membership sets. A span that is a part of its own needs
//! nothing.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use shoal_protocol::ids::{Stage, StageSpan, Step, WeightGroup};
use shoal_protocol::message::{CommitRecord, Move, SnapshotPart};
use shoal_protocol::units::Moment;

use crate::action::{PeerAction, PeerEvent};
use crate::peer::Out;
use crate::peer::context::{Context, MigrationTarget};

/// Commits that wait for the other stage's weights. A peer that falls further behind starts over.
const COMMITS: usize = 1 << 10;

/// The migration of this peer, if there is one.
#[derive(Debug, Default)]
pub(in crate::peer) struct Migration {
    current: Option<Ongoing>,
}

/// A span to which this peer changes.
#[derive(Debug)]
struct Ongoing {
    target: MigrationTarget,
    /// The membership in which it began. Snapshots for an earlier one are not for it: results since then were not for
    /// this peer, or it dropped them.
    begun_in: u64,
    /// Its stages that this peer does not host, in order.
    fetched: Vec<Stage>,
    /// Their weights.
    weights: BTreeSet<WeightGroup>,
    /// None until a snapshot is known.
    start: Option<Start>,
    /// Commits that are not applied, from the start's version on, or all while there is no start.
    commits: VecDeque<CommitRecord>,
    /// The step whose commit waits for its result, and the time of the last progress.
    missing_result: Option<(Step, Moment)>,
}

/// A migration that ended.
pub(in crate::peer) struct Ended {
    /// The stages that were to be fetched.
    pub(super) stages: Vec<Stage>,
    pub(super) weights: BTreeSet<WeightGroup>,
    /// Whether weights of these stages are fetched or here.
    pub(super) has_start: bool,
}

/// Weights that are fetched or here.
#[derive(Debug)]
struct Start {
    /// The version of the snapshot, and later of the last applied commit.
    version: Step,
    /// The stages that the engine does not have yet.
    awaited: BTreeSet<Stage>,
}

/// The membership's decision on a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::peer) enum Decision {
    Pending,
    /// This peer hosts the other span from this step on.
    From(Step),
    /// This peer stays where it is, and does not get this span.
    Cancelled(StageSpan),
}

/// The next commit for the fetched weights.
pub(super) enum NextCommit {
    /// None waits, or the weights are not here.
    None,
    /// Commits are missing before it, in a migration that can start over.
    AfterGap,
    /// It does not fit the weights.
    Unusable,
    /// It may be applied to these stages, with results for these weights.
    Ready { stages: Vec<Stage>, weights: BTreeSet<WeightGroup>, record: Box<CommitRecord> },
}

impl Migration {
    pub(in crate::peer) fn target(&self) -> Option<MigrationTarget> {
        self.current.as_ref().map(|current| current.target)
    }

    /// The span of a migration whose first step is not set yet. Only such a migration can start over:
    /// later the peer lacks its own weights, even if the membership names its next span already.
    pub(super) fn undecided(&self) -> Option<StageSpan> {
        self.target().filter(|target| target.from_step.is_none()).map(|target| target.span)
    }

    /// The membership's decision on the current migration.
    pub(in crate::peer) fn decision(&self, ctx: &Context<'_>) -> Decision {
        let (Some(to), Some(record)) = (self.undecided(), ctx.view.record(ctx.me())) else {
            return Decision::Pending;
        };
        let moves = record.moves.filter(|moves| moves.era == ctx.position.era && moves.to == to);
        match moves.map(|moves| moves.at) {
            Some(Some(at)) => Decision::From(at),
            Some(None) => Decision::Pending,
            // The step that it was decided for is committed already.
            None if record.span == to => Decision::From(ctx.version()),
            None => Decision::Cancelled(to),
        }
    }

    /// Begins the migration that the membership assigns to a serving peer, unless one goes on.
    pub(in crate::peer) fn begin_assigned(&mut self, ctx: &Context<'_>, out: &mut Out) {
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
                start: None,
                commits: VecDeque::new(),
                missing_result: None,
            });
            out.push(PeerAction::Event(PeerEvent::MoveBegun { to, reason }));
        }
    }

    /// Ends the migration.
    pub(in crate::peer) fn end(&mut self) -> Option<Ended> {
        let Ongoing { fetched, weights, start, .. } = self.current.take()?;
        Some(Ended { stages: fetched, weights, has_start: start.is_some() })
    }

    /// Sets the first step with the other span.
    pub(in crate::peer) fn decide(&mut self, from_step: Step) {
        if let Some(current) = &mut self.current {
            current.target.from_step = Some(from_step);
        }
    }

    /// The stages to open to other members' work: the first step is set, and the weights are at the
    /// served version or a later one.
    pub(in crate::peer) fn stages_to_open(&self, served: Step) -> Vec<Stage> {
        let is_level = |current: &&Ongoing| {
            let version = current.version();
            current.target.from_step.is_some() && version.is_some_and(|version| version >= served)
        };
        self.current.as_ref().filter(is_level).map_or_else(Vec::new, |one| one.fetched.clone())
    }

    /// The span to change to at a version.
    pub(in crate::peer) fn span_due(&self, version: Step) -> Option<StageSpan> {
        let target = self.target()?;
        target.from_step.is_some_and(|from| from <= version).then_some(target.span)
    }

    /// Whether the weights are at the served version, or none are needed, in a migration whose first step is not set.
    pub(super) fn is_ready(&self, served: Step) -> bool {
        self.current.as_ref().is_some_and(|current| {
            let is_level = !current.fetches() || current.version() == Some(served);
            current.target.from_step.is_none() && is_level
        })
    }

    /// Whether the first step is set while there are no weights.
    pub(super) fn has_lost_weights(&self) -> bool {
        self.current
            .as_ref()
            .filter(|current| current.fetches())
            .is_some_and(|current| current.target.from_step.is_some() && current.start.is_none())
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
                && current.version().is_none_or(|version| version <= step)
        })
    }

    /// Whether a snapshot may be the start: it is newer than the last one and for this migration, and no first step is
    /// set.
    pub(super) fn accepts_snapshot(&self, version: Step, view: u64) -> bool {
        self.undecided().is_some()
            && self.current.as_ref().is_some_and(|current| {
                let is_newer = current.start.as_ref().is_none_or(|start| version > start.version);
                current.fetches() && view >= current.begun_in && is_newer
            })
    }

    /// Starts from a snapshot. The initial weights have no parts. Returns the fetched stages and their weights, or
    /// nothing where the snapshot is not of these stages.
    pub(super) fn start_from(
        &mut self,
        version: Step,
        parts: &[SnapshotPart],
        is_initial: bool,
    ) -> Option<(Vec<Stage>, BTreeSet<WeightGroup>)> {
        let current = self.current.as_mut()?;
        let awaited: BTreeSet<Stage> = current.fetched.iter().copied().collect();
        if !is_initial && parts.iter().map(|part| part.stage).collect::<BTreeSet<_>>() != awaited {
            return None;
        }
        current.start = Some(Start { version, awaited });
        current.commits.retain(|record| record.step >= version);
        current.missing_result = None;
        Some((current.fetched.clone(), current.weights.clone()))
    }

    /// Whether the start needs this stage.
    pub(super) fn awaits(&self, version: Step, stage: Stage) -> bool {
        let start = self.current.as_ref().and_then(|current| current.start.as_ref());
        start.is_some_and(|start| start.version == version && start.awaited.contains(&stage))
    }

    /// The engine holds the weights that [`Self::awaits`].
    pub(super) fn note_restored(&mut self, stage: Stage) {
        let start = self.current.as_mut().and_then(|current| current.start.as_mut());
        if let Some(start) = start {
            start.awaited.remove(&stage);
        }
    }

    /// Whether a commit is new and may be useful.
    pub(super) fn accepts_commit(&self, record: &CommitRecord) -> bool {
        self.current.as_ref().is_some_and(|current| {
            let known = current.commits.back().is_some_and(|last| last.step >= record.step);
            !known && current.needs(record.step)
        })
    }

    /// Adds an accepted commit. Returns whether there is room for it.
    #[must_use]
    pub(super) fn push_commit(&mut self, record: &CommitRecord) -> bool {
        let Some(current) = &mut self.current else { return true };
        let fits = current.commits.len() < COMMITS;
        if fits {
            current.commits.push_back(record.clone());
        }
        fits
    }

    /// The next commit to apply.
    pub(super) fn next_commit(&self) -> NextCommit {
        let Some(current) = &self.current else { return NextCommit::None };
        let (Some(version), Some(record)) = (current.version(), current.commits.front()) else {
            return NextCommit::None;
        };
        if record.step > version && current.target.from_step.is_none() {
            return NextCommit::AfterGap;
        }
        if record.step != version {
            return NextCommit::Unusable;
        }
        let (stages, weights) = (current.fetched.clone(), current.weights.clone());
        NextCommit::Ready { stages, weights, record: Box::new(record.clone()) }
    }

    /// The next commit is applied: the weights are one version further.
    pub(super) fn note_applied(&mut self) {
        let Some(current) = &mut self.current else { return };
        current.commits.pop_front();
        if let Some(start) = &mut current.start {
            start.version = start.version.next();
        }
    }

    /// Whether the commit of a step waits.
    pub(super) fn commits(&self, step: Step) -> bool {
        let current = self.current.as_ref();
        current.is_some_and(|current| current.commits.iter().any(|record| record.step == step))
    }

    /// The next commit waits for its result.
    pub(super) fn await_result(&mut self, now: Moment, step: Step) {
        if let Some(current) = &mut self.current {
            let known = current.missing_result.filter(|(missing, _)| *missing == step);
            current.missing_result = known.or(Some((step, now)));
        }
    }

    /// The next commit's result is here, even if the engine still assembles it.
    pub(super) fn note_result(&mut self) {
        if let Some(current) = &mut self.current {
            current.missing_result = None;
        }
    }

    /// A piece of a result for some weights arrived.
    pub(super) fn note_progress(&mut self, now: Moment, weights: WeightGroup) {
        let current = self.current.as_mut().filter(|current| current.weights.contains(&weights));
        if let Some(current) = current {
            current.missing_result = current.missing_result.map(|(step, _)| (step, now));
        }
    }

    /// The step and span of a result of which no piece arrived for this long.
    pub(super) fn overdue_result(
        &self,
        now: Moment,
        patience: Duration,
    ) -> Option<(Step, StageSpan)> {
        let current = self.current.as_ref()?;
        let (step, since) = current.missing_result?;
        (now.since(since) >= patience).then_some((step, current.target.span))
    }

    /// Forgets the start, and keeps the commits for the next one.
    pub(super) fn forget_start(&mut self) {
        if let Some(current) = &mut self.current {
            (current.start, current.missing_result) = (None, None);
        }
    }

    /// Forgets the start and all commits. Returns the weights that were fetched.
    pub(super) fn restart(&mut self) -> Option<BTreeSet<WeightGroup>> {
        self.forget_start();
        let current = self.current.as_mut()?;
        current.commits.clear();
        Some(current.weights.clone())
    }
}

impl Ongoing {
    /// Whether the span has stages that this peer does not host.
    fn fetches(&self) -> bool {
        !self.fetched.is_empty()
    }

    /// The version of the weights that the engine has.
    fn version(&self) -> Option<Step> {
        self.start.as_ref().filter(|start| start.awaited.is_empty()).map(|start| start.version)
    }

    fn needs(&self, step: Step) -> bool {
        self.fetches() && self.start.as_ref().is_none_or(|start| step >= start.version)
    }
}
