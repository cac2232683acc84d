//! Rebalancing: at regular intervals, and soon after members came or went, the stages' throughput is compared,
//! and members migrate to where they are of more use.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{MemberRecord, MoveReason};
use shoal_protocol::units::{Bytes, Moment};

use super::context::Context;
use super::members::Members;
use super::spans::{self, SpanChanges, SpanLengths, Verdict};
use super::work::Work;
use crate::coordinator::placing::rebalance::{self, Rebalance, Replica};
use crate::coordinator::placing::stage_exchange::{CELL, exchange};
use crate::coordinator::placing::throughput::{Estimates, Throughput};
use crate::coordinator::work::deadline::Estimate;
use crate::planner::Link;

/// Steps of a term before measured throughput causes migrations: the first passes are slow for other reasons.
const STEPS: u64 = 3;

/// The time from a change of the members to the comparison: of several members that leave at once, the others
/// are known to be gone by then.
const SETTLES: Duration = Duration::from_secs(10);

/// A member's migration: its next span and the reason.
type Migration = (Member, StageSpan, MoveReason);

/// The throughput before and after migrations, and the least gain that is enough, in thousandths.
#[derive(Debug, Clone, Copy)]
struct Gain {
    before: f64,
    after: f64,
    least: u32,
}

impl Gain {
    fn is_enough(self) -> bool {
        self.after >= self.before * (1.0 + f64::from(self.least) / 1000.0)
    }
}

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
    /// Changes of spans.
    spans: SpanLengths,
    /// Exchanges of stages that the last comparison of their members found worthwhile.
    exchanges: BTreeSet<(Member, Stage)>,
}

impl Balance {
    /// A step is committed.
    pub(super) fn stepped(&mut self, now: Moment) {
        self.committed += 1;
        if let Some(before) = self.last_commit_at.replace(now) {
            Estimate::note(&mut self.step_times, now.since(before));
            self.spans.stepped(now.since(before));
        }
    }

    /// A newcomer has fetched its weights in so much time.
    pub(super) fn fetched(&mut self, took: Duration) {
        Estimate::note(&mut self.fetch_times, took);
    }

    /// Stages have lost a member.
    pub(super) fn lost(&mut self, span: StageSpan, now: Moment) {
        self.changed_at = Some(now);
        self.spans.reset();
        for stage in span.stages() {
            *self.missing.entry(stage).or_insert(0) += 1;
        }
    }

