//! A run whose log and disks are lost, and that is founded again on a checkpoint. Its first peer has fetched the
//! files from an archive.

use shoal_protocol::ids::{PeerId, Stage, Step};
use shoal_protocol::message::{Founding, StoredFile, StoredStage};

use super::integer_model::{self, Weights};
use super::reference::Reference;
use super::scenario::Scenario;

/// The founding record, and the files on the first peer's disk.
#[derive(Debug, Default)]
pub(super) struct Founded {
    pub(super) record: Option<Founding>,
    pub(super) files: Vec<((Step, Stage), Weights)>,
}

impl Founded {
    /// Nothing for a run that begins at its first version.
    pub(super) fn of(scenario: &Scenario, first: PeerId) -> Self {
        let version = scenario.founded;
        if version <= scenario.manifest.first_version() {
            return Self::default();
        }
        let last = Step(version.0 - 1);
        let mut reference = Reference::of(scenario);
        let reached = reference.reach(last).expect("the run has such a version");
        let files: Vec<_> = (0..)
            .map(Stage)
            .zip(&reached.weights)
            .map(|(stage, weights)| ((version, stage), *weights))
            .collect();
        let stage = |((version, stage), weights): &((Step, Stage), Weights)| {
            let file = StoredFile {
                name: format!("stage-{stage}"),
                hash: integer_model::file_hash(*version, *stage, *weights),
                size: scenario.snapshot.size,
            };
            StoredStage { holders: vec![first], files: vec![file] }
        };
        let stages = files.iter().map(stage).collect();
        Self { record: Some(Founding { number: 1, version, stages }), files }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::run;

    /// Seeds that are tried; most have a version to begin at.
    const SEEDS: u64 = 100;

    /// The scenario with a beginning in the middle of the run; `None` if it has no middle.
    fn founded(scenario: Scenario) -> Option<Scenario> {
        let (first, steps) =
            (scenario.manifest.first_version().0, scenario.manifest.training.steps);
        (steps >= first + 2).then_some(Scenario { founded: Step((first + steps) / 2), ..scenario })
    }

    fn check(scenario: impl Fn(u64) -> Scenario) {
        let mut tried = 0;
        for seed in 0..SEEDS {
            let whole = scenario(seed);
            let Some(founded) = founded(whole.clone()) else { continue };
            let report = run(&founded).unwrap_or_else(|held| panic!("seed {seed}: {held}"));
            if report.stopped.is_none() {
                let alone = run(&whole.alone()).unwrap_or_else(|held| panic!("{seed}: {held}"));
                assert_eq!(report.checkpoint, alone.checkpoint, "seed {seed}");
                tried += 1;
            }
        }
        assert!(tried > SEEDS / 4, "{tried} runs have a middle");
    }

    #[test]
    fn a_run_that_is_founded_on_a_checkpoint_ends_with_the_same_model() {
        check(Scenario::from_seed);
    }

    #[test]
    fn faults_after_the_founding_change_nothing() {
        check(Scenario::faulty);
    }
}
