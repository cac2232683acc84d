//! The open steps: their ledgers, and the choice of a replica for each microbatch of the first stage.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step, Term};
use shoal_protocol::message::{FixedLoss, Handover};
use shoal_protocol::units::Moment;

use super::stragglers::Preference;
use super::work_queue::{Standing, WorkQueue};
use crate::action::StepCounts;
use crate::coordinator::work::deadline::Estimate;
use crate::coordinator::work::ledger::{ClaimAnswer, DoneAnswer, Grants, Ledger, Revoked};
use crate::router::{Router, Routing, Turn, is_early};

/// Steps that one work request can name: those that can run and those whose work is granted before they end.
const STEPS: usize = 4;

/// The open steps and the requests for their work.
#[derive(Debug)]
pub(in super::super) struct OpenSteps {
    /// Of the steps that can run and, once the first of them is closing, of the one after.
    ledgers: BTreeMap<Step, Ledger>,
    requests: BTreeMap<Member, Request>,
    /// The replicas of the first stage that request work of each open step, or hold some.
    queues: BTreeMap<Step, WorkQueue>,
    router: Router,
    /// The time from a grant until its receiver confirms it.
    round_trips: Option<Estimate>,
    /// When microbatches were done at the second stage that are not done at the first.
    downstream_done: BTreeMap<(Step, Microbatch), Moment>,
    /// Numbers of this term's grants.
    grants: Grants,
    /// Statistics of the present step.
    counts: StepCounts,
}

/// The work that a replica of the first stage requests.
#[derive(Debug, Default)]
struct Request {
    /// Room for microbatches of each step beyond the grants up to `last_grant`.
    rooms: BTreeMap<Step, u32>,
    /// The newest grant that the replica has received.
    last_grant: Grant,
    /// Grants beyond `last_grant`, with their step and time.
    unconfirmed: BTreeMap<Grant, (Step, Moment)>,
    /// Microbatches of each step that are granted and not done.
    open: BTreeMap<Step, u64>,
    /// The replica's own estimate in nanoseconds per microbatch; 0 while it is not measured.
    service_time: u64,
}

impl Request {
    fn unmet(&self, step: Step) -> usize {
        let room = self.rooms.get(&step).copied().unwrap_or(0);
        let granted = self.unconfirmed.values().filter(|(of, _)| *of == step).count();
        (room as usize).saturating_sub(granted)
    }

    /// Microbatches granted and not done of this step and those before it, which run first.
    fn open_up_to(&self, step: Step) -> u64 {
        self.open.range(..=step).map(|(_, open)| open).sum()
    }

    /// The replica's entry in a step's queue.
    fn standing(&self, step: Step, (turn, service_time): Routed) -> Option<Standing> {
        let (wants, open) = (self.unmet(step) > 0, self.open_up_to(step));
        let turn = turn.filter(|_| wants);
        (wants || open > 0).then_some(Standing {
            service_time: service_time.unwrap_or(self.service_time),
            open,
            turn,
        })
    }
}

/// A member's turn, and its measured nanoseconds per microbatch, as the router has them.
type Routed = (Option<Turn>, Option<u64>);

fn routed(router: &Router, member: Member) -> Routed {
    (router.turn_of(member), router.believed(member))
}

impl OpenSteps {
    pub(super) fn new(term: Term, routing: Routing) -> Self {
        Self {
            ledgers: BTreeMap::new(),
            requests: BTreeMap::new(),
            queues: BTreeMap::new(),
            router: Router::by(routing, 0),
            round_trips: None,
            downstream_done: BTreeMap::new(),
            grants: Grants::of(term),
            counts: StepCounts::default(),
        }
    }

    /// The ledger of an open step.
    pub(super) fn ledger(&self, step: Step) -> Option<&Ledger> {
        self.ledgers.get(&step)
    }

    /// The ledgers of all open steps, in order.
    pub(super) fn ledgers(&self) -> impl DoubleEndedIterator<Item = (Step, &Ledger)> {
        self.ledgers.iter().map(|(step, ledger)| (*step, ledger))
    }

    /// Whether no step is open.
    pub(super) fn is_empty(&self) -> bool {
        self.ledgers.is_empty()
    }

    /// Sets the replicas of the first stage.
    pub(super) fn set_hosts(&mut self, members: impl IntoIterator<Item = Member>) {
        self.router.set_candidates(members);
        self.update_all();
    }

    /// Opens a step.
    pub(super) fn open(&mut self, step: Step, ledger: Ledger) {
        self.ledgers.insert(step, ledger);
        let Self { requests, queues, router, .. } = self;
        let queue = queues.entry(step).or_default();
        for (member, request) in requests {
            queue.set(*member, request.standing(step, routed(router, *member)));
        }
    }

