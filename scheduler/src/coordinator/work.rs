//! Open steps: giving out the first stage's microbatches, claims, reports.
//!
//! The work of a step is given out while the all-reduce of the one before is still on, so that
//! offers, acceptances and claims have made their ways when the weights are there to be used.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_protocol::ids::{ClaimKey, Grant, Member, Microbatch, Stage, Step, Term};
use shoal_protocol::message::{FixedLoss, FromCoordinator, PassTimes};
use shoal_protocol::units::Moment;

use super::stragglers::Preference;
use super::wanting::{Standing, Wanting};
use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorEvent, StepBooks};
use crate::deadline::Estimate;
use crate::ledger::{ClaimAnswer, DoneAnswer, Grants, Ledger, Revoked};
use crate::router::{Router, Routing, Turn, is_early};

/// Steps that one wish can be about: those that can run and those that are given out before they end.
const STEPS: usize = 4;

/// The open steps and who wants to work on them.
#[derive(Debug)]
pub(super) struct Work {
    /// Of the steps that can run and, once the first of them is closed, of the one after.
    pub(super) ledgers: BTreeMap<Step, Ledger>,
    wishes: BTreeMap<Member, Wish>,
    /// Who wants some of each of these steps, or has some.
    wanting: BTreeMap<Step, Wanting>,
    router: Router,
    /// How long it took from when work was given until its receiver said that it has it.
    round_trips: Option<Estimate>,
    /// When microbatches of open steps were done at the second stage that are not at the first.
    ready: BTreeMap<(Step, Microbatch), Moment>,
    /// Numbers of this term's grants.
    grants: Grants,
    /// What befell the present step's work.
    pub(super) books: StepBooks,
}

/// What a replica of the first stage wants.
#[derive(Debug, Default)]
struct Wish {
    /// Room for microbatches of each step beyond the grants up to `through`.
    rooms: BTreeMap<Step, u32>,
    through: Grant,
    /// Grants beyond `through`, of which step they are, and when they were given.
    given: BTreeMap<Grant, (Step, Moment)>,
    /// Microbatches of each step that are given and not done.
    open: BTreeMap<Step, u64>,
    /// Nanoseconds that it says that it needs for one; 0 while it is not measured.
    service_time: u64,
}

impl Wish {
    fn unmet(&self, step: Step) -> usize {
        let room = self.rooms.get(&step).copied().unwrap_or(0);
        let given = self.given.values().filter(|(of, _)| *of == step).count();
        (room as usize).saturating_sub(given)
    }

    /// Microbatches given and not done that are in the way of this step's: later ones wait for its
    /// end.
    fn open_through(&self, step: Step) -> u64 {
        self.open.range(..=step).map(|(_, open)| open).sum()
    }

    /// What its member is to a step, by what is known of it.
    fn standing(&self, step: Step, (turn, service_time): Known) -> Option<Standing> {
        let (wants, open) = (self.unmet(step) > 0, self.open_through(step));
        let turn = turn.filter(|_| wants);
        (wants || open > 0).then_some(Standing {
            service_time: service_time.unwrap_or(self.service_time),
            open,
            turn,
        })
    }
}

/// When it is a member's turn, and how many nanoseconds it is believed to need for a microbatch.
type Known = (Option<Turn>, Option<u64>);

fn known(router: &Router, member: Member) -> Known {
    (router.turn_of(member), router.believed(member))
}

impl Work {
    pub(super) fn new(term: Term, routing: Routing) -> Self {
        Self {
            ledgers: BTreeMap::new(),
            wishes: BTreeMap::new(),
            wanting: BTreeMap::new(),
            router: Router::by(routing, 0),
            round_trips: None,
            ready: BTreeMap::new(),
            grants: Grants::of(term),
            books: StepBooks::default(),
        }
    }

    /// The replicas of the first stage.
    pub(super) fn set_givers(&mut self, members: impl IntoIterator<Item = Member>) {
        self.router.set_candidates(members);
        self.note_all();
    }

    /// What anybody wants may be something else now.
    fn note_all(&mut self) {
        let all: Vec<Member> = self.wishes.keys().copied().collect();
        all.into_iter().for_each(|member| self.note(member));
    }

    /// A step's work can be given out.
    fn open(&mut self, step: Step, ledger: Ledger) {
        self.ledgers.insert(step, ledger);
        let Self { wishes, wanting, router, .. } = self;
        let wanting = wanting.entry(step).or_default();
        for (member, wish) in wishes {
            wanting.set(*member, wish.standing(step, known(router, *member)));
        }
    }

