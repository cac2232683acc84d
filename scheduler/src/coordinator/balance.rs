//! Keeping the stages equally fast: every so often, and soon after members came or went, they are compared,
//! and who is of more use elsewhere moves.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{Member, Stage, StageSpan};
use shoal_protocol::message::{MemberRecord, MoveReason};
use shoal_protocol::units::Moment;

use super::{Coordinator, Out, Phase};
use crate::deadline::Estimate;
use crate::planner::Link;
use crate::rebalance::{self, Plan, Rebalance, Replica};
use crate::stage_exchange::{CELL, exchange};
use crate::throughput::{Estimates, Throughput};

/// Steps of a term before anybody moves for the speeds that were measured: the first passes are slow
/// for reasons of their own.
const STEPS: u64 = 3;

/// So long after members came or went the stages are compared: of several that go at once the others are
/// known to be gone by then.
const SETTLES: Duration = Duration::from_secs(10);

/// When the stages are compared.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// Next, if nobody comes or goes before.
    regular: Option<Moment>,
    /// When members came or went that no comparison knew of.
    changed: Option<Moment>,
    /// When members were last moved.
    moved: Option<Moment>,
    /// How often they were compared.
    looks: u64,
    /// How long steps took of late, and when the last one ended.
    steps: Option<Estimate>,
    committed: u64,
    stepped_at: Option<Moment>,
    /// How long it took newcomers from when they began to wait for a snapshot until they had the
    /// weights: a move takes as long.
    fetches: Option<Estimate>,
    /// How many of each stage are gone and not made up for, since stages were last level.
    gone: BTreeMap<Stage, usize>,
}

impl Balance {
    /// A step is committed.
    pub(super) fn stepped(&mut self, now: Moment) {
        self.committed += 1;
        if let Some(before) = self.stepped_at.replace(now) {
            Estimate::note(&mut self.steps, now.since(before));
        }
    }

    /// Somebody has the weights that it was to fetch so long ago.
    pub(super) fn fetched(&mut self, took: Duration) {
        Estimate::note(&mut self.fetches, took);
    }

    /// When the stages are compared next, if that is so often: soon after members came or went, but not
    /// before others that moved had that time to be of use.
    fn due(&self, every: Duration) -> Option<Moment> {
        let changed = self.changed.map(|at| at + SETTLES.min(every));
        let moved = self.moved.map(|at| at + every);
        let soon = changed.map(|at| moved.map_or(at, |moved| at.max(moved)));
        self.regular.into_iter().chain(soon).min()
    }

    /// A member of these stages is gone.
    pub(super) fn lacks(&mut self, span: StageSpan, now: Moment) {
        self.changed = Some(now);
        for stage in span.stages() {
            *self.gone.entry(stage).or_insert(0) += 1;
        }
    }

    /// These stages have a new member.
    pub(super) fn joined(&mut self, span: StageSpan, now: Moment) {
        self.changed = Some(now);
        self.gains(span);
    }

    /// These stages have another member, or are to.
    fn gains(&mut self, span: StageSpan) {
        for stage in span.stages() {
            self.gone.entry(stage).and_modify(|gone| *gone = gone.saturating_sub(1));
        }
    }

    /// No stage is much slower than others: what befalls them from now on is another matter.
    pub(super) fn is_level(&mut self) {
        self.gone.clear();
    }

    /// Why somebody is to go to a stage that is slower than others.
    fn reason(&self, to: Stage) -> MoveReason {
        let lacks = self.gone.get(&to).is_some_and(|gone| *gone > 0);
        if lacks { MoveReason::MembersGone } else { MoveReason::Uneven }
    }

    /// Whether enough was seen for speeds to say something.
    fn is_settled(&self) -> bool {
        self.committed >= STEPS
    }

