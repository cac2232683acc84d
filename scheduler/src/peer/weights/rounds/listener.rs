//! The round listener: results of rounds to which this peer adds nothing.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Member, Mend, Step, WeightGroup};
use shoal_protocol::message::{Round, RoundId, TensorTag};
use shoal_protocol::units::Bytes;

use super::received_result::ReceivedResult;
use crate::action::{Payload, TaskResult};
use crate::peer::Out;
use crate::round::{Layout, is_next};

/// Results that are received or here.
#[derive(Debug, Default)]
pub(super) struct RoundListener {
    results: BTreeMap<(Step, WeightGroup), ReceivedResult>,
    /// Discarded results of which the engine still has tasks.
    retired: Vec<ReceivedResult>,
}

impl RoundListener {
    /// Bytes of the results.
    pub(super) fn held(&self) -> Bytes {
        self.results.values().chain(&self.retired).map(ReceivedResult::held).sum()
    }

    /// Whether a piece of this round is expected: the round was mended as often as its sender knew.
    pub(super) fn expects(&self, round: RoundId, mend: Mend) -> bool {
        let known = self.results.get(&(round.step, round.weights)).map(ReceivedResult::round);
        known.is_some_and(|known| known.id == round && known.mended.mend >= mend)
    }

    /// Listens to a round, or follows its mend. Returns whether the round is new.
    pub(super) fn listen(
        &mut self,
        round: Round,
        layout: impl FnOnce(&Round) -> Layout,
        whole_proof: u64,
        out: &mut Out,
    ) -> bool {
        let place = (round.id.step, round.id.weights);
        if !is_next(self.results.get(&place).map(ReceivedResult::round), &round) {
            return false;
        }
        let known = self.results.get_mut(&place);
        if let Some(known) = known.filter(|known| known.round().id == round.id) {
            known.mend(round, out);
        } else {
            let layout = layout(&round);
            let result = ReceivedResult::new(round, layout, whole_proof);
            if let Some(failed) = self.results.insert(place, result) {
                self.retire(failed, out);
            }
        }
        true
    }

    /// Takes an expected piece. Returns whether the result is whole.
    pub(super) fn receive(
        &mut self,
        from: Member,
        tag: TensorTag,
        payload: Payload,
        out: &mut Out,
    ) -> bool {
        let TensorTag::RoundResult { round, piece, proof, .. } = tag else {
            unreachable!("a listener takes only results: {tag:?}")
        };
        let result = self.results.get_mut(&(round.step, round.weights));
        let result = result.expect("the caller knows that the piece is expected");
        result.receive(from, piece, proof, payload, out);
        result.is_whole()
    }

    /// The result of an attempt, if it is the one that this peer listens to.
    pub(super) fn result_of(
        &mut self,
        place: (Step, WeightGroup),
        is_named: impl Fn(&Round) -> bool,
    ) -> Option<&mut ReceivedResult> {
        self.results.get_mut(&place).filter(|known| is_named(known.round()))
    }

    /// Whether this peer only listens, or listened, to a round.
    pub(super) fn knows(&self, round: RoundId) -> bool {
        self.results.values().chain(&self.retired).any(|known| known.round().id == round)
    }

    /// A task with a received result ended. Returns whether that measured the whole result.
    pub(super) fn handle_task(&mut self, result: TaskResult, out: &mut Out) -> bool {
        let (TaskResult::Installed { round, .. } | TaskResult::Summarised { round, .. }) = &result
        else {
            unreachable!("a listener has no other tasks: {result:?}")
        };
        let known = self
            .results
            .values_mut()
            .chain(&mut self.retired)
            .find(|result| result.round().id == *round)
            .expect("the caller knows the round");
        let measured = match result {
            TaskResult::Installed { range, .. } => {
                known.installed(&range, out);
                false
            }
            TaskResult::Summarised { hash, square_norm, .. } => {
                known.summarised(hash, square_norm);
                true
            }
            _ => false,
        };
        self.retired.retain(ReceivedResult::is_busy);
        measured
    }

    pub(super) fn is_busy(&self) -> bool {
        self.results.values().any(ReceivedResult::is_busy)
    }

    /// Whether pieces of these members are still to come, of the results that the filter selects.
    pub(super) fn awaits(
        &self,
        members: &BTreeSet<Member>,
        selects: impl Fn(Step, WeightGroup) -> bool,
    ) -> bool {
        let mut selected =
            self.results.iter().filter(|((step, weights), _)| selects(*step, *weights));
        selected.any(|(_, result)| members.iter().any(|member| result.waits_for(*member)))
    }

    /// Discards the results that the filter selects.
    pub(super) fn forget(&mut self, selects: impl Fn(Step, WeightGroup) -> bool, out: &mut Out) {
        for ((step, weights), result) in std::mem::take(&mut self.results) {
            if selects(step, weights) {
                self.retire(result, out);
            } else {
                self.results.insert((step, weights), result);
            }
        }
    }

    /// Discards a result as soon as the engine has no tasks of it.
    fn retire(&mut self, result: ReceivedResult, out: &mut Out) {
        if result.is_busy() {
            self.retired.push(result);
        } else {
            result.release(out);
        }
    }
}