    /// A member is gone: its claims are nobody's again, but for those of a step whose last word is
    /// on its way into the log.
    pub(super) fn expel(&mut self, member: Member, committing: Option<Step>) -> Revoked {
        self.wishes.remove(&member);
        self.note(member);
        let mut all = Revoked::default();
        for (step, ledger) in &mut self.ledgers {
            if committing != Some(*step) {
                let revoked = ledger.revoke(member);
                all.claims += revoked.claims;
                all.done += revoked.done;
            }
        }
        self.books.replayed += all.claims;
        all
    }

    /// Takes in a wish. It may come again or late: an older one changes nothing, and room beyond
    /// the same grants only ever grows.
    pub(super) fn wanted(
        &mut self,
        member: Member,
        rooms: &[(Step, u32)],
        (through, service_time): (Grant, u64),
        now: Moment,
    ) {
        self.router.measured(member, service_time);
        let wish = self.wishes.entry(member).or_default();
        wish.service_time = service_time;
        if through > wish.through {
            if let Some((_, given)) = wish.given.get(&through) {
                Estimate::note(&mut self.round_trips, now.since(*given));
            }
            wish.through = through;
            wish.rooms.clear();
            wish.given.retain(|grant, _| *grant > through);
        }
        if through == wish.through {
            for (step, room) in rooms.iter().take(STEPS) {
                let known = wish.rooms.entry(*step).or_insert(0);
                *known = (*known).max(*room);
            }
        }
        self.note(member);
    }

    /// What a member wants, or has, may be something else now.
    fn note(&mut self, member: Member) {
        let Self { wishes, wanting, router, .. } = self;
        let (wish, known) = (wishes.get(&member), known(router, member));
        for (step, wanting) in wanting {
            wanting.set(member, wish.and_then(|wish| wish.standing(*step, known)));
        }
    }

    /// Whether what is kept of who wants what is what wishes say.
    #[cfg(test)]
    pub(super) fn is_counted(&self) -> bool {
        let same = |(step, wanting): (&Step, &Wanting)| {
            let router = &self.router;
            let all = self.wishes.iter().filter_map(|(member, wish)| {
                Some((*member, wish.standing(*step, known(router, *member))?))
            });
            self.ledgers.contains_key(step) && wanting.is_of(all)
        };
        // Where chance decides there are no turns.
        let in_turn = self.router.routing() != Routing::AtRandom;
        self.ledgers.len() == self.wanting.len() && (!in_turn || self.wanting.iter().all(same))
    }

