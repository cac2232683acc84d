//! The all-reduces of the present step: a round for each weight group, from its stages' close to the commit.

mod accused;
mod islands;
mod open_round;
mod round_groups;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use shoal_protocol::codec::SumCodec;
use shoal_protocol::ids::{Attempt, ContentHash, Member, Mend, Microbatch, Stage, WeightGroup};
use shoal_protocol::message::{
    CommitRecord, Mended, Round, RoundGroup, RoundGroupMember, RoundId, RoundOutcome,
};
use shoal_protocol::units::{Moment, Rate};

use self::accused::Accused;
pub(super) use self::accused::Going;
use self::open_round::OpenRound;
pub(super) use self::open_round::{Agreement, Report};
use self::round_groups::RoundGroups;
use super::context::Context;
use super::progress::Progress;
use super::weights::Newcomers;
use super::{Out, event};
use crate::action::CoordinatorEvent;
use crate::coordinator::work::deadline::Estimate;
use crate::coordinator::work::ledger::Ledger;

/// Doublings of a round's deadline at most.
const DOUBLINGS: u32 = 6;

/// Late rounds of a step that lack a member's result and have another's, after which that member is expelled.
const WITHHELD: u32 = 3;

/// No round is tried again sooner than this, however fast earlier rounds were, unless the configured patience
/// is shorter.
const LEAST_PATIENCE: Duration = Duration::from_secs(10);

/// The rounds of the present step, and measurements of earlier ones.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    open: BTreeMap<WeightGroup, OpenRound>,
    /// When the step was last closed.
    closed_at: Moment,
    /// Failed attempts.
    failed: BTreeMap<WeightGroup, u32>,
    /// Attempts that failed because they were late. Deaths do not show how long a round takes.
    timeouts: u32,
    /// How often a member's result was lacking, and another's was here, when a round was late, in this step.
    withheld: BTreeMap<Member, u32>,
    /// When incomplete rounds are tried again.
    deadline: Option<Moment>,
    groups: RoundGroups,
    accused: Accused,
    /// How long the rounds of this term took.
    times: Option<Estimate>,
}

/// The part of the present step that can be closed.
#[derive(Debug)]
pub(super) struct Due {
    /// The weights at whose stages all is done and no round is open.
    pub(super) weights: Vec<WeightGroup>,
    /// Whether each replica of the first stage has no more than its last pass to run.
    pub(super) ending: bool,
    /// Whether all is done at all stages.
    pub(super) complete: bool,
}

/// A round whose results all replicas hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Complete<'a> {
    pub(super) id: RoundId,
    /// Hash of the result.
    pub(super) result: ContentHash,
    pub(super) reports: &'a BTreeMap<Member, Report>,
}

/// The state that a new or mended round depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) context: &'a Context,
    /// The ledger of the present step.
    pub(super) ledger: &'a Ledger,
    pub(super) newcomers: &'a Newcomers,
}

impl Inputs<'_> {
    /// The members that serve a stage of these weights.
    fn replicas(&self, weights: WeightGroup) -> BTreeSet<Member> {
        let step = self.context.progress.version;
        let replicas = |stage| self.context.members.replicas_at(stage, step);
        self.context.config.manifest.stages_of(weights).flat_map(replicas).collect()
    }

    /// The members that will serve a stage of these weights.
    fn listeners(&self, weights: WeightGroup) -> BTreeSet<Member> {
        let is_queued = |member| self.newcomers.is_queued(member);
        let step = self.context.progress.version;
        let listeners = |stage| self.context.members.listeners_at(stage, step, is_queued);
        self.context.config.manifest.stages_of(weights).flat_map(listeners).collect()
    }

    fn counted(&self, weights: WeightGroup) -> BTreeMap<Member, Vec<(Stage, Microbatch)>> {
        self.ledger.counted(self.context.config.manifest.stages_of(weights))
    }
}

impl Rounds {
    /// Whether no round is open.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// When incomplete rounds are tried again.
    pub(super) fn deadline(&self) -> Option<Moment> {
        self.deadline
    }

    /// A round that is open, or whose results are being appended to the log.
    pub(super) fn round(&self, id: RoundId) -> Option<&Round> {
        self.open_round(id).map(|open| &open.round)
    }

    fn open_round(&self, id: RoundId) -> Option<&OpenRound> {
        self.open.get(&id.weights).filter(|open| open.round.id == id)
    }

    /// The part of the present step that can be closed.
    pub(super) fn due(&self, context: &Context, ledger: &Ledger) -> Due {
        let is_undone = |stage: &Stage| ledger.undone(*stage) > 0;
        let manifest = &context.config.manifest;
        let last_undone = manifest.stages().filter(is_undone).last();
        let is_on = |weights| self.open.get(&weights).is_some_and(|open| !open.torn);
        let is_due = |weights: &WeightGroup| {
            let undone = manifest.stages_of(*weights).any(|stage| is_undone(&stage));
            !undone && !is_on(*weights)
        };
        let replicas = self.groups.size(WeightGroup(0));
        let at_last = ledger.free() == 0 && ledger.undone(Stage(0)) as usize <= replicas;
        Due {
            weights: manifest.weight_groups().filter(is_due).collect(),
            ending: last_undone.is_none_or(|stage| stage == Stage(0) && at_last),
            complete: last_undone.is_none(),
        }
    }

