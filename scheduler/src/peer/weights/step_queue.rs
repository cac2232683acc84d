//! The step queue: closes and commits that wait for earlier steps, and commits that the engine applies.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use shoal_protocol::ids::{Microbatch, Stage, Step, Term, WeightGroup};
use shoal_protocol::manifest::Verdict;
use shoal_protocol::message::{CommitRecord, Round, RoundId};
use shoal_protocol::units::Moment;

use crate::action::{PeerAction, PeerEvent};
use crate::peer::Out;

/// Commits whose tasks the engine may still have. Only a peer that catches up has more than one.
const APPLYING: usize = 1 << 10;

/// Messages that wait. A newcomer that falls further behind starts over.
const WAITING: usize = 1 << 10;

/// Messages about steps, in the order of their arrival.
#[derive(Debug, Default)]
pub(in crate::peer) struct StepQueue {
    waiting: VecDeque<StepMessage>,
    /// The step whose commit waits for its result, and the time of the last progress.
    missing_result: Option<(Step, Moment)>,
    /// Applied commits, each with the stages of which the engine still has tasks.
    applying: VecDeque<(CommitRecord, BTreeSet<Stage>)>,
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

impl StepQueue {
    /// Adds a message. Returns whether there is room for it.
    #[must_use]
    pub(super) fn push(&mut self, message: StepMessage) -> bool {
        let fits = self.waiting.len() < WAITING;
        if fits {
            self.waiting.push_back(message);
        }
        fits
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn first(&self) -> Option<&StepMessage> {
        self.waiting.front()
    }

    pub(super) fn pop(&mut self) -> Option<StepMessage> {
        self.waiting.pop_front()
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

    /// The first commit waits for its result.
    pub(super) fn await_result(&mut self, now: Moment, step: Step) {
        let known = self.missing_result.filter(|(missing, _)| *missing == step);
        self.missing_result = known.or(Some((step, now)));
    }

    /// A piece of a result arrived.
    pub(super) fn note_progress(&mut self, now: Moment) {
        self.missing_result = self.missing_result.map(|(step, _)| (step, now));
    }

    /// Whether no piece of this step's result arrived for this long.
    pub(super) fn is_overdue(&self, now: Moment, step: Step, patience: Duration) -> bool {
        self.missing_result
            .is_some_and(|(missing, since)| missing == step && now.since(since) >= patience)
    }

    /// The engine applies the results of a commit, at these stages.
    pub(super) fn begin_applying(
        &mut self,
        record: CommitRecord,
        stages: BTreeSet<Stage>,
        out: &mut Out,
    ) {
        if stages.is_empty() {
            // A peer without stages has no task to wait for.
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        } else {
            assert!(self.applying.len() < APPLYING, "no step is committed before its tasks");
            self.applying.push_back((record, stages));
        }
    }

    /// The engine updated one stage. Updates from before a rewind and those for a migration have no
    /// commit here.
    pub(in crate::peer) fn handle_applied(
        &mut self,
        step: Step,
        stage: Stage,
        verdict: Verdict,
        out: &mut Out,
    ) {
        let Some((record, missing)) = self.applying.front_mut() else { return };
        if record.step == step {
            missing.remove(&stage);
        }
        if missing.is_empty() {
            if verdict.outlier.is_some() {
                out.push(PeerAction::Event(PeerEvent::Judged { step, verdict }));
            }
            let (record, _) = self.applying.pop_front().expect("it was just there");
            out.push(PeerAction::Event(PeerEvent::Applied { record }));
        }
    }

    /// Forgets the commits that the engine applies, for a rewind.
    pub(super) fn forget_applying(&mut self) {
        self.applying.clear();
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
        let mut queue = StepQueue::default();
        for (step, weights) in [(4, 0), (4, 1), (5, 1)] {
            assert!(queue.push(close(step, weights)));
        }
        queue.sums_change(Step(4), WeightGroup(1));
        assert!(queue.push(close(4, 1)));
        let outdated = std::iter::from_fn(|| queue.pop()).map(|message| match message {
            StepMessage::Close(close) => close.outdated,
            StepMessage::Commit(_) => unreachable!("there was none"),
        });
        assert_eq!(outdated.collect::<Vec<_>>(), [false, true, false, false]);
    }
}