    /// What a round trip to a member takes at most, as far as is known.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.round_trips.map(Estimate::late)
    }

    /// Gives the lowest free microbatch of a step to who should have it, if anybody wants it: for whose
    /// relief it was let go of just now though another would be done sooner, since that was weighed when
    /// it was asked for.
    fn give_one(
        &mut self,
        step: Step,
        now: Moment,
        prefers: impl Fn(ClaimKey) -> Option<Preference>,
        hosts: impl Fn(Member) -> bool,
    ) -> Option<(Member, Microbatch, Grant)> {
        let Self { ledgers, wishes, wanting, router, grants, .. } = self;
        let (ledger, wanting) = (ledgers.get_mut(&step)?, wanting.get(&step)?);
        let microbatch = ledger.lowest_free()?;
        if wanting.is_empty() {
            return None;
        }
        let key = ClaimKey { step, stage: Stage(0), microbatch };
        let (meant, avoided) = match prefers(key) {
            Some(Preference::For(member)) => (Some(member), None),
            Some(Preference::Not(member)) => (None, Some(member)),
            None => (None, None),
        };
        let meant = meant.filter(|member| wanting.wants(*member) && hosts(*member));
        let able = |member: &Member| avoided != Some(*member) && hosts(*member);
        let member = match (meant, router.routing()) {
            (Some(member), _) => router.choose_of(step, [member])?,
            (None, Routing::AtRandom) => router.choose_of(step, wanting.members().filter(able))?,
            (None, routing) => {
                let limits = wanting.limits(ledger.free(), routing);
                // Near the step's beginning.
                let early = limits.filter(|_| is_early(ledger.free(), ledger.all()));
                let mut late = early.iter().flat_map(|limits| wanting.late(*limits));
                let tried = late.find(|member| able(member) && router.may_try(step, *member));
                match tried {
                    Some(member) => router.tries(step, member),
                    None => router.choose_of(step, wanting.first(limits, able))?,
                }
            }
        };
        let ClaimAnswer::Granted { grant, .. } = ledger.claim(key, member, grants) else {
            unreachable!("the microbatch was free");
        };
        let wish = wishes.get_mut(&member).expect("it wants work");
        wish.given.insert(grant, (step, now));
        *wish.open.entry(step).or_insert(0) += 1;
        self.note(member);
        Some((member, microbatch, grant))
    }

    /// Claims that members hold.
    pub(super) fn held(&self) -> u64 {
        self.ledgers.values().map(Ledger::held).sum()
    }

    /// A member was given a microbatch of the first stage by an earlier coordinator.
    pub(super) fn holds(&mut self, member: Member, step: Step) {
        *self.wishes.entry(member).or_default().open.entry(step).or_insert(0) += 1;
        self.note(member);
    }

    /// A member says anew what it holds.
    pub(super) fn forget_claims(&mut self, member: Member) {
        self.wishes.remove(&member);
        self.note(member);
        for ledger in self.ledgers.values_mut() {
            ledger.revoke(member);
        }
    }

    /// A microbatch is done at a stage. Of who did it at the first one it is seen how long it took from when
    /// it had what it needed, the gradient from the next: that outweighs what it claims.
    fn done(&mut self, member: Member, key: ClaimKey, now: Moment) {
        let place = (key.step, key.microbatch);
        match key.stage {
            Stage(0) => {
                let ready = self.ready.remove(&place);
                if ready.is_some_and(|ready| self.router.answered(member, ready, now)) {
                    self.note_all();
                }
                self.let_go(member, key.step);
            }
            Stage(1) => drop(self.ready.insert(place, now)),
            _ => {}
        }
    }

    /// A microbatch of the first stage is done, or let go of.
    pub(super) fn let_go(&mut self, member: Member, step: Step) {
        let wish = self.wishes.get_mut(&member);
        if let Some(open) = wish.and_then(|wish| wish.open.get_mut(&step)) {
            *open -= 1;
            self.note(member);
        }
    }

    /// Forgets every open step. What was granted is behind the numbers that are still to come.
    pub(super) fn begin_again(&mut self) {
        self.ledgers.clear();
        self.wishes.clear();
        self.wanting.clear();
        self.ready.clear();
        self.router.set_candidates([]);
    }

    /// A member hosts the first stage only until a step.
    pub(super) fn forget_wishes_from(&mut self, member: Member, step: Step) {
        if let Some(wish) = self.wishes.get_mut(&member) {
            wish.rooms.retain(|of, _| *of < step);
        }
        self.note(member);
    }

    /// Takes a committed step's books away.
    pub(super) fn close_books(&mut self, step: Step) -> StepBooks {
        self.ledgers.remove(&step);
        self.wanting.remove(&step);
        self.ready.retain(|(of, _), _| *of > step);
        let mut had_some = Vec::new();
        for (member, wish) in &mut self.wishes {
            had_some.extend((wish.open_through(step) > 0).then_some(*member));
            wish.rooms.retain(|of, _| *of > step);
            wish.open.retain(|of, _| *of > step);
        }
        had_some.into_iter().for_each(|member| self.note(member));
        std::mem::take(&mut self.books)
    }
}

impl Coordinator {
    /// Gives out the work of so many steps, the one that is not committed yet the first of them. The
    /// passes of the last may wait for weights.
    pub(super) fn announce_steps(&mut self, steps: u64, out: &mut Out) {
        for ahead in 0..steps {
            self.open_books(Step(self.version.0 + ahead));
        }
        self.give_out(out);
    }

    /// Whether a step's passes can run: what it reads is committed.
    pub(super) fn has_weights_of(&self, step: Step) -> bool {
        self.config.manifest.reads(step) <= self.version
    }

    /// Gives the first stage's work to those who host it, or are about to.
    pub(super) fn set_givers(&mut self) {
        let first = Stage(0);
        let steps = self.version.0..=self.version.0 + self.config.manifest.steps_at_once();
        let hosts =
            |member| steps.clone().any(|step| self.membership.hosts(member, first, Step(step)));
        let givers = self.logged(true, hosts);
        self.work.set_givers(givers);
    }

    /// The first step after the present one of which a member has counted nothing, nor of any later one.
    pub(super) fn first_not_counted_by(&self, member: Member) -> Step {
        let mut ledgers = self.work.ledgers.iter().rev();
        let counted = ledgers.find(|(_, ledger)| ledger.has_counted(member));
        counted.map_or(Step(0), |(step, _)| step.next()).max(self.version.next())
    }

    /// Opens a step's ledger, if there is such a step and it is not open.
    pub(super) fn open_books(&mut self, step: Step) {
        let manifest = &self.config.manifest;
        if step.0 >= manifest.training.steps || self.work.ledgers.contains_key(&step) {
            return;
        }
        let microbatches = manifest.microbatches_of(step.0);
        let training = &manifest.training;
        let ledger = Ledger::open(step, training.stages, training.microbatches, microbatches);
        self.work.open(step, ledger);
        self.replay_at.get_or_insert(self.now + self.config.retry);
    }