    /// Begins the rounds of these weights: the replicas receive the list of microbatches that their
    /// accumulators must hold. Torn rounds are mended.
    pub(super) fn close(&mut self, inputs: &Inputs<'_>, weights: &[WeightGroup], out: &mut Out) {
        for weights in weights {
            self.begin(inputs, *weights, out);
        }
    }

    fn begin(&mut self, inputs: &Inputs<'_>, weights: WeightGroup, out: &mut Out) {
        let before = self.groups.last(weights);
        let mended = self.open.remove(&weights).map(|torn| mended(inputs, torn));
        let open = match mended {
            None => self.new_round(inputs, weights, &before),
            Some(Some(open)) => {
                let gone = before.members.len() - open.round.group.members.len();
                let (round, changed) = (open.round.id, open.round.mended.changed.len());
                event(CoordinatorEvent::RoundMended { round, gone, changed }, out);
                open
            }
            Some(None) => {
                *self.failed.entry(weights).or_insert(0) += 1;
                let (step, rounds) = (inputs.context.progress.version, 1);
                event(CoordinatorEvent::RoundsAborted { step, rounds, late: false }, out);
                self.new_round(inputs, weights, &before)
            }
        };
        open.send(&before, out);
        self.groups.set(weights, Arc::clone(&open.round.group));
        self.open.insert(weights, open);
    }

    /// A new round of the present step.
    fn new_round(
        &self,
        inputs: &Inputs<'_>,
        weights: WeightGroup,
        before: &Arc<RoundGroup>,
    ) -> OpenRound {
        let Progress { era, term, version: step, .. } = inputs.context.progress;
        let attempt = Attempt(self.failed.get(&weights).copied().unwrap_or(0));
        let id = RoundId { era, term, step, weights, attempt };
        let replicas = inputs.replicas(weights);
        let mut listeners = inputs.listeners(weights);
        listeners.retain(|member| !replicas.contains(member));
        let reduces = |member| !self.accused.contains(member);
        let group = self.groups.next(inputs.context, before, (replicas, reduces), listeners);
        OpenRound {
            round: Round { id, group, mended: Mended::default() },
            proof: inputs.context.config.manifest.whole_proof(step, weights),
            counted: inputs.counted(weights),
            outcomes: BTreeMap::new(),
            torn: false,
        }
    }

    /// The step is closed: its rounds get a deadline.
    pub(super) fn close_step(&mut self, context: &Context) {
        self.closed_at = context.now;
        let doublings = self.timeouts.min(DOUBLINGS);
        self.deadline = Some(context.now + self.patience(context) * (1 << doublings));
    }

    /// The time after which rounds are tried again, by how long earlier ones took.
    fn patience(&self, context: &Context) -> Duration {
        let most = context.config.patience;
        let measured = self.times.map(|times| times.late().max(LEAST_PATIENCE));
        measured.map_or(most, |late| late.min(most))
    }

    /// Sends the whole group of a round to one of its members that lacks it.
    pub(super) fn send_group(&self, to: Member, id: RoundId, out: &mut Out) {
        // A torn round is sent again once it is mended.
        let is_in =
            |open: &&OpenRound| !open.torn && open.round.group.all().any(|one| one.member == to);
        if let Some(open) = self.open_round(id).filter(is_in) {
            open.send_whole(to, out);
        }
    }

    /// Whether a round is open and this member reduces a part of it.
    pub(super) fn has_replica(&self, id: RoundId, member: Member) -> bool {
        self.open_round(id).is_some_and(|open| open.has_replica(member))
    }

    /// Whether a member reduces pieces of an open round.
    pub(super) fn reduces(&self, id: RoundId, member: Member) -> bool {
        self.open_round(id).is_some_and(|open| open.reduces(member))
    }

    /// Takes a member's result of a round. Returns how far the replicas agree, if it was expected.
    ///
    /// # Errors
    /// When a microbatch was lost or counted twice, by the member's own proof.
    pub(super) fn reduced(
        &mut self,
        from: Member,
        (id, mend): (RoundId, Mend),
        report: Report,
        (rates, codec): (&[(u16, Rate)], SumCodec),
    ) -> Result<Option<Agreement>, String> {
        let Some(open) = self.open.get_mut(&id.weights) else { return Ok(None) };
        if !open.expects(id, mend) || !open.has_replica(from) {
            return Ok(None);
        }
        self.groups.measure(from, &open.round.group, rates);
        open.record(from, report)?;
        Ok(Some(open.agreement(codec)))
    }

    /// Whether all replicas hold the results of all rounds.
    pub(super) fn are_complete(&self) -> bool {
        self.open.values().all(OpenRound::is_complete)
    }

    /// The results are here and are being audited: no round is late any more.
    pub(super) fn await_audits(&mut self) {
        self.deadline = None;
    }

