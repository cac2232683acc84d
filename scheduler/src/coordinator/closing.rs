//! The end of a step: all-reduce and commit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::ids::{Attempt, Era, Member, Mend, Microbatch, Stage, Step, Term};
use shoal_protocol::message::{
    CommitRecord, FixedLoss, FromCoordinator, LogRecord, Mended, Round, RoundGroup,
    RoundGroupChange, RoundGroupMember, RoundId, RoundOutcome, proof_of_all,
};
use shoal_protocol::units::{Moment, Rate};

use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent};
use crate::deadline::Estimate;
use crate::ledger::Ledger;
use crate::paging;
use crate::round::{NumberBytes, averaged, member_rates, place_in, weights};

/// How often the patience with a round doubles, at most.
const DOUBLINGS: u32 = 6;

/// No round is tried again sooner than this, however fast those before it were, unless it is said to
/// be impatient.
const LEAST_PATIENCE: Duration = Duration::from_secs(10);

/// The rounds of the present step.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    open: BTreeMap<Stage, OpenRound>,
    /// When the step was closed last.
    closed: Moment,
    /// Tries that came to nothing.
    failed: BTreeMap<Stage, u32>,
    /// How often patience ended. Deaths say nothing of how long a round takes.
    late: u32,
    /// When what is still missing is tried again.
    patience: Option<Moment>,
}

#[derive(Debug)]
struct OpenRound {
    round: Round,
    /// The sum of the tags of the whole batch.
    proof: u64,
    /// What its members' accumulators hold, as they were told.
    counted: BTreeMap<Member, Vec<Microbatch>>,
    /// What its members came to.
    outcomes: BTreeMap<Member, RoundOutcome>,
    /// A member is gone: the round is mended once others have done what that had counted.
    torn: bool,
}

impl OpenRound {
    fn is_whole(&self) -> bool {
        self.outcomes.len() == self.round.group.members.len()
    }

    /// The word that closes the step at this stage, for one who takes part.
    fn close(&self, to: Member, group: RoundGroupChange) -> FromCoordinator {
        let (round, mended) = (self.round.id, self.round.mended.clone());
        let counted = self.counted.get(&to).cloned().unwrap_or_default();
        FromCoordinator::Close { round, group, mended, counted }
    }

    /// Whether somebody is a member of it.
    fn is_among(&self, member: Member) -> bool {
        place_in(&self.round, member).is_some()
    }
}

impl Rounds {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// When the rounds that are not whole are tried again.
    pub(super) fn patience(&self) -> Option<Moment> {
        self.patience
    }

    /// Gives up the rounds that `broken` says; returns how many there were.
    fn fail(&mut self, broken: impl Fn(&OpenRound) -> bool) -> usize {
        let Self { open, failed, .. } = self;
        let before = open.len();
        open.retain(|stage, round| {
            let fails = broken(round);
            *failed.entry(*stage).or_insert(0) += u32::from(fails);
            !fails
        });
        before - open.len()
    }

    /// Whether a stage's round is on, and nobody in it is gone.
    fn is_on(&self, stage: Stage) -> bool {
        self.open.get(&stage).is_some_and(|open| !open.torn)
    }
}

impl Coordinator {
    /// Closes each stage at which everything is done, if everybody who did it is there: the later
    /// stages' rounds take the time in which the earlier ones still work. The step is closed when all its
    /// stages are. Rounds that a death left untouched go on, and those that it tore are mended.
    pub(super) fn close_when_complete(&mut self, out: &mut Out) {
        let Some(ledger) = self.work.ledgers.get(&self.version) else { return };
        if !matches!(self.phase, Phase::Open) {
            return;
        }
        let is_undone = |stage: &Stage| ledger.undone(*stage) > 0;
        let last_undone = self.config.manifest.stages().filter(is_undone).last();
        let is_due = |stage: &Stage| !is_undone(stage) && !self.rounds.is_on(*stage);
        let due: Vec<Stage> = self.config.manifest.stages().filter(is_due).collect();
        let at_last = |stage| stage == Stage(0) && self.is_at_last_passes(ledger);
        let is_ending = last_undone.is_none_or(at_last);
        if (due.is_empty() && !is_ending) || self.is_expelling() {
            return;
        }
        for stage in due {
            self.close_stage(stage, out);
        }
        if is_ending {
            // When the next step's weights are there, the offers of its work have found their takers. Sooner it
            // would go to replicas whose pace is not known yet.
            self.announce_steps(self.config.manifest.steps_at_once() + 1, out);
        }
        if last_undone.is_none() {
            self.close_step(out);
        }
    }