    /// The weights that a step reads are there.
    pub(super) fn open_step(&mut self, out: &mut Out) {
        self.announce_steps(self.config.manifest.steps_at_once(), out);
        self.phase = Phase::Open;
        self.begun = true;
        event(CoordinatorEvent::Opened { step: self.version }, out);
    }

    /// Gives out the first stage's microbatches to those who want them, in proportion to their
    /// speed, the oldest step's first.
    pub(super) fn give_out(&mut self, out: &mut Out) {
        if self.is_suspended() {
            return;
        }
        let steps: Vec<Step> = self.work.ledgers.keys().copied().collect();
        for step in steps {
            let mut given: BTreeMap<Member, Vec<(Microbatch, Grant)>> = BTreeMap::new();
            let Self { work, stragglers, now, membership, .. } = self;
            let prefers = |key| stragglers.prefers(key, *now);
            let hosts = |member| membership.hosts(member, Stage(0), step);
            while let Some((member, microbatch, grant)) = work.give_one(step, *now, prefers, hosts)
            {
                given.entry(member).or_default().push((microbatch, grant));
            }
            for (member, grants) in given {
                for (microbatch, grant) in &grants {
                    let key = ClaimKey { step, stage: Stage(0), microbatch: *microbatch };
                    self.watch(key, member, *grant);
                }
                send(member, FromCoordinator::Work { step, grants }, out);
            }
        }
    }

    /// A member wants work of steps that it hosts the first stage in.
    pub(super) fn wanted(
        &mut self,
        from: Member,
        rooms: &[(Step, u32)],
        through: Grant,
        service_time: u64,
        out: &mut Out,
    ) {
        let hosts = |(step, _): &&(Step, u32)| self.membership.hosts(from, Stage(0), *step);
        let rooms: Vec<(Step, u32)> = rooms.iter().filter(hosts).copied().collect();
        if !rooms.is_empty() {
            self.work.wanted(from, &rooms, (through, service_time), self.now);
            self.give_out(out);
        }
    }

    /// A member asks for a claim.
    pub(super) fn claimed(&mut self, from: Member, key: ClaimKey, out: &mut Out) {
        if self.membership.hosts(from, key.stage, key.step) {
            self.claim(from, key, out);
        } else if self.membership.is_leaving(from, key.stage) {
            // It does not know yet.
            send(from, FromCoordinator::NotOpen { key }, out);
        } else {
            event(CoordinatorEvent::ClaimRefused { member: from, key }, out);
        }
    }

    fn claim(&mut self, from: Member, key: ClaimKey, out: &mut Out) {
        let Work { ledgers, grants, .. } = &mut self.work;
        let answer = match ledgers.get_mut(&key.step) {
            // The first stage's claims come with the work and are not asked for.
            Some(ledger) if key.stage > Stage(0) => ledger.claim(key, from, grants),
            _ => ClaimAnswer::NotOpen,
        };
        let message = match answer {
            ClaimAnswer::Granted { grant, next_holder } => {
                self.watch(key, from, grant);
                FromCoordinator::Granted { key, grant, next_holder }
            }
            ClaimAnswer::Held { holder } => FromCoordinator::Held { key, holder },
            ClaimAnswer::NotOpen => FromCoordinator::NotOpen { key },
        };
        send(from, message, out);
    }

    pub(super) fn done(
        &mut self,
        from: Member,
        key: ClaimKey,
        grant: Grant,
        (loss, pass_times): (Option<FixedLoss>, PassTimes),
        out: &mut Out,
    ) {
        // Who leaves a stage lets go of what it had of later steps, done or not.
        let hosts = self.membership.hosts(from, key.stage, key.step);
        let answer = match self.work.ledgers.get_mut(&key.step).filter(|_| hosts) {
            Some(ledger) => ledger.done(key, from, grant, loss),
            None => DoneAnswer::Refused,
        };
        // A report of a step that is committed was taken in before that: only its answer is late.
        let committed = key.step < self.version;
        if answer == DoneAnswer::Repeated {
            self.work.books.repeated += 1;
        }
        if answer == DoneAnswer::Noted {
            self.learn(from, key, pass_times);
            self.work.done(from, key, self.now);
            self.relieve(key.step, key.stage, from, out);
        }
        if answer != DoneAnswer::Refused || committed {
            send(from, FromCoordinator::Noted { key, grant }, out);
        } else if !self.membership.is_leaving(from, key.stage) {
            event(CoordinatorEvent::ClaimRefused { member: from, key }, out);
        }
        if answer == DoneAnswer::Noted {
            self.close_when_complete(out);
        }
    }
}
