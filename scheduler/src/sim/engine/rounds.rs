//! The tasks of rounds: sums of parts, and results as far as they are here.

use std::ops::Range;

use shoal_protocol::frame::Element;
use shoal_protocol::message::{Challenge, FixedLoss, RoundId};
use shoal_protocol::units::Bytes;

use super::Engine;
use crate::action::{Payload, PayloadId, Task, TaskResult};
use crate::sim::corruption::SumLie;
use crate::sim::integer_model;
use crate::sim::payloads::{Content, Payloads};

/// The result of a round as far as it is here.
#[derive(Debug)]
pub(super) struct RoundResult {
    round: Option<RoundId>,
    sums: Vec<Option<i64>>,
}

impl Engine {
    pub(super) fn round_task(
        &mut self,
        task: Task,
        payloads: &mut Payloads,
    ) -> Result<TaskResult, String> {
        let codec = self.sizes.sums;
        match task {
            Task::Export { round, to, piece, range, parts } => {
                let sums = self.sums_with(round, &range, parts, payloads)?;
                let payload = keep_sums(payloads, sums, codec.part());
                Ok(TaskResult::Exported { round, to, piece, payload })
            }
            Task::Reduce { round, piece, range, parts } => {
                // Who adds nothing up for others computes wrongly, which no sum shows.
                let lies = self.sum_lie == Some(SumLie::Results) && !parts.is_empty();
                let mut sums = self.sums_with(round, &range, parts, payloads)?;
                if lies {
                    sums[0] += 1;
                }
                let others_err = self.others_err;
                self.result(round).install(round, (range.start, others_err), &sums)?;
                let payload = keep_sums(payloads, sums, codec.result());
                Ok(TaskResult::Reduced { round, piece, payload })
            }
            Task::Install { round, range, payload } => {
                let sums = content_sums(payloads, payload)?;
                if sums.len() != range.len() {
                    return Err("a piece of a wrong size".to_owned());
                }
                let others_err = self.others_err;
                self.result(round).install(round, (range.start, others_err), &sums)?;
                Ok(TaskResult::Installed { round, range })
            }
            Task::Summarise { round, owned } => {
                let result = self.result(round).whole(round)?;
                let (hash, square_norm) = integer_model::summary(&result);
                let sums = self.own_sums(round, &(0..result.len()));
                let challenge = Challenge::of(round, hash);
                let mut checks = integer_model::checks(&challenge, &owned, &sums, &result);
                let lies = match self.sum_lie {
                    Some(SumLie::GaveAll) => checks.len(),
                    Some(SumLie::GaveFirst) => 1.min(checks.len()),
                    Some(SumLie::Results) | None => 0,
                };
                checks[..lies].iter_mut().for_each(|check| check.own[0] += 1e9);
                let sums = self.own_prints(round, hash);
                Ok(TaskResult::Summarised { round, hash, square_norm, checks, sums })
            }
            other => Err(format!("not a task of a round: {other:?}")),
        }
    }

    /// The update of a stage by this round and its others, if all their results are here.
    pub(in crate::sim) fn possible_update(&self, round: RoundId) -> Option<Task> {
        let step = round.step;
        let rounds_of = |stage| -> Vec<RoundId> {
            let groups = self.manifest.groups_of(stage);
            groups.map(|weights| RoundId { weights, ..round }).collect()
        };
        let is_here = |round: &RoundId| self.results[&round.weights].whole(*round).is_ok();
        let mut stages = self.manifest.stages_of(round.weights);
        let stage = stages.find(|stage| rounds_of(*stage).iter().all(is_here))?;
        let rounds = rounds_of(stage);
        Some(Task::Apply { step, stage, rounds, gradient_norm: 1.0, loss: FixedLoss::new(0, 1) })
    }

    pub(super) fn result(&mut self, round: RoundId) -> &mut RoundResult {
        self.results.get_mut(&round.weights).expect("the run has the weights")
    }

    /// The sums of a range of a weight group and of other members' integers.
    fn sums_with(
        &mut self,
        round: RoundId,
        range: &Range<usize>,
        parts: Vec<PayloadId>,
        payloads: &Payloads,
    ) -> Result<Vec<i64>, String> {
        let mut sums = self.own_sums(round, range);
        for part in parts {
            let part = content_sums(payloads, part)?;
            integer_model::add(&mut sums, 0..part.len(), &part);
        }
        Ok(sums)
    }

    /// The sums of a range of a weight group, over all stages that have it.
    pub(super) fn own_sums(&mut self, round: RoundId, range: &Range<usize>) -> Vec<i64> {
        let mut all = vec![0; range.len()];
        for state in self.stages.values_mut() {
            if let Some(place) = state.groups.get(&round.weights).cloned() {
                let sums = &state.sums(round.step)[place][range.clone()];
                integer_model::add(&mut all, 0..range.len(), sums);
            }
        }
        all
    }
}

impl RoundResult {
    /// None, of so many elements.
    pub(super) fn new(elements: usize) -> Self {
        Self { round: None, sums: vec![None; elements] }
    }

    /// Stores a piece of a round's result. A new round begins empty; in a mended round a piece may
    /// arrive again, with the same sums unless others err.
    fn install(
        &mut self,
        round: RoundId,
        (start, others_err): (usize, bool),
        sums: &[i64],
    ) -> Result<(), String> {
        if self.round != Some(round) {
            self.sums.fill(None);
            self.round = Some(round);
        }
        for (place, sum) in self.sums[start..].iter_mut().zip(sums) {
            if place.replace(*sum).is_some_and(|known| known != *sum && !others_err) {
                return Err("an element of a result has two sums".to_owned());
            }
        }
        Ok(())
    }

    pub(super) fn whole(&self, round: RoundId) -> Result<Vec<i64>, String> {
        let whole: Option<Vec<i64>> = self.sums.iter().copied().collect();
        let whole = whole.filter(|_| self.round == Some(round));
        whole.ok_or_else(|| "a result with holes is used".to_owned())
    }
}

fn content_sums(payloads: &Payloads, id: PayloadId) -> Result<Vec<i64>, String> {
    match payloads.get(id)? {
        (Content::Sums(sums), _) => Ok(sums.clone()),
        (Content::Word(_), _) => Err(format!("{id:?} holds no integers")),
    }
}

/// Keeps integers that travel as elements of this kind.
fn keep_sums(payloads: &mut Payloads, sums: Vec<i64>, element: Element) -> Payload {
    let size = element.bytes_of(sums.len() as u64).expect("few");
    payloads.keep(Content::Sums(sums), Bytes(size))
}
