//! Rebalancing: at regular intervals, and soon after members came or went, the stages' throughput is compared,
//! and members migrate to where they are of more use.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan};
use shoal_protocol::message::{MemberRecord, MoveReason};
use shoal_protocol::units::Moment;

use super::context::Context;
use super::members::Members;
use super::work::Work;
use crate::deadline::Estimate;
use crate::planner::Link;
use crate::rebalance::{self, Plan, Rebalance, Replica};
use crate::stage_exchange::{CELL, exchange};
use crate::throughput::{Estimates, Throughput};

/// Steps of a term before measured throughput causes migrations: the first passes are slow for other reasons.
const STEPS: u64 = 3;

/// The time from a change of the members to the comparison: of several members that leave at once, the others
/// are known to be gone by then.
const SETTLES: Duration = Duration::from_secs(10);

/// A member's migration: its next stage and the reason.
type Migration = (Member, Stage, MoveReason);

/// The schedule of comparisons, and the measurements that they use besides the members' throughput.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// The next comparison, if the members do not change before.
    regular_at: Option<Moment>,
    /// When members came or went since the last comparison.
    changed_at: Option<Moment>,
    /// When members last began to migrate.
    migrated_at: Option<Moment>,
    comparisons: u64,
    /// How long steps took.
    step_times: Option<Estimate>,
    committed: u64,
    last_commit_at: Option<Moment>,
    /// How long newcomers took from when they began to wait for a snapshot until they had the weights. A
    /// migration takes as long.
    fetch_times: Option<Estimate>,
    /// The number of replicas that each stage has lost and not regained since stages were last level.
    missing: BTreeMap<Stage, usize>,
}

impl Balance {
    /// A step is committed.
    pub(super) fn stepped(&mut self, now: Moment) {
        self.committed += 1;
        if let Some(before) = self.last_commit_at.replace(now) {
            Estimate::note(&mut self.step_times, now.since(before));
        }
    }

    /// A newcomer has fetched its weights in so much time.
    pub(super) fn fetched(&mut self, took: Duration) {
        Estimate::note(&mut self.fetch_times, took);
    }

    /// Stages have lost a member.
    pub(super) fn lost(&mut self, span: StageSpan, now: Moment) {
        self.changed_at = Some(now);
        for stage in span.stages() {
            *self.missing.entry(stage).or_insert(0) += 1;
        }
    }

    /// Stages have a new member.
    pub(super) fn joined(&mut self, span: StageSpan, now: Moment) {
        self.changed_at = Some(now);
        self.regained(span);
    }

    /// Stages have another member, or will.
    fn regained(&mut self, span: StageSpan) {
        for stage in span.stages() {
            self.missing.entry(stage).and_modify(|missing| *missing = missing.saturating_sub(1));
        }
    }

    /// No stage is much slower than others: earlier losses do not explain later differences.
    pub(super) fn set_level(&mut self) {
        self.missing.clear();
    }

    /// The time of the next comparison, if comparisons are this far apart. It is soon after members came or
    /// went, but not before earlier migrations had that time to take effect.
    fn due(&self, every: Duration) -> Option<Moment> {
        let changed = self.changed_at.map(|at| at + SETTLES.min(every));
        let migrated = self.migrated_at.map(|at| at + every);
        let soon = changed.map(|at| migrated.map_or(at, |migrated| at.max(migrated)));
        self.regular_at.into_iter().chain(soon).min()
    }

    /// The time of the next comparison, unless that waits for something else than time.
    pub(super) fn next_comparison(&self, context: &Context) -> Option<Moment> {
        let due = self.due(context.config.rebalance.every()?)?;
        (due > context.now).then_some(due)
    }

    /// Compares the stages when that is due. Returns the migrations that pay.
    pub(super) fn migrations(&mut self, context: &Context, work: &Work) -> Vec<Migration> {
        let Some(every) = context.config.rebalance.every() else { return Vec::new() };
        self.regular_at.get_or_insert(context.now + every);
        let early = self.due(every).is_none_or(|due| context.now < due);
        let restless = matches!(context.config.rebalance, Rebalance::Restless { .. });
        let settled = restless || self.committed >= STEPS;
        let training = context.progress.is_training();
        if early || !training || !settled || context.members.is_expelling() {
            return Vec::new();
        }
        self.regular_at = Some(context.now + every);
        self.changed_at = None;
        self.comparisons += 1;
        // A migration that begins shortly before the end is of no use.
        if context.progress.version.next().0 >= context.config.manifest.training.steps {
            return Vec::new();
        }
        let mut migrations = match context.config.rebalance {
            Rebalance::Never => Vec::new(),
            Rebalance::When { gain, .. } => {
                let estimates = work.estimates(context);
                let useful = self.useful_migrations(context, &estimates, gain);
                if useful.is_empty() { self.exchanges(context, &estimates, gain) } else { useful }
            }
            Rebalance::Restless { .. } => {
                let any = self.any_migration(context);
                any.map(|(member, to)| (member, to, MoveReason::Trial)).into_iter().collect()
            }
        };
        migrations.retain(|(member, to, _)| {
            let from = context.members.current.span_of(*member);
            from.is_some_and(|from| context.config.manifest.may_change_stage(from.first, *to))
        });
        if !migrations.is_empty() {
            self.migrated_at = Some(context.now);
        }
        for (_, to, _) in &migrations {
            self.regained(StageSpan::one(*to));
        }
        migrations
    }

