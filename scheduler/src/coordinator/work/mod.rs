//! The work of the open steps: grants of the first stage's microbatches, claims of the later stages, reports,
//! and the claims that are late.
//!
//! The work of a step is granted while the all-reduce of the step before still runs, so that offers,
//! acceptances and claims are settled when the weights arrive.

pub(crate) mod deadline;
pub(crate) mod ledger;
mod open_steps;
mod replays;
mod stealing;
mod stragglers;
mod work_queue;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step, Term};
use shoal_protocol::message::{FixedLoss, FromCoordinator, Handover, HeldClaim, PassTimes};
use shoal_protocol::units::Moment;

use self::open_steps::OpenSteps;
use self::replays::Replays;
use self::stragglers::Stragglers;
use super::context::Context;
use super::{Out, event, send};
use crate::action::{CoordinatorEvent, LossCause, StepCounts};
use crate::coordinator::placing::throughput::Estimates;
use crate::coordinator::work::ledger::{ClaimAnswer, DoneAnswer, Ledger, Revoked};
use crate::router::Routing;

/// The work of the open steps.
#[derive(Debug)]
pub(super) struct Work {
    steps: OpenSteps,
    stragglers: Stragglers,
    replays: Replays,
}

impl Work {
    pub(super) fn new(term: Term, routing: Routing) -> Self {
        Self {
            steps: OpenSteps::new(term, routing),
            stragglers: Stragglers::default(),
            replays: Replays::default(),
        }
    }

    /// The ledger of an open step.
    pub(super) fn ledger(&self, step: Step) -> Option<&Ledger> {
        self.steps.ledger(step)
    }

    /// The ledgers of all open steps.
    pub(super) fn ledgers(&self) -> impl Iterator<Item = (Step, &Ledger)> {
        self.steps.ledgers()
    }

    /// The member that holds a claim.
    pub(super) fn holder(&self, key: ClaimKey) -> Option<Member> {
        self.ledger(key.step)?.holder(key)
    }

    /// The number of claims that members hold.
    pub(super) fn held(&self) -> u64 {
        self.steps.held()
    }