    /// Revokes a member's claims, except those of a step whose commit is being appended to the log.
    pub(super) fn expel(&mut self, member: Member, committing: Option<Step>) -> Revoked {
        self.requests.remove(&member);
        self.update(member);
        let mut all = Revoked::default();
        for (step, ledger) in &mut self.ledgers {
            if committing != Some(*step) {
                let revoked = ledger.revoke(member);
                all.claims += revoked.claims;
                all.done += revoked.done;
            }
        }
        self.counts.replayed += all.claims;
        all
    }

    /// Takes a work request. It may be repeated or late: an older one changes nothing, and the room beyond
    /// the same grants only ever grows.
    pub(super) fn request(
        &mut self,
        member: Member,
        rooms: &[(Step, u32)],
        (last_grant, service_time): (Grant, u64),
        now: Moment,
    ) {
        self.router.measured(member, service_time);
        let request = self.requests.entry(member).or_default();
        request.service_time = service_time;
        if last_grant > request.last_grant {
            if let Some((_, granted)) = request.unconfirmed.get(&last_grant) {
                Estimate::note(&mut self.round_trips, now.since(*granted));
            }
            request.last_grant = last_grant;
            request.rooms.clear();
            request.unconfirmed.retain(|grant, _| *grant > last_grant);
        }
        if last_grant == request.last_grant {
            for (step, room) in rooms.iter().take(STEPS) {
                let known = request.rooms.entry(*step).or_insert(0);
                *known = (*known).max(*room);
            }
        }
        self.update(member);
    }

    /// Updates a member's entries in all queues.
    fn update(&mut self, member: Member) {
        let Self { requests, queues, router, .. } = self;
        let (request, routed) = (requests.get(&member), routed(router, member));
        for (step, queue) in queues {
            queue.set(member, request.and_then(|request| request.standing(*step, routed)));
        }
    }

    fn update_all(&mut self) {
        let all: Vec<Member> = self.requests.keys().copied().collect();
        all.into_iter().for_each(|member| self.update(member));
    }

    /// Whether all queues equal a recount from the requests.
    #[cfg(test)]
    pub(super) fn is_counted(&self) -> bool {
        let same = |(step, queue): (&Step, &WorkQueue)| {
            let router = &self.router;
            let all = self.requests.iter().filter_map(|(member, request)| {
                Some((*member, request.standing(*step, routed(router, *member))?))
            });
            self.ledgers.contains_key(step) && queue.is_of(all)
        };
        // With random routing there are no turns.
        let in_turn = self.router.routing() != Routing::AtRandom;
        self.ledgers.len() == self.queues.len() && (!in_turn || self.queues.iter().all(same))
    }