    /// Two members that exchange stages, if that makes steps shorter by so many thousandths and pays. Only while
    /// no member migrates or joins: then the stages have as many replicas as they should.
    fn exchanges(&self, context: &Context, estimates: &Estimates<'_>, gain: u32) -> Vec<Migration> {
        let members = &context.members;
        let moving =
            members.current.records().any(|record| record.moves.is_some() || !record.serving);
        let step = self.step_times.map(|times| times.mean().as_secs_f64());
        let Some(step) = step.filter(|step| *step > 0.0) else { return Vec::new() };
        if moving || members.links.is_empty() {
            return Vec::new();
        }
        let mut placed = placed(members, estimates);
        let turn = self.comparisons as usize * CELL % placed.len().max(1);
        placed.rotate_left(turn);
        let costs = costs(context, estimates);
        let found = exchange(&placed, &costs, &members.links, &context.config.load);
        let Some(found) = found else { return Vec::new() };
        let saved = (found.before - found.after).min(step / 2.0);
        let after = 1.0 / (step / found.kept - saved.max(0.0));
        let plan = Plan { moves: found.moves, before: 1.0 / step, after };
        if !plan.is_of_use(gain) || !self.pays(context, &plan) {
            return Vec::new();
        }
        plan.moves.into_iter().map(|(member, to)| (member, to, MoveReason::Nearer)).collect()
    }

    /// Migrations that raise the throughput by so many thousandths, and pay.
    fn useful_migrations(
        &mut self,
        context: &Context,
        estimates: &Estimates<'_>,
        gain: u32,
    ) -> Vec<Migration> {
        let members = &context.members;
        let costs = costs(context, estimates);
        let locality = members.current.locality(&members.links, &context.config.load);
        let distance = |member: Member, stage| locality.cost(member.peer, stage).as_secs_f64();
        let plan = rebalance::nearest_plan(&placed(members, estimates), &costs, distance);
        let of_use = plan.is_of_use(gain);
        if !of_use {
            self.set_level();
        }
        if !of_use || !self.pays(context, &plan) {
            return Vec::new();
        }
        plan.moves.into_iter().map(|(member, to)| (member, to, self.reason(to))).collect()
    }

    /// The reason for a migration to a stage that is slower than others.
    fn reason(&self, to: Stage) -> MoveReason {
        let lost = self.missing.get(&to).is_some_and(|missing| *missing > 0);
        if lost { MoveReason::MembersGone } else { MoveReason::Uneven }
    }

    /// Whether migrations gain more work in the rest of the run than the members do while they fetch weights. That
    /// is the cost of a migration that turns out to be of no use.
    fn pays(&self, context: &Context, plan: &Plan) -> bool {
        let steps = context.config.manifest.training.steps - context.progress.version.0;
        let fetches = self.expected_fetch_times(context, &plan.moves);
        let Some(step) = self.step_times else { return true };
        let longest = fetches.iter().max().map_or(0.0, Duration::as_secs_f64);
        let all: f64 = fetches.iter().map(Duration::as_secs_f64).sum();
        let left = step.mean().as_secs_f64() * steps as f64 - longest;
        let gain = plan.after / plan.before - 1.0;
        left > 0.0 && gain * left > all / context.members.current.len().max(1) as f64
    }

    /// How long each of these members takes to fetch the weights of its next stage: as long as others took; if
    /// none has, their size over the rate of its links.
    fn expected_fetch_times(&self, context: &Context, moves: &[(Member, Stage)]) -> Vec<Duration> {
        if let Some(seen) = self.fetch_times {
            return vec![seen.mean(); moves.len()];
        }
        let movers = moves.iter().map(|(member, _)| member.peer).collect();
        let rates = context.members.links.rates_of(&movers);
        let time = |(member, to): &(Member, Stage)| {
            let rate = rates.get(&member.peer).copied();
            let link = rate.map(|rate| Link { delay: Duration::ZERO, rate });
            link.map_or(Duration::ZERO, |link| link.time(context.config.load.state(*to)))
        };
        moves.iter().map(time).collect()
    }

    /// Some migration, useful or not.
    fn any_migration(&self, context: &Context) -> Option<(Member, Stage)> {
        let stages = u64::from(context.config.manifest.training.stages);
        let replicas = context.members.current.staying_counts();
        let movers: Vec<&MemberRecord> =
            staying(&context.members).filter(|record| may_migrate(record, &replicas)).collect();
        let mover = movers.get(self.comparisons as usize % movers.len().max(1))?;
        let to = Stage((self.comparisons / 2 % stages) as u16);
        (!mover.span.contains(to)).then_some((mover.member, to))
    }
}

/// The time of a microbatch at each stage.
fn costs(context: &Context, estimates: &Estimates<'_>) -> BTreeMap<Stage, f64> {
    let stages = context.config.manifest.stages();
    stages.map(|stage| (stage, estimates.robust_average(stage) as f64)).collect()
}

/// The members that host stages and are not about to leave.
fn staying(members: &Members) -> impl Iterator<Item = &MemberRecord> {
    let stays = |record: &&MemberRecord| !members.current.is_draining(record.member);
    members.current.records().filter(|record| !record.span.is_empty()).filter(stays)
}

/// The replicas of all stages, from the members that stay: at the stages that they serve or will.
fn placed(members: &Members, estimates: &Estimates<'_>) -> Vec<Replica> {
    let replicas = members.current.staying_counts();
    staying(members)
        .flat_map(|record| {
            let span = record.destination();
            let mobile = may_migrate(record, &replicas);
            let Throughput(speed) = estimates.throughput(record.member, span);
            let (member, speed) = (record.member, speed as f64);
            span.stages().map(move |stage| Replica { member, stage, speed, mobile })
        })
        .collect()
}

/// Whether a member may be given another stage, with so many replicas that stay at each.
fn may_migrate(record: &MemberRecord, replicas: &BTreeMap<Stage, usize>) -> bool {
    record.mobile
        && record.serving
        && record.moves.is_none()
        && record.span.stages().count() == 1
        && replicas.get(&record.span.first).is_some_and(|count| *count > 1)
}