    /// Whether each of the first stage's replicas has, in the mean, no more than its last pass to run.
    fn is_at_last_passes(&self, ledger: &Ledger) -> bool {
        let replicas = self.round_groups.get(&Stage(0)).map_or(0, |group| group.members.len());
        ledger.free() == 0 && ledger.undone(Stage(0)) as usize <= replicas
    }

    /// Every replica of a stage hears what its accumulator must hold.
    fn close_stage(&mut self, stage: Stage, out: &mut Out) {
        let before = self.round_groups.get(&stage).cloned().unwrap_or_default();
        let mended = self.rounds.open.remove(&stage).map(|torn| self.mended(torn));
        let open = match mended {
            None => self.new_round(stage, &before),
            Some(Some(open)) => {
                let gone = before.members.len() - open.round.group.members.len();
                let (round, changed) = (open.round.id, open.round.mended.changed.len());
                event(CoordinatorEvent::RoundMended { round, gone, changed }, out);
                open
            }
            Some(None) => {
                *self.rounds.failed.entry(stage).or_insert(0) += 1;
                let (step, rounds) = (self.version, 1);
                event(CoordinatorEvent::RoundsAborted { step, rounds, late: false }, out);
                self.new_round(stage, &before)
            }
        };
        self.tell_round(&open, &before, out);
        self.round_groups.insert(stage, Arc::clone(&open.round.group));
        self.rounds.open.insert(stage, open);
    }

    /// A round of the present step at a stage, from its beginning.
    fn new_round(&self, stage: Stage, before: &Arc<RoundGroup>) -> OpenRound {
        let step = self.version;
        let failed = self.rounds.failed.get(&stage).copied().unwrap_or(0);
        let (era, term, attempt) = (self.era, self.term, Attempt(failed));
        let id = RoundId { era, term, step, stage, attempt };
        let group = self.next_round_group(before, stage, step);
        OpenRound {
            round: Round { id, group, mended: Mended::default() },
            proof: proof_of_all(step, stage, self.config.manifest.training.microbatches),
            counted: self.accumulated(id),
            outcomes: BTreeMap::new(),
            torn: false,
        }
    }

    /// A torn round among those who are left of it; none where another has counted something meanwhile, which it
    /// has no part for.
    fn mended(&self, torn: OpenRound) -> Option<OpenRound> {
        let RoundId { step, stage, .. } = torn.round.id;
        let before = &torn.round.group;
        let counted = self.accumulated(torn.round.id);
        let replicas: BTreeSet<Member> = self.replicas_at(stage, step).into_iter().collect();
        // Who listened and serves by now has no other way to this result.
        let hear: BTreeSet<Member> = self.listeners_at(stage, step).into_iter().collect();
        let is_left = |one: &RoundGroupMember| match one.weight {
            Some(_) => replicas.contains(&one.member),
            None => replicas.contains(&one.member) || hear.contains(&one.member),
        };
        let group =
            self.numbered(before, RoundGroup::of(before.number, before.all().filter(is_left)));
        let places = (0..).zip(&group.members);
        let is_changed = |member| torn.counted.get(member) != counted.get(member);
        let changed = places.filter_map(|(place, part)| is_changed(&part.member).then_some(place));
        let mended = Mended { mend: torn.round.mended.mend.next(), changed: changed.collect() };
        let round = Round { id: torn.round.id, group, mended };
        let mended = OpenRound { round, counted, torn: false, ..torn };
        let is_whole = mended.counted.keys().all(|member| mended.is_among(*member));
        (is_whole && !mended.round.group.members.is_empty()).then_some(mended)
    }

    /// Everything is done.
    fn close_step(&mut self, out: &mut Out) {
        self.rounds.closed = self.now;
        let doublings = self.rounds.late.min(DOUBLINGS);
        self.rounds.patience = Some(self.now + self.round_patience() * (1 << doublings));
        self.phase = Phase::Closing;
        self.commit_when_reduced(out);
    }

    /// Whom a stage's next round is among: the same ones as its last, if they still are.
    fn next_round_group(
        &self,
        before: &Arc<RoundGroup>,
        stage: Stage,
        step: Step,
    ) -> Arc<RoundGroup> {
        let members = self.replicas_at(stage, step);
        let weights = self.round_weights(&members, before);
        let parts = members.into_iter().zip(weights);
        let parts = parts.map(|(member, weight)| RoundGroupMember { member, weight: Some(weight) });
        let listeners = self.listeners_at(stage, step).into_iter();
        let listeners = listeners.map(|member| RoundGroupMember { member, weight: None });
        self.numbered(before, RoundGroup::of(before.number, parts.chain(listeners)))
    }

    /// The same crew as before, or another under the next number.
    fn numbered(&self, before: &Arc<RoundGroup>, group: RoundGroup) -> Arc<RoundGroup> {
        if group == **before {
            return Arc::clone(before);
        }
        // Those of another term had other numbers.
        let number = before.number.max(self.term.0 << 32) + 1;
        RoundGroup { number, ..group }.into()
    }