    /// The open round of a weight group, with its result and what members reported of it, once it is complete.
    pub(super) fn complete(&self, weights: WeightGroup) -> Option<Complete<'_>> {
        let open = self.open.get(&weights).filter(|open| open.is_complete())?;
        let (_, outcome) = open.result();
        Some(Complete { id: open.round.id, result: outcome.hash, reports: &open.outcomes })
    }

    /// The commit of the closed step and the time that its rounds took, once all replicas hold their results.
    pub(super) fn commit(
        &mut self,
        context: &Context,
        ledger: &Ledger,
    ) -> Option<(CommitRecord, Duration)> {
        if !self.are_complete() {
            return None;
        }
        self.deadline = None;
        let took = context.now.since(self.closed_at);
        // The rest of a mended round takes less time than a whole one.
        if self.open.values().all(|open| open.round.mended.mend == Mend(0)) {
            Estimate::note(&mut self.times, took);
        }
        let rounds: Vec<(Attempt, RoundOutcome)> =
            self.open.values().map(OpenRound::result).collect();
        // The norm over all weights is the root of the sum of their squares, added in order of groups.
        let squares = rounds.iter().fold(0.0, |sum, (_, outcome)| sum + outcome.square_norm);
        let (loss, held_out_loss) = ledger.losses();
        let scale = context.config.manifest.gradient_scale(loss.targets);
        let gradient_norm = squares.sqrt() * scale;
        let Progress { era, term, version: step, .. } = context.progress;
        let record = CommitRecord { era, term, step, rounds, gradient_norm, loss, held_out_loss };
        Some((record, took))
    }

    /// Tears the rounds with a member that is gone: they wait until its counted work is done again.
    pub(super) fn tear(&mut self, gone: Member) {
        for open in self.open.values_mut().filter(|open| open.has_replica(gone)) {
            open.tear();
        }
    }

    /// The step is open again.
    pub(super) fn reopen_step(&mut self) {
        self.deadline = None;
    }

    /// Whether incomplete rounds are late.
    pub(super) fn is_late(&self, now: Moment) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Discards incomplete rounds, which are late: a message was lost. Returns the members whose result was lacking too
    /// often while others had theirs.
    pub(super) fn discard_late(&mut self, context: &Context, out: &mut Out) -> Vec<Member> {
        self.timeouts += 1;
        let Self { open, failed, withheld, .. } = self;
        let before = open.len();
        let mut lacking = BTreeSet::new();
        open.retain(|weights, round| {
            let complete = round.is_complete();
            *failed.entry(*weights).or_insert(0) += u32::from(!complete);
            lacking.extend(round.lacking());
            complete
        });
        let (step, rounds) = (context.progress.version, before - open.len());
        event(CoordinatorEvent::RoundsAborted { step, rounds, late: true }, out);
        let mut count = |member: &Member| {
            let times = withheld.entry(*member).or_insert(0);
            *times += 1;
            *times >= WITHHELD
        };
        lacking.into_iter().filter(|member| count(member)).collect()
    }

    /// Discards a round of whose result pieces of these members are not the sum of what was given. Returns a member
    /// that goes, if one must.
    ///
    /// The sums of a mended round are partly those of lost members, which others computed again, on unlike machines
    /// with other bits: nobody is accused then.
    pub(super) fn discard_forged(
        &mut self,
        id: RoundId,
        forged: BTreeSet<Member>,
        going: impl Fn(Member) -> Going,
        out: &mut Out,
    ) -> Option<Member> {
        let open = self.open.remove(&id.weights)?;
        *self.failed.entry(id.weights).or_insert(0) += 1;
        let all: Vec<Member> = open.round.group.members.iter().map(|part| part.member).collect();
        let is_whole = open.round.mended.mend == Mend(0);
        let goes = is_whole.then(|| self.accused.accuse(&all, &forged, going)).flatten();
        event(CoordinatorEvent::RoundForged { round: id, owners: forged }, out);
        goes
    }

    /// Forgets the step's rounds. Groups and measurements stay.
    pub(super) fn end_step(&mut self) {
        let Self { groups, accused, times, .. } = std::mem::take(self);
        *self = Self { groups, accused, times, ..Self::default() };
    }

    /// A step is committed: forgets members that are gone.
    pub(super) fn retain_members(&mut self, is_member: impl Fn(Member) -> bool) {
        self.groups.retain_links(&is_member);
        self.accused.committed(is_member);
    }
}

/// A torn round among its remaining members. None if another member has counted something meanwhile, which the
/// round has no part for.
fn mended(inputs: &Inputs<'_>, torn: OpenRound) -> Option<OpenRound> {
    let weights = torn.round.id.weights;
    let before = &torn.round.group;
    let (replicas, listeners) = (inputs.replicas(weights), inputs.listeners(weights));
    // A listener that has come to serve can get this result in no other way.
    let is_left = |one: &RoundGroupMember| match one.weight {
        Some(_) => replicas.contains(&one.member),
        None => replicas.contains(&one.member) || listeners.contains(&one.member),
    };
    let left = RoundGroup::of(before.number, before.all().filter(is_left));
    let group = round_groups::numbered(inputs.context.progress.term, before, left);
    torn.mended(group, inputs.counted(weights))
}