    /// Whether moves are worth more in what is left of the run than what the movers do while they
    /// fetch so long each, which is what a move costs where it turns out to be of no use.
    fn pays(&self, plan: &Plan, fetches: &[Duration], members: usize, steps: u64) -> bool {
        let Some(step) = self.steps else { return true };
        let longest = fetches.iter().max().map_or(0.0, Duration::as_secs_f64);
        let all: f64 = fetches.iter().map(Duration::as_secs_f64).sum();
        let left = step.mean().as_secs_f64() * steps as f64 - longest;
        let gain = plan.after / plan.before - 1.0;
        left > 0.0 && gain * left > all / members.max(1) as f64
    }
}

impl Coordinator {
    /// When the stages are compared next, unless that waits for something else than time.
    pub(super) fn balance_due(&self) -> Option<Moment> {
        let due = self.balance.due(self.config.rebalance.every()?)?;
        (due > self.now).then_some(due)
    }

    /// Compares the stages when it is time to, and has members move where that pays.
    pub(super) fn balance(&mut self, out: &mut Out) {
        let Some(every) = self.config.rebalance.every() else { return };
        self.balance.regular.get_or_insert(self.now + every);
        let trains = matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing);
        let early = self.balance.due(every).is_none_or(|due| self.now < due);
        let restless = matches!(self.config.rebalance, Rebalance::Restless { .. });
        let settled = restless || self.balance.is_settled();
        if early || !trains || !settled || self.is_expelling() {
            return;
        }
        self.balance.regular = Some(self.now + every);
        self.balance.changed = None;
        self.balance.looks += 1;
        // A move that began shortly before the end would come to nothing.
        if self.version.next().0 >= self.config.manifest.training.steps {
            return;
        }
        let moves = match self.config.rebalance {
            Rebalance::Never => Vec::new(),
            Rebalance::When { gain, .. } => {
                let useful = self.useful_moves(gain);
                if useful.is_empty() { self.exchanges(gain) } else { useful }
            }
            Rebalance::Restless { .. } => self
                .any_move()
                .map(|(member, to)| (member, to, MoveReason::Trial))
                .into_iter()
                .collect(),
        };
        if !moves.is_empty() {
            self.balance.moved = Some(self.now);
        }
        for (member, to, reason) in moves {
            self.balance.gains(StageSpan::one(to));
            self.move_member(member, to, reason, out);
        }
    }

    /// Members that change places since steps get shorter by so many thousandths, and that pays. Only
    /// while nobody is on its way: then stages have as many as they are to have.
    fn exchanges(&self, gain: u32) -> Vec<(Member, Stage, MoveReason)> {
        let training = &self.config.manifest.training;
        let moving =
            self.membership.records().any(|record| record.moves.is_some() || !record.serving);
        let step = self.balance.steps.map(|steps| steps.mean().as_secs_f64());
        let Some(step) = step.filter(|step| *step > 0.0) else { return Vec::new() };
        if moving || self.link_estimates.is_empty() {
            return Vec::new();
        }
        let estimates = self.stragglers.service_times.estimates(training.stages, self.now);
        let mut placed = self.placed(&estimates);
        let turn = self.balance.looks as usize * CELL % placed.len().max(1);
        placed.rotate_left(turn);
        let costs = self.costs(&estimates);
        let Some(found) = exchange(&placed, &costs, &self.link_estimates, &self.config.load) else {
            return Vec::new();
        };
        let saved = (found.before - found.after).min(step / 2.0);
        let after = 1.0 / (step / found.kept - saved.max(0.0));
        let plan = Plan { moves: found.moves, before: 1.0 / step, after };
        if !plan.is_of_use(gain) || !self.pays(&plan) {
            return Vec::new();
        }
        plan.moves.into_iter().map(|(member, to)| (member, to, MoveReason::Nearer)).collect()
    }

    /// Moves that make the swarm faster by so many thousandths, and pay.
    fn useful_moves(&mut self, gain: u32) -> Vec<(Member, Stage, MoveReason)> {
        let training = &self.config.manifest.training;
        let estimates = self.stragglers.service_times.estimates(training.stages, self.now);
        let costs = self.costs(&estimates);
        let locality = self.membership.locality(&self.link_estimates, &self.config.load);
        let distance = |member: Member, stage| locality.cost(member.peer, stage).as_secs_f64();
        let plan = rebalance::nearest_plan(&self.placed(&estimates), &costs, distance);
        let of_use = plan.is_of_use(gain);
        if !of_use {
            self.balance.is_level();
        }
        if !of_use || !self.pays(&plan) {
            return Vec::new();
        }
        let reason = |to| self.balance.reason(to);
        plan.moves.into_iter().map(|(member, to)| (member, to, reason(to))).collect()
    }

    /// Whether moves are worth what they cost in what is left of the run.
    fn pays(&self, plan: &Plan) -> bool {
        let left = self.config.manifest.training.steps - self.version.0;
        let fetches = self.fetch_times(&plan.moves);
        self.balance.pays(plan, &fetches, self.membership.len(), left)
    }

    /// How long each of these members takes until it has the weights of its other stage: as long as others
    /// took of late, and where nobody did, what they weigh over what its links carry.
    fn fetch_times(&self, moves: &[(Member, Stage)]) -> Vec<Duration> {
        if let Some(seen) = self.balance.fetches {
            return vec![seen.mean(); moves.len()];
        }
        let movers = moves.iter().map(|(member, _)| member.peer).collect();
        let rates = self.link_estimates.rates_of(&movers);
        let time = |(member, to): &(Member, Stage)| {
            let rate = rates.get(&member.peer).copied();
            let link = rate.map(|rate| Link { delay: Duration::ZERO, rate });
            link.map_or(Duration::ZERO, |link| link.time(self.config.load.state(*to)))
        };
        moves.iter().map(time).collect()
    }

    /// What a microbatch takes at each stage.
    fn costs(&self, estimates: &Estimates<'_>) -> BTreeMap<Stage, f64> {
        let stages = self.config.manifest.stages();
        stages.map(|stage| (stage, estimates.robust_average(stage) as f64)).collect()
    }

    /// The members that host stages and are not about to leave.
    fn staying(&self) -> impl Iterator<Item = &MemberRecord> {
        let stays = |record: &&MemberRecord| !self.membership.is_draining(record.member);
        self.membership.records().filter(|record| !record.span.is_empty()).filter(stays)
    }

    /// Those who stay, with one stage each where they serve or will, and those with more at each of them.
    fn placed(&self, estimates: &Estimates<'_>) -> Vec<Replica> {
        let staying = self.membership.count_staying();
        self.staying()
            .flat_map(|record| {
                let span = record.destination();
                let mobile = may_move(record, &staying);
                let Throughput(speed) = estimates.throughput(record.member, span);
                let (member, speed) = (record.member, speed as f64);
                span.stages().map(move |stage| Replica { member, stage, speed, mobile })
            })
            .collect()
    }

    /// Some move, whether it is of use or not.
    fn any_move(&self) -> Option<(Member, Stage)> {
        let stages = u64::from(self.config.manifest.training.stages);
        let staying = self.membership.count_staying();
        let movers: Vec<&MemberRecord> =
            self.staying().filter(|record| may_move(record, &staying)).collect();
        let mover = movers.get(self.balance.looks as usize % movers.len().max(1))?;
        let to = Stage((self.balance.looks / 2 % stages) as u16);
        (!mover.span.contains(to)).then_some((mover.member, to))
    }
}

/// Whether a member may be given another stage now, where so many stay with each.
fn may_move(record: &MemberRecord, staying: &BTreeMap<Stage, usize>) -> bool {
    record.mobile
        && record.serving
        && record.moves.is_none()
        && record.span.stages().count() == 1
        && staying.get(&record.span.first).is_some_and(|count| *count > 1)
}