    /// Tells everybody in a round of it: who knows the crew before, what is another in this one.
    fn tell_round(&self, open: &OpenRound, before: &RoundGroup, out: &mut Out) {
        let group = &open.round.group;
        let change = before.change_to(group);
        let told: BTreeSet<Member> = before.all().map(|one| one.member).collect();
        let small = change.gone.len() + change.here.len() <= paging::CHANGED;
        for RoundGroupMember { member, .. } in group.all() {
            if small && told.contains(&member) {
                send(member, open.close(member, change.clone()), out);
            } else {
                tell_whole_round(open, member, out);
            }
        }
    }

    /// What each replica's accumulator must hold in a round.
    fn accumulated(&self, id: RoundId) -> BTreeMap<Member, Vec<Microbatch>> {
        self.work.ledgers.get(&id.step).map(|ledger| ledger.counted(id.stage)).unwrap_or_default()
    }

    /// A member does not know whom a round is among that it is in.
    pub(super) fn round_group_requested(&mut self, from: Member, id: RoundId, out: &mut Out) {
        let open = self.rounds.open.get(&id.stage).filter(|open| open.round.id == id);
        if let Some(open) = open.filter(|open| open.round.group.all().any(|one| one.member == from))
        {
            tell_whole_round(open, from, out);
        }
    }

    /// A round that is on, or whose results are on their way into the log.
    pub(crate) fn round(&self, id: RoundId) -> Option<&Round> {
        let open = self.rounds.open.get(&id.stage).map(|open| &open.round);
        open.filter(|round| round.id == id)
    }

    /// How much of the vector each replica of a stage reduces, from what the links between them were
    /// measured to carry in rounds of the crew before.
    fn round_weights(&self, members: &[Member], before: &RoundGroup) -> Vec<u32> {
        let known: BTreeMap<Member, u32> =
            before.members.iter().map(|part| (part.member, part.weight)).collect();
        let known: Vec<Option<u32>> =
            members.iter().map(|member| known.get(member).copied()).collect();
        let rate = |from: usize, to: usize| {
            let rate = self.link_rates.get(&(members[from], members[to]))?;
            Some(rate.0 as f64)
        };
        let bytes = NumberBytes::of(self.config.manifest.codec.all_reduce);
        weights(&member_rates(&known, bytes, rate), bytes)
    }

    /// After how long rounds are tried again: as the rounds before took, or as long as may be while
    /// there were none.
    fn round_patience(&self) -> Duration {
        let measured = self.round_times.map(|times| times.late().max(LEAST_PATIENCE));
        measured.map_or(self.config.patience, |late| late.min(self.config.patience))
    }

    /// A member holds a result. When all do, and the same, the step's last word goes into the log.
    pub(super) fn reduced(
        &mut self,
        from: Member,
        (round, mend): (RoundId, Mend),
        outcome: RoundOutcome,
        rates: &[(u16, Rate)],
        out: &mut Out,
    ) {
        let Some(open) = self.rounds.open.get_mut(&round.stage) else { return };
        let is_as_told = open.round.id == round && open.round.mended.mend == mend && !open.torn;
        if !is_as_told || !open.is_among(from) {
            return;
        }
        for (place, rate) in rates {
            if let Some(to) = open.round.group.members.get(usize::from(*place)) {
                let known = self.link_rates.entry((from, to.member)).or_insert(*rate);
                *known = averaged(*known, *rate);
            }
        }
        if outcome.proof != open.proof {
            let reason = format!(
                "{from} proves {:#018x} instead of {:#018x} for step {}, stage {}: a microbatch \
                 was lost or counted twice",
                outcome.proof, open.proof, round.step, round.stage
            );
            return self.stop(reason, out);
        }
        // Those that are here are equal.
        let differs = open.outcomes.values().next().is_some_and(|one| !equal_bits(one, &outcome));
        if differs {
            let reason = format!(
                "the replicas of stage {} came to different results in step {}",
                round.stage, round.step
            );
            return self.stop(reason, out);
        }
        open.outcomes.insert(from, outcome);
        self.commit_when_reduced(out);
    }

    fn commit_when_reduced(&mut self, out: &mut Out) {
        let whole = self.rounds.open.values().all(OpenRound::is_whole);
        if whole && matches!(self.phase, Phase::Closing) {
            let (loss, held_out_loss) = self.work.ledgers[&self.version].losses();
            let record =
                commit_record(&self.rounds, self.era, self.term, self.version, loss, held_out_loss);
            self.phase = Phase::Committing;
            self.rounds.patience = None;
            let took = self.now.since(self.rounds.closed);
            let mut rounds = self.rounds.open.values();
            // What is left of a mended round says little of how long one takes.
            if rounds.all(|open| open.round.mended.mend == Mend(0)) {
                Estimate::note(&mut self.round_times, took);
            }
            self.work.books.all_reduce = took;
            out.push(CoordinatorAction::Append(LogRecord::Commit(record)));
        }
    }