    /// Stages have a new member.
    pub(super) fn joined(&mut self, span: StageSpan, now: Moment) {
        self.changed_at = Some(now);
        self.spans.reset();
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
                match useful.is_empty() {
                    true => self.nearer_or_other_spans(context, &estimates, gain),
                    false => useful,
                }
            }
            Rebalance::Restless { .. } => {
                let any = self.any_migration(context);
                any.map(|(member, to)| (member, to, MoveReason::Trial)).into_iter().collect()
            }
        };
        migrations.retain(|(member, to, _)| {
            let record = context.members.current.record(*member);
            record.is_some_and(|record| may_change_span(&context.config.manifest, record, *to))
        });
        if !migrations.is_empty() {
            self.migrated_at = Some(context.now);
        }
        for (_, to, _) in &migrations {
            self.regained(*to);
        }
        migrations
    }

    /// Two members that exchange stages, if that makes steps shorter by so many thousandths and pays. Only while
    /// no member migrates or joins: then the stages have as many replicas as they should. Two comparisons in
    /// succession have to find it, since a busy machine looks like a long link for a while.
    fn exchanges(
        &mut self,
        context: &Context,
        estimates: &Estimates<'_>,
        gain: u32,
    ) -> Vec<Migration> {
        let members = &context.members;
        let step = self.step_times.map(|times| times.mean().as_secs_f64());
        let Some(step) = step.filter(|step| *step > 0.0) else { return Vec::new() };
        if is_moving(context) || members.links.is_empty() {
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
        let near = |&(member, to)| (member, StageSpan::one(to), MoveReason::Nearer);
        let migrations = found.moves.iter().map(near).collect();
        let gain = Gain { before: 1.0 / step, after, least: gain };
        let migrations = self.if_worthwhile(context, gain, migrations);
        let compared = placed.iter().take(CELL).map(|replica| replica.member).collect();
        let worthwhile = if migrations.is_empty() { Vec::new() } else { found.moves };
        match self.found_again(context, &compared, worthwhile) {
            true => migrations,
            false => Vec::new(),
        }
    }

    /// Whether the last comparison of these members found the same exchanges worthwhile. If not, it is noted that this
    /// one does.
    fn found_again(
        &mut self,
        context: &Context,
        compared: &BTreeSet<Member>,
        worthwhile: Vec<(Member, Stage)>,
    ) -> bool {
        let again = worthwhile.iter().all(|exchange| self.exchanges.contains(exchange));
        let is_here = |member: Member| context.members.current.record(member).is_some();
        self.exchanges.retain(|(member, _)| !compared.contains(member) && is_here(*member));
        if !again {
            self.exchanges.extend(worthwhile);
        }
        again
    }

    /// What can be done where stages are as fast as each other.
    fn nearer_or_other_spans(
        &mut self,
        context: &Context,
        estimates: &Estimates<'_>,
        gain: u32,
    ) -> Vec<Migration> {
        let spans = self.span_changes(context, estimates, gain);
        if spans.is_empty() { self.exchanges(context, estimates, gain) } else { spans }
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
        let gain = Gain { before: plan.before, after: plan.after, least: gain };
        if !gain.is_enough() {
            self.set_level();
        }
        let useful = |(member, to)| (member, StageSpan::one(to), self.reason(to));
        let migrations = plan.moves.into_iter().map(useful).collect();
        self.if_worthwhile(context, gain, migrations)
    }

    /// Members get longer or shorter spans where that makes steps shorter by half as many thousandths, and pays; or
    /// their earlier ones, if the last change made steps longer.
    fn span_changes(
        &mut self,
        context: &Context,
        estimates: &Estimates<'_>,
        gain: u32,
    ) -> Vec<Migration> {
        if is_moving(context) {
            return Vec::new();
        }
        let changed = |(member, to)| (member, to, MoveReason::Span);
        let step = match self.spans.judge(&mut self.step_times) {
            Verdict::Keep => return Vec::new(),
            Verdict::Undo(spans) => return spans.into_iter().map(changed).collect(),
            Verdict::Compare(step) => step,
        };
        let SpanChanges { moves, saved } = spans::changes(context, estimates);
        // What the model leaves out stays as it is.
        let [before, after] =
            [step, step - saved.min(step / 2)].map(|step| 1.0 / step.as_secs_f64());
        let migrations: Vec<_> = moves.into_iter().map(changed).collect();
        // The next steps show whether the model was right.
        let least = gain / 2;
        let migrations = self.if_worthwhile(context, Gain { before, after, least }, migrations);
        if !migrations.is_empty() {
            let spans = migrations.iter().filter_map(|(member, ..)| {
                Some((*member, context.members.current.span_of(*member)?))
            });
            self.spans.begin(step, spans.collect());
        }
        migrations
    }

    /// The reason for a migration to a stage that is slower than others.
    fn reason(&self, to: Stage) -> MoveReason {
        let lost = self.missing.get(&to).is_some_and(|missing| *missing > 0);
        if lost { MoveReason::MembersGone } else { MoveReason::Uneven }
    }

    /// These migrations, if they gain enough and pay.
    fn if_worthwhile(
        &self,
        context: &Context,
        gain: Gain,
        migrations: Vec<Migration>,
    ) -> Vec<Migration> {
        let worthwhile = gain.is_enough() && self.pays(context, gain, &migrations);
        if worthwhile { migrations } else { Vec::new() }
    }

    /// Whether migrations gain more work in the rest of the run than the members do while they fetch weights. That
    /// is the cost of a migration that turns out to be of no use.
    fn pays(&self, context: &Context, gain: Gain, migrations: &[Migration]) -> bool {
        let steps = context.config.manifest.training.steps - context.progress.version.0;
        let fetches = self.expected_fetch_times(context, migrations);
        let Some(step) = self.step_times else { return true };
        let longest = fetches.iter().max().map_or(0.0, Duration::as_secs_f64);
        let all: f64 = fetches.iter().map(Duration::as_secs_f64).sum();
        let left = step.mean().as_secs_f64() * steps as f64 - longest;
        let gain = gain.after / gain.before - 1.0;
        left > 0.0 && gain * left > all / context.members.current.len().max(1) as f64
    }

    /// How long each of these members takes to fetch the weights that it lacks: as long as others took; if none has,
    /// their size over the rate of its links.
    fn expected_fetch_times(&self, context: &Context, migrations: &[Migration]) -> Vec<Duration> {
        let movers = migrations.iter().map(|(member, ..)| member.peer).collect();
        let rates = context.members.links.rates_of(&movers);
        let time = |(member, to, _): &Migration| {
            let own = context.members.current.span_of(*member).unwrap_or(StageSpan::none());
            let size = Bytes(to.outside(own).map(|stage| context.config.load.state(stage).0).sum());
            let rate = rates.get(&member.peer).copied().filter(|_| size > Bytes(0));
            let link = rate.map(|rate| Link { delay: Duration::ZERO, rate });
            let computed = link.map_or(Duration::ZERO, |link| link.time(size));
            self.fetch_times.filter(|_| size > Bytes(0)).map_or(computed, |seen| seen.mean())
        };
        migrations.iter().map(time).collect()
    }

    /// Some migration, useful or not.
    fn any_migration(&self, context: &Context) -> Option<(Member, StageSpan)> {
        let stages = u64::from(context.config.manifest.training.stages);
        let replicas = context.members.current.staying_counts();
        let moves = |record: &&MemberRecord| record.serving && record.moves.is_none();
        let movers: Vec<&MemberRecord> = staying(&context.members).filter(moves).collect();
        let mover = movers.get(self.comparisons as usize % movers.len().max(1))?;
        let first = self.comparisons / 2 % stages;
        let length = 1 + self.comparisons / (2 * stages) % u64::from(mover.room.most).max(1);
        let last = (first + length).min(stages) - 1;
        let to = StageSpan { first: Stage(first as u16), last: Stage(last as u16) };
        let spare = |stage: Stage| replicas.get(&stage).is_some_and(|count| *count > 1);
        let left = mover.span.stages().filter(|stage| !to.contains(*stage)).all(spare);
        (left && to != mover.span).then_some((mover.member, to))
    }
}

