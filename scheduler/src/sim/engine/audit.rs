//! Sums that are set aside while work of others is computed again, and the prints of sums.

use shoal_protocol::ids::{ContentHash, Stage, Step};
use shoal_protocol::message::{Challenge, RoundId, SumsPrint, SumsPrinter};

use super::Engine;
use crate::action::{Task, TaskResult};

impl Engine {
    /// Executes a task about sums that are set aside.
    pub(super) fn audit(&mut self, task: Task) -> Result<TaskResult, String> {
        match task {
            Task::SetSumsAside { step, stage } => {
                let state = self.stage(stage);
                let sums = state.sums.remove(&step).unwrap_or_default();
                if state.aside.replace((step, sums)).is_some() {
                    return Err("sums were set aside twice".to_owned());
                }
                Ok(TaskResult::SumsMoved { stage })
            }
            Task::PrintSums { step, stage, rounds } => {
                let print = |(round, result)| self.print(round, result, stage);
                let sums = rounds.into_iter().map(print).collect();
                self.put_back(step, stage)?;
                Ok(TaskResult::SumsPrinted { step, stage, sums })
            }
            Task::PutSumsBack { step, stage } => {
                self.put_back(step, stage)?;
                Ok(TaskResult::SumsMoved { stage })
            }
            other => Err(format!("not a task of an audit: {other:?}")),
        }
    }

    /// The prints of the sums of a round at each stage, in a run with audits.
    pub(super) fn own_prints(
        &mut self,
        round: RoundId,
        result: ContentHash,
    ) -> Vec<(Stage, SumsPrint)> {
        if !self.manifest.audit.is_on() {
            return Vec::new();
        }
        let stages: Vec<Stage> = self.manifest.stages_of(round.weights).collect();
        stages.into_iter().map(|stage| (stage, self.print(round, result, stage))).collect()
    }

    /// Puts the sums back that were set aside.
    fn put_back(&mut self, step: Step, stage: Stage) -> Result<(), String> {
        let state = self.stage(stage);
        let (of, sums) = state.aside.take().ok_or("no sums were set aside")?;
        if of != step {
            return Err(format!("the sums of step {of} are put back as those of step {step}"));
        }
        state.sums.remove(&step);
        if !sums.is_empty() {
            state.sums.insert(step, sums);
        }
        Ok(())
    }

    /// The print of a stage's sums at the challenge of a round.
    fn print(&mut self, round: RoundId, result: ContentHash, stage: Stage) -> SumsPrint {
        let mut printer = SumsPrinter::of(&Challenge::of(round, result));
        let state = self.stage(stage);
        if let Some(place) = state.groups.get(&round.weights).cloned() {
            printer.add(&state.sums(round.step)[place]);
        }
        printer.print()
    }
}
