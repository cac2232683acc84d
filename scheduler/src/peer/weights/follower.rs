//! Following the weights of some stages: from a snapshot on, commit by commit.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use shoal_protocol::ids::{Microbatch, Stage, Step, Term, WeightGroup};
use shoal_protocol::message::{CommitRecord, Round, RoundId};
use shoal_protocol::units::Moment;

use super::rounds::{Results, Rounds};
use crate::peer::Out;

/// Messages that wait. A follower that falls further behind starts over.
const WAITING: usize = 1 << 10;

/// Follows the weights of some stages.
#[derive(Debug, Default)]
pub(super) struct Follower {
    /// None until a snapshot is known.
    start: Option<Start>,
    /// Messages about steps, in the order of their arrival.
    waiting: VecDeque<StepMessage>,
    /// The step whose commit waits for its result, and the time of the last progress.
    missing_result: Option<(Step, Moment)>,
}

/// Weights that are fetched or here.
#[derive(Debug)]
struct Start {
    /// The version of the snapshot, and later the one after the last applied commit.
    version: Step,
    /// The stages that the engine does not hold yet.
    awaited: BTreeSet<Stage>,
}

/// A message about a step, which waits until the steps before it are applied.
#[derive(Debug)]
pub(in crate::peer) enum StepMessage {
    /// The step is closed for some of this peer's weights.
    Close(Close),
    /// The step is over.
    Commit(CommitRecord),
}

/// The close of a step for some of a peer's weights.
#[derive(Debug)]
pub(in crate::peer) struct Close {
    pub(in crate::peer) round: Round,
    /// What the peer's accumulators must hold.
    pub(in crate::peer) counted: Vec<(Stage, Microbatch)>,
    /// Whether the peer took over work of a lost member while the close waited. Its accumulators may hold that too, and
    /// a mended round follows.
    pub(in crate::peer) outdated: bool,
}

impl StepMessage {
    pub(super) fn step(&self) -> Step {
        match self {
            Self::Close(close) => close.round.id.step,
            Self::Commit(record) => record.step,
        }
    }
}

/// The start.
impl Follower {
    pub(super) fn has_start(&self) -> bool {
        self.start.is_some()
    }

    /// The version of the weights, once the engine holds them.
    pub(super) fn version(&self) -> Option<Step> {
        self.start.as_ref().filter(|start| start.awaited.is_empty()).map(|start| start.version)
    }

    /// Whether the weights are fetched, or here, at a version.
    pub(super) fn starts_at(&self, version: Step) -> bool {
        self.start.as_ref().is_some_and(|start| start.version == version)
    }

    /// Whether a step comes before the start.
    pub(super) fn is_past(&self, step: Step) -> bool {
        self.start.as_ref().is_some_and(|start| step < start.version)
    }

    /// Whether a snapshot is newer than the weights: a second message about the same one may come late.
    pub(super) fn is_newer(&self, version: Step) -> bool {
        self.start.as_ref().is_none_or(|start| version > start.version)
    }

    /// The engine holds the weights of a version.
    pub(super) fn hold(&mut self, version: Step) {
        self.start = Some(Start { version, awaited: BTreeSet::new() });
    }

    /// Starts from a snapshot of these stages.
    pub(super) fn begin(&mut self, version: Step, awaited: BTreeSet<Stage>) {
        self.start = Some(Start { version, awaited });
        self.waiting.retain(|message| message.step() >= version);
        self.missing_result = None;
    }

    /// Whether the start needs this stage.
    pub(super) fn awaits(&self, version: Step, stage: Stage) -> bool {
        let start = self.start.as_ref().filter(|_| self.starts_at(version));
        start.is_some_and(|start| start.awaited.contains(&stage))
    }

    /// The engine holds a stage that the start [`Self::awaits`].
    pub(super) fn note_restored(&mut self, stage: Stage) {
        if let Some(start) = &mut self.start {
            start.awaited.remove(&stage);
        }
    }

    /// A commit is applied: the weights are one version further.
    pub(super) fn note_applied(&mut self) {
        if let Some(start) = &mut self.start {
            start.version = start.version.next();
        }
    }