    /// The time that a round trip to a member takes at most, once one was measured.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trips.map(Estimate::late)
    }

    /// Grants the lowest free microbatch of a step to the best replica that requests work. A member that the
    /// microbatch was stolen for gets it even if another would finish sooner: that was weighed when it was
    /// stolen.
    pub(super) fn grant_one(
        &mut self,
        step: Step,
        now: Moment,
        preference: impl Fn(ClaimKey) -> Option<Preference>,
        hosts: impl Fn(Member) -> bool,
    ) -> Option<(Member, Microbatch, Grant)> {
        let Self { ledgers, requests, queues, router, grants, .. } = self;
        let (ledger, queue) = (ledgers.get_mut(&step)?, queues.get(&step)?);
        let microbatch = ledger.lowest_free()?;
        if queue.is_empty() {
            return None;
        }
        let key = ClaimKey { step, stage: Stage(0), microbatch };
        let (preferred, avoided) = match preference(key) {
            Some(Preference::For(member)) => (Some(member), None),
            Some(Preference::Not(member)) => (None, Some(member)),
            None => (None, None),
        };
        let preferred = preferred.filter(|member| queue.requests_more(*member) && hosts(*member));
        let able = |member: &Member| avoided != Some(*member) && hosts(*member);
        let member = match (preferred, router.routing()) {
            (Some(member), _) => router.choose_of(step, [member])?,
            (None, Routing::AtRandom) => router.choose_of(step, queue.members().filter(able))?,
            (None, routing) => {
                let limits = queue.limits(ledger.free(), routing);
                // Slow replicas are tried near the step's beginning.
                let early = limits.filter(|_| is_early(ledger.free(), ledger.microbatches()));
                let mut late = early.iter().flat_map(|limits| queue.late(*limits));
                let tried = late.find(|member| able(member) && router.may_try(step, *member));
                match tried {
                    Some(member) => router.tries(step, member),
                    None => router.choose_of(step, queue.first(limits, able))?,
                }
            }
        };
        let ClaimAnswer::Granted { grant, .. } = ledger.claim(key, member, grants) else {
            unreachable!("the microbatch was free");
        };
        let request = requests.get_mut(&member).expect("only members with a request are chosen");
        request.unconfirmed.insert(grant, (step, now));
        *request.open.entry(step).or_insert(0) += 1;
        self.update(member);
        Some((member, microbatch, grant))
    }

    /// Grants a claim of a later stage, or gives the reason why not. Claims of the first stage come with its work.
    pub(super) fn claim(&mut self, member: Member, key: ClaimKey) -> ClaimAnswer {
        match self.ledgers.get_mut(&key.step) {
            Some(ledger) if key.stage > Stage(0) => ledger.claim(key, member, &mut self.grants),
            _ => ClaimAnswer::NotOpen,
        }
    }

    /// The number of claims that members hold.
    pub(super) fn held(&self) -> u64 {
        self.ledgers.values().map(Ledger::held).sum()
    }

    /// An open step's ledger, to restore claims in.
    pub(super) fn ledger_mut(&mut self, step: Step) -> Option<&mut Ledger> {
        self.ledgers.get_mut(&step)
    }

    /// Counts a microbatch of the first stage that an earlier coordinator granted to a member.
    pub(super) fn restore_open(&mut self, member: Member, step: Step) {
        *self.requests.entry(member).or_default().open.entry(step).or_insert(0) += 1;
        self.update(member);
    }

    /// Forgets a member's claims and request, before it reports its claims again.
    pub(super) fn forget_claims(&mut self, member: Member) {
        self.requests.remove(&member);
        self.update(member);
        for ledger in self.ledgers.values_mut() {
            ledger.revoke(member);
        }
    }

    /// Takes the report that a microbatch is done at a stage. For the first stage, the time since the second
    /// stage's report outweighs the replica's own estimate.
    pub(super) fn done(
        &mut self,
        member: Member,
        key: ClaimKey,
        grant: Grant,
        done: (Option<FixedLoss>, Handover),
        now: Moment,
    ) -> DoneAnswer {
        let ledger = self.ledgers.get_mut(&key.step);
        let answer =
            ledger.map_or(DoneAnswer::Refused, |ledger| ledger.done(key, member, grant, done));
        match answer {
            DoneAnswer::Repeated => self.counts.repeated += 1,
            DoneAnswer::Noted => self.measure(member, key, now),
            DoneAnswer::Refused => {}
        }
        answer
    }

    fn measure(&mut self, member: Member, key: ClaimKey, now: Moment) {
        let place = (key.step, key.microbatch);
        match key.stage {
            Stage(0) => {
                let ready = self.downstream_done.remove(&place);
                if ready.is_some_and(|ready| self.router.answered(member, ready, now)) {
                    self.update_all();
                }
                self.close_open(member, key.step);
            }
            Stage(1) => drop(self.downstream_done.insert(place, now)),
            _ => {}
        }
    }

    /// Takes back a claim that its holder releases. Returns whether it held the claim.
    pub(super) fn release(&mut self, member: Member, key: ClaimKey, grant: Grant) -> bool {
        let ledger = self.ledgers.get_mut(&key.step);
        ledger.is_some_and(|ledger| ledger.release(key, member, grant))
    }

    /// A microbatch of the first stage is done, or released.
    pub(super) fn close_open(&mut self, member: Member, step: Step) {
        let request = self.requests.get_mut(&member);
        if let Some(open) = request.and_then(|request| request.open.get_mut(&step)) {
            *open -= 1;
            self.update(member);
        }
    }

    /// Forgets all open steps. The numbers of later grants are higher than those of all before.
    pub(super) fn rewind(&mut self) {
        self.ledgers.clear();
        self.requests.clear();
        self.queues.clear();
        self.downstream_done.clear();
        self.router.set_candidates([]);
    }

    /// A member hosts the first stage only until a step.
    pub(super) fn forget_requests_from(&mut self, member: Member, step: Step) {
        if let Some(request) = self.requests.get_mut(&member) {
            request.rooms.retain(|of, _| *of < step);
        }
        self.update(member);
    }

    /// The present step's all-reduce took so long.
    pub(super) fn record_all_reduce(&mut self, took: Duration) {
        self.counts.all_reduce = took;
    }

    /// Forgets a committed step. Returns its statistics.
    pub(super) fn close(&mut self, step: Step) -> StepCounts {
        self.ledgers.remove(&step);
        self.queues.remove(&step);
        self.downstream_done.retain(|(of, _), _| *of > step);
        let mut held_some = Vec::new();
        for (member, request) in &mut self.requests {
            held_some.extend((request.open_up_to(step) > 0).then_some(*member));
            request.rooms.retain(|of, _| *of > step);
            request.open.retain(|of, _| *of > step);
        }
        held_some.into_iter().for_each(|member| self.update(member));
        std::mem::take(&mut self.counts)
    }
}