    /// The estimated throughput of members at stages.
    pub(super) fn estimates(&self, context: &Context) -> Estimates<'_> {
        self.stragglers.estimates(context.config.manifest.training.stages, context.now)
    }

    /// When claims are late, or activations are requested again.
    pub(super) fn next_timeout(&self) -> Option<Moment> {
        self.replays.at().into_iter().chain(self.stragglers.next_timeout()).min()
    }

    /// Whether all sums equal a recount.
    #[cfg(test)]
    pub(super) fn is_counted(&self) -> bool {
        self.steps.is_counted() && self.stragglers.is_counted()
    }

    /// The first step after the present one of which a member has counted nothing at these stages, nor of any later
    /// one.
    pub(super) fn first_uncounted(
        &self,
        member: Member,
        stages: &BTreeSet<Stage>,
        present: Step,
    ) -> Step {
        let mut ledgers = self.steps.ledgers().rev();
        let counted = ledgers.find(|(_, ledger)| ledger.has_counted(member, stages));
        counted.map_or(Step(0), |(step, _)| step.next()).max(present.next())
    }

    /// These members begin to swap their stages or have ended that: what was measured of them is over.
    pub(super) fn forget_service_times(&mut self, members: &[Member]) {
        members.iter().for_each(|member| self.stragglers.forget_service_times(*member));
    }

    /// Grants the first stage's work to the members that host it, or will within the steps that are open.
    pub(super) fn update_hosts(&mut self, context: &Context) {
        let version = context.progress.version.0;
        let steps = version..=version + context.config.manifest.steps_at_once();
        let current = &context.members.current;
        let hosts = |member| steps.clone().any(|step| current.hosts(member, Stage(0), Step(step)));
        self.steps.set_hosts(context.members.logged_where(true, hosts));
    }

    /// Opens so many steps, the first one that is not committed and those after it, and grants their work.
    /// The passes of the last may wait for weights.
    pub(super) fn open_steps(&mut self, context: &Context, steps: u64, out: &mut Out) {
        for ahead in 0..steps {
            self.open_ledger(context, Step(context.progress.version.0 + ahead));
        }
        self.grant(context, out);
    }

    /// Opens a step's ledger, if the run has such a step and it is not open.
    fn open_ledger(&mut self, context: &Context, step: Step) {
        let manifest = &context.config.manifest;
        if step.0 >= manifest.training.steps || self.steps.ledger(step).is_some() {
            return;
        }
        let microbatches = manifest.microbatches_of(step.0);
        let training = &manifest.training;
        let ledger = Ledger::open(step, training.stages, training.microbatches, microbatches);
        self.steps.open(step, ledger);
        self.replays.schedule(context.retry_at());
    }

    /// Grants the first stage's microbatches to the members that request them, in proportion to their
    /// throughput, the oldest step's first.
    pub(super) fn grant(&mut self, context: &Context, out: &mut Out) {
        if context.progress.is_suspended() {
            return;
        }
        let open: Vec<Step> = self.steps.ledgers().map(|(step, _)| step).collect();
        for step in open {
            let mut granted: BTreeMap<Member, Vec<(Microbatch, Grant)>> = BTreeMap::new();
            let Self { steps, stragglers, .. } = self;
            let preference = |key| stragglers.preference(key, context.now);
            let hosts = |member| context.members.current.hosts(member, Stage(0), step);
            while let Some((member, microbatch, grant)) =
                steps.grant_one(step, context.now, preference, hosts)
            {
                granted.entry(member).or_default().push((microbatch, grant));
            }
            for (member, grants) in granted {
                for (microbatch, grant) in &grants {
                    let key = ClaimKey { step, stage: Stage(0), microbatch: *microbatch };
                    self.stragglers.watch(context, key, member, *grant);
                }
                send(member, FromCoordinator::Work { step, grants }, out);
            }
        }
    }

    /// A member requests work of steps; those in which it does not host the first stage do not count.
    pub(super) fn request(
        &mut self,
        context: &Context,
        from: Member,
        rooms: &[(Step, u32)],
        (last_grant, service_time): (Grant, u64),
        out: &mut Out,
    ) {
        let current = &context.members.current;
        let hosts = |(step, _): &&(Step, u32)| current.hosts(from, Stage(0), *step);
        let rooms: Vec<(Step, u32)> = rooms.iter().filter(hosts).copied().collect();
        if !rooms.is_empty() {
            self.steps.request(from, &rooms, (last_grant, service_time), context.now);
            self.grant(context, out);
        }
    }

    /// A member requests a claim.
    pub(super) fn claim(&mut self, context: &Context, from: Member, key: ClaimKey, out: &mut Out) {
        if !context.members.current.hosts(from, key.stage, key.step) {
            if context.members.current.is_leaving(from, key.stage) {
                // The member has yet to learn that it changes over before this step.
                send(from, FromCoordinator::NotOpen { key }, out);
            } else {
                event(CoordinatorEvent::ClaimRefused { member: from, key }, out);
            }
            return;
        }
        let message = match self.steps.claim(from, key) {
            ClaimAnswer::Granted { grant, next_holder } => {
                self.stragglers.watch(context, key, from, grant);
                FromCoordinator::Granted { key, grant, next_holder }
            }
            ClaimAnswer::Held { holder } => FromCoordinator::Held { key, holder },
            ClaimAnswer::NotOpen => FromCoordinator::NotOpen { key },
        };
        send(from, message, out);
    }

    /// A member reports that the work of a claim is in its accumulator. Returns whether that is new.
    pub(super) fn done(
        &mut self,
        context: &Context,
        from: Member,
        (key, grant): (ClaimKey, Grant),
        (loss, pass_times, handover): (Option<FixedLoss>, PassTimes, Handover),
        out: &mut Out,
    ) -> bool {
        // A member that changes over releases its work of later steps, done or not.
        let hosts = context.members.current.hosts(from, key.stage, key.step);
        let answer = if hosts {
            self.steps.done(from, key, grant, (loss, handover), context.now)
        } else {
            DoneAnswer::Refused
        };
        // A report of a committed step was taken before the commit: only its answer was lost.
        let committed = key.step < context.progress.version;
        let noted = answer == DoneAnswer::Noted;
        if noted {
            self.stragglers.learn(context, from, key, pass_times);
            self.steal(context, (key.step, key.stage), from, out);
        }
        if answer != DoneAnswer::Refused || committed {
            send(from, FromCoordinator::Noted { key, grant }, out);
        } else if !context.members.current.is_leaving(from, key.stage) {
            event(CoordinatorEvent::ClaimRefused { member: from, key }, out);
        }
        noted
    }

    /// A holder that was asked for a claim keeps it, since it works on it. If the claim was to be stolen for
    /// another member, that one may get another.
    pub(super) fn keep(
        &mut self,
        context: &Context,
        from: Member,
        (key, grant): (ClaimKey, Grant),
        out: &mut Out,
    ) {
        self.stragglers.keep(context, from, key, grant);
        if let Some(idle) = self.stragglers.steal_answered(key, grant) {
            self.steal(context, (key.step, key.stage), idle, out);
        }
    }

    /// A holder releases a claim.
    pub(super) fn release(
        &mut self,
        context: &Context,
        from: Member,
        (key, grant): (ClaimKey, Grant),
        out: &mut Out,
    ) {
        if !self.steps.release(from, key, grant) {
            return;
        }
        let idle = self.stragglers.steal_answered(key, grant);
        self.stragglers.release(context, from, key, idle, out);
        if key.stage == Stage(0) {
            self.steps.close_open(from, key.step);
            self.grant(context, out);
        }
        if let Some(idle) = idle {
            self.steal(context, (key.step, key.stage), idle, out);
        }
        self.replays.replay_one(context, &self.steps, key, out);
    }

    /// Requests claims that other replicas have yet to begin, for a member with next to nothing left of a step
    /// at a stage.
    fn steal(&mut self, context: &Context, place: (Step, Stage), idle: Member, out: &mut Out) {
        self.stragglers.steal(context, &self.steps, place, idle, out);
    }

    /// Asks the holders of late claims for them. Returns a holder that does not answer, or never ends, with the cause;
    /// the caller removes it and calls again.
    pub(super) fn reclaim_late(
        &mut self,
        context: &Context,
        out: &mut Out,
    ) -> Option<(Member, LossCause)> {
        self.stragglers.reclaim_late(context, &self.steps, out)
    }

    /// Requests activations again whose receivers are gone.
    pub(super) fn replay(&mut self, context: &Context, out: &mut Out) {
        self.replays.replay(context, &self.steps, out);
    }

    /// Requests activations again when that is due.
    pub(super) fn replay_when_due(&mut self, context: &Context, out: &mut Out) {
        if self.replays.at().is_some_and(|at| context.now >= at) {
            self.replays.replay_unclaimed(context, &self.steps, out);
        }
    }

    /// Forgets a member's claims, before it reports its claims again.
    pub(super) fn forget_claims(&mut self, member: Member) {
        self.steps.forget_claims(member);
    }

    /// Takes a claim that an earlier coordinator granted. Returns whether it is possible; claims of committed
    /// steps are ignored.
    pub(super) fn restore(&mut self, context: &Context, from: Member, claim: &HeldClaim) -> bool {
        let step = claim.key.step;
        let version = context.progress.version;
        if step < version {
            return true;
        }
        let newest = Step(version.0 + context.config.manifest.steps_at_once());
        if step > newest || claim.grant.term >= context.progress.term {
            return false;
        }
        let hosts = context.members.current.hosts(from, claim.key.stage, step);
        self.open_ledger(context, step);
        let Some(ledger) = self.steps.ledger_mut(step) else { return false };
        let restored = hosts && ledger.restore(claim, from);
        if restored && claim.key.stage.0 == 0 && !claim.done {
            self.steps.restore_open(from, step);
        }
        restored
    }

    /// Watches all claims that an earlier coordinator granted.
    pub(super) fn watch_restored(&mut self, context: &Context) {
        for (_, ledger) in self.steps.ledgers() {
            for (key, holder, grant) in ledger.unfinished() {
                self.stragglers.watch(context, key, holder, grant);
            }
        }
    }

    /// Revokes a member's claims, except those of a step whose commit is being appended to the log.
    pub(super) fn expel(&mut self, member: Member, committing: Option<Step>) -> Revoked {
        self.stragglers.forget_member(member);
        self.steps.expel(member, committing)
    }

    /// A member hosts the first stage only until a step.
    pub(super) fn forget_requests_from(&mut self, member: Member, step: Step) {
        self.steps.forget_requests_from(member, step);
    }

    /// The present step's all-reduce took so long.
    pub(super) fn record_all_reduce(&mut self, took: Duration) {
        self.steps.record_all_reduce(took);
    }

    /// Forgets a committed step. Returns its statistics.
    pub(super) fn close_step(&mut self, step: Step) -> StepCounts {
        self.stragglers.forget_up_to(step);
        self.steps.close(step)
    }

    /// Forgets all open steps; measurements stay.
    pub(super) fn rewind(&mut self) {
        self.steps.rewind();
        self.stragglers.forget_work();
        self.replays.cancel();
    }
}