    /// A member refuses a round's result.
    pub(super) fn round_refused(
        &mut self,
        from: Member,
        round: RoundId,
        reason: &str,
        out: &mut Out,
    ) {
        let open = self.rounds.open.get(&round.stage);
        if open.is_some_and(|open| open.round.id == round) {
            let stage = round.stage;
            self.stop(format!("{from} refused the all-reduce of stage {stage}: {reason}"), out);
        }
    }

    /// Rounds with a member that is gone wait until what it had counted is done anew: the step is open again.
    pub(super) fn tear_rounds_with(&mut self, gone: Member) {
        // What is on its way into the log is held by all who are left.
        if matches!(self.phase, Phase::Committing) {
            return;
        }
        for open in self.rounds.open.values_mut().filter(|open| open.is_among(gone)) {
            open.torn = true;
            open.outcomes.clear();
        }
        self.open_again();
    }

    /// Rounds that take too long are tried again: something got lost on the way.
    pub(super) fn retry_late_rounds(&mut self, out: &mut Out) {
        let late = self.rounds.patience.is_some_and(|patience| self.now >= patience);
        if late && matches!(self.phase, Phase::Closing) {
            self.rounds.late += 1;
            let (step, rounds) = (self.version, self.rounds.fail(|open| !open.is_whole()));
            event(CoordinatorEvent::RoundsAborted { step, rounds, late }, out);
            self.open_again();
            self.close_when_complete(out);
        }
    }

    fn open_again(&mut self) {
        if matches!(self.phase, Phase::Closing) {
            self.phase = Phase::Open;
            self.rounds.patience = None;
        }
    }

    /// The step's last word is down for good: everybody applies it.
    pub(super) fn committed(&mut self, record: CommitRecord, out: &mut Out) {
        assert!(matches!(self.phase, Phase::Committing), "only a closed step is committed");
        assert_eq!(record.step, self.version, "steps are committed one after the other");
        self.rounds = Rounds::default();
        let Self { link_rates, membership, .. } = self;
        link_rates.retain(|(from, to), _| membership.contains(*from) && membership.contains(*to));
        self.version = self.version.next();
        self.membership.stands_at(self.era, self.version);
        self.balance.stepped(self.now);
        self.last_commit = Some(record.clone());
        self.tell_all(&FromCoordinator::Commit(record.clone()), out);
        // Who has moved, by now or with the run's last return, is to be listed where it is.
        if self.membership.is_ahead() {
            self.view_changed(out);
        }
        self.stragglers.forget_through(record.step);
        let books = self.work.close_books(record.step);
        event(CoordinatorEvent::Committed { record, books }, out);
        if self.is_last_version() {
            self.phase = Phase::Saving;
            self.start_checkpoint(out);
        } else {
            if self.checkpoint_is_due() {
                self.start_checkpoint(out);
            }
            self.open_step(out);
            self.take_turns(out);
            self.close_when_complete(out);
        }
    }
}

/// Tells a member of a round and of everybody in it.
fn tell_whole_round(open: &OpenRound, to: Member, out: &mut Out) {
    let group = &open.round.group;
    let number = group.number;
    let all: Vec<RoundGroupMember> = group.all().collect();
    for (part, here) in paging::cut(&all) {
        let stage = open.round.id.stage;
        send(to, FromCoordinator::RoundGroup { stage, number, part, here }, out);
    }
    let same = RoundGroupChange { since: number, number, ..RoundGroupChange::default() };
    send(to, open.close(to, same), out);
}

fn equal_bits(one: &RoundOutcome, other: &RoundOutcome) -> bool {
    one.hash == other.hash
        && one.proof == other.proof
        && one.square_norm.to_bits() == other.square_norm.to_bits()
}

/// The norm over all stages is the root of the sum of their squares, added in order of stages.
fn commit_record(
    rounds: &Rounds,
    era: Era,
    term: Term,
    step: Step,
    loss: FixedLoss,
    held_out_loss: Option<FixedLoss>,
) -> CommitRecord {
    let stages: Vec<(Attempt, RoundOutcome)> = rounds
        .open
        .values()
        .map(|open| {
            let outcome = open.outcomes.values().next().expect("a round has members");
            (open.round.id.attempt, *outcome)
        })
        .collect();
    let gradient_norm =
        stages.iter().fold(0.0, |sum, (_, outcome)| sum + outcome.square_norm).sqrt();
    CommitRecord { era, term, step, stages, gradient_norm, loss, held_out_loss }
}
