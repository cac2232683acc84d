//! The parts of stages that each task touches, at a peer that swaps its stages.

use std::collections::BTreeMap;

use shoal_protocol::ids::Stage;
use shoal_protocol::units::Moment;

use super::{Engine, StageState};
use crate::action::Task;
use crate::sim::omitted_rules::Omit;
use crate::sim::scenario::Scenario;
use crate::sim::tiers::{Part, Place, Read, Tiers, Value};

/// The device of a peer that begins with these stages.
pub(super) fn tiers(
    scenario: &Scenario,
    index: usize,
    stages: &BTreeMap<Stage, StageState>,
) -> Option<Tiers> {
    let tiers = scenario.peers[index].tiers.as_ref()?;
    let elements = stages.iter().map(|(stage, state)| (*stage, state.elements())).collect();
    let values = |(stage, state): (&Stage, &StageState)| state.state(*stage);
    Some(Tiers::new(tiers, scenario.weight, elements, stages.iter().flat_map(values)))
}

impl StageState {
    /// Weights and moments.
    fn state(&self, stage: Stage) -> [(Place, Value); 2] {
        [Part::Weights, Part::Moments].map(|part| ((stage, part), self.value(part)))
    }

    /// What a part should hold.
    fn value(&self, part: Part) -> Value {
        match part {
            Part::Weights => Value::Weights { version: self.version, weights: self.weights },
            Part::Moments => Value::Moments { version: self.version },
            Part::Sums(step) => {
                let none = || vec![0; self.elements()];
                Value::Sums(self.sums.get(&step).cloned().unwrap_or_else(none))
            }
        }
    }
}

impl Engine {
    /// Brings what a task touches onto the device. Returns the time at which the task can begin.
    pub(super) fn bring(&mut self, now: Moment, task: &Task, omit: Omit) -> Moment {
        let places = self.touched(task);
        let Some(tiers) = &mut self.tiers else { return now };
        if let Task::FetchAhead { stage, sums } = task {
            let parts = [Part::Weights].into_iter().chain(sums.map(Part::Sums));
            tiers.fetch_ahead(parts.map(|part| (*stage, part)).collect());
            return now;
        }
        if let Task::Restore { stage, .. } = task {
            tiers.forget(*stage, |_| true);
        }
        let ready = tiers.need(now, &places, omit);
        if matches!(task, Task::Apply { .. }) {
            let updates = |task: &Task| match task {
                Task::Apply { stage, .. } => Some(*stage),
                _ => None,
            };
            let next = self.lanes.waiting().find_map(updates);
            let parts = next.map(|stage| [Part::Weights, Part::Moments].map(|part| (stage, part)));
            tiers.fetch(now, parts.into_iter().flatten().collect(), omit);
        }
        if super::is_pass(task) {
            tiers.read_fetched(&places);
            tiers.begin_fetching(now, omit);
        }
        ready
    }

    /// Notes what a task reads, before it changes anything.
    pub(super) fn note_reads(&mut self, task: &Task) {
        let replaces = matches!(task, Task::Restore { .. });
        let places = if replaces { Vec::new() } else { self.touched(task) };
        let Some(tiers) = &mut self.tiers else { return };
        tiers.reads = places
            .into_iter()
            .map(|place| Read {
                place,
                found: tiers.read(place),
                present: self.stages[&place.0].value(place.1),
            })
            .collect();
    }

    /// Puts what a task changed onto the device.
    pub(super) fn note_changes(&mut self, task: &Task) {
        let Some(tiers) = &mut self.tiers else { return };
        match task {
            Task::Accumulate { key, .. } => {
                let part = Part::Sums(key.step);
                tiers.change((key.stage, part), self.stages[&key.stage].value(part));
            }
            Task::SetSumsAside { step, stage }
            | Task::PrintSums { step, stage, .. }
            | Task::PutSumsBack { step, stage } => {
                let part = Part::Sums(*step);
                tiers.change((*stage, part), self.stages[stage].value(part));
            }
            Task::Apply { step, stage, .. } => {
                for (place, value) in self.stages[stage].state(*stage) {
                    tiers.change(place, value);
                }
                tiers.forget(*stage, |part| matches!(part, Part::Sums(of) if of <= *step));
            }
            Task::Restore { stage, .. } => {
                for (place, value) in self.stages[stage].state(*stage) {
                    tiers.change(place, value);
                }
            }
            Task::Leave { stage } => tiers.forget(*stage, |part| matches!(part, Part::Sums(_))),
            _ => {}
        }
    }

    fn touched(&self, task: &Task) -> Vec<Place> {
        match task {
            _ if self.tiers.is_none() => Vec::new(),
            Task::Forward { key, .. } | Task::Backward { key, .. } => {
                vec![(key.stage, Part::Weights)]
            }
            Task::Accumulate { key, .. } => vec![(key.stage, Part::Sums(key.step))],
            Task::SetSumsAside { step, stage }
            | Task::PrintSums { step, stage, .. }
            | Task::PutSumsBack { step, stage } => vec![(*stage, Part::Sums(*step))],
            Task::Apply { stage, .. } | Task::Store { stage, .. } | Task::Restore { stage, .. } => {
                vec![(*stage, Part::Weights), (*stage, Part::Moments)]
            }
            Task::Export { round, .. } | Task::Reduce { round, .. } => {
                let summed = |stage: &Stage| self.stages[stage].sums.contains_key(&round.step);
                let stages = self.manifest.stages_of(round.weights).filter(summed);
                stages.map(|stage| (stage, Part::Sums(round.step))).collect()
            }
            _ => Vec::new(),
        }
    }
}