    /// Forgets the start, and keeps the messages for the next one.
    pub(super) fn forget_start(&mut self) {
        (self.start, self.missing_result) = (None, None);
    }
}

/// The messages that wait.
impl Follower {
    /// Adds a message. Returns whether there is room for it.
    #[must_use]
    pub(super) fn push(&mut self, message: StepMessage) -> bool {
        let fits = self.waiting.len() < WAITING;
        if fits {
            self.waiting.push_back(message);
        }
        fits
    }

    pub(super) fn first(&self) -> Option<&StepMessage> {
        self.waiting.front()
    }

    pub(super) fn last(&self) -> Option<&StepMessage> {
        self.waiting.back()
    }

    pub(super) fn pop(&mut self) -> Option<StepMessage> {
        self.waiting.pop_front()
    }

    /// Number of messages.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the commit of a step waits.
    pub(super) fn commits(&self, step: Step) -> bool {
        let is_it = |message: &StepMessage| matches!(message, StepMessage::Commit(record) if record.step == step);
        self.waiting.iter().any(is_it)
    }

    /// Discards the closes of earlier terms.
    pub(super) fn drop_terms_before(&mut self, term: Term) {
        let is_old = |message: &StepMessage| matches!(message, StepMessage::Close(close) if close.round.id.term < term);
        self.waiting.retain(|message| !is_old(message));
    }

    /// A microbatch is about to be added to a step's sums for these weights.
    pub(super) fn sums_change(&mut self, step: Step, weights: WeightGroup) {
        for message in &mut self.waiting {
            if let StepMessage::Close(close) = message {
                let RoundId { step: of, weights: reduced, .. } = close.round.id;
                close.outdated |= (of, reduced) == (step, weights);
            }
        }
    }

    /// Discards all messages.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.missing_result = None;
    }
}

/// The result of the next commit.
impl Follower {
    /// Looks up the results that the next message names for some weights, if it is a commit, and notes whether it waits
    /// for them.
    pub(super) fn results(
        &mut self,
        now: Moment,
        rounds: &mut Rounds,
        weights: &BTreeSet<WeightGroup>,
        out: &mut Out,
    ) -> Results {
        let Some(StepMessage::Commit(record)) = self.waiting.front() else {
            return Results::Here(Vec::new());
        };
        let results = rounds.results(record, weights, out);
        let known = self.missing_result.filter(|(missing, _)| *missing == record.step);
        self.missing_result = match results {
            Results::Missing | Results::Assembling => known.or(Some((record.step, now))),
            Results::Here(_) | Results::Differ => None,
        };
        results
    }

    /// A piece of a result arrived.
    pub(super) fn note_progress(&mut self, now: Moment) {
        self.missing_result = self.missing_result.map(|(step, _)| (step, now));
    }

    /// The step of a result of which no piece arrived for this long.
    pub(super) fn overdue_result(&self, now: Moment, patience: Duration) -> Option<Step> {
        let (step, since) = self.missing_result?;
        (now.since(since) >= patience).then_some(step)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{Attempt, Era};
    use shoal_protocol::message::Mended;

    use super::*;

    fn close(step: u64, weights: u16) -> StepMessage {
        let (step, weights) = (Step(step), WeightGroup(weights));
        let id = RoundId { era: Era(0), term: Term(1), step, weights, attempt: Attempt(0) };
        let round = Round { id, group: Default::default(), mended: Mended::default() };
        StepMessage::Close(Close { round, counted: Vec::new(), outdated: false })
    }

    #[test]
    fn work_taken_over_makes_the_closes_of_its_sums_outdated() {
        let mut follower = Follower::default();
        for (step, weights) in [(4, 0), (4, 1), (5, 1)] {
            assert!(follower.push(close(step, weights)));
        }
        follower.sums_change(Step(4), WeightGroup(1));
        assert!(follower.push(close(4, 1)));
        let outdated = std::iter::from_fn(|| follower.pop()).map(|message| match message {
            StepMessage::Close(close) => close.outdated,
            StepMessage::Commit(_) => unreachable!("there was none"),
        });
        assert_eq!(outdated.collect::<Vec<_>>(), [false, true, false, false]);
    }
}