/// The time of a microbatch at each stage.
fn costs(context: &Context, estimates: &Estimates<'_>) -> BTreeMap<Stage, f64> {
    let stages = context.config.manifest.stages();
    stages.map(|stage| (stage, estimates.typical(stage) as f64)).collect()
}

/// The members that host stages and are not about to leave.
pub(super) fn staying(members: &Members) -> impl Iterator<Item = &MemberRecord> {
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
    record.room.in_memory > 1
        && record.serving
        && record.moves.is_none()
        && record.span.stages().count() == 1
        && replicas.get(&record.span.first).is_some_and(|count| *count > 1)
}

/// Whether a member fetches weights or changes its stages.
fn is_moving(context: &Context) -> bool {
    context.members.current.records().any(|record| record.moves.is_some() || !record.serving)
}

/// Whether a member has room for another span beside its own, and no stage that it fetches or leaves shares weights
/// with another one.
pub(super) fn may_change_span(manifest: &Manifest, record: &MemberRecord, to: StageSpan) -> bool {
    let own = record.span;
    let both: BTreeSet<Stage> = own.stages().chain(to.stages()).collect();
    let changes = |stage: &Stage| own.contains(*stage) != to.contains(*stage);
    let alone = |changed: Stage| {
        both.iter().all(|other| *other == changed || manifest.may_change_stage(changed, *other))
    };
    both.len() <= usize::from(record.room.most) && both.iter().copied().filter(changes).all(alone)
}
