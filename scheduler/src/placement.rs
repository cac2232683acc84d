//! Which stages a newcomer hosts.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Stage, StageSpan};
use shoal_protocol::message::StageChoice;

/// Why a newcomer cannot host what it asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The run has no such stage.
    #[error("the run has no stage {stage}: choose one from 0 to {last}, or auto")]
    NoSuchStage {
        /// The stage asked for.
        stage: Stage,
        /// The run's last stage.
        last: Stage,
    },
}

/// The span of a newcomer in a run of `stages` stages. `replicas` counts the replicas that each
/// stage has; stages without any may be missing. `Auto` takes the stage with the fewest, the lowest
/// of several.
///
/// # Errors
/// When the run has no such stage.
///
/// # Panics
/// When the run has no stages.
pub fn place(
    choice: StageChoice,
    stages: u16,
    replicas: &BTreeMap<Stage, usize>,
) -> Result<StageSpan, PlacementError> {
    assert!(stages > 0, "a run has stages");
    let last = Stage(stages - 1);
    match choice {
        StageChoice::All => Ok(StageSpan::all(stages)),
        StageChoice::One(stage) if stage > last => Err(PlacementError::NoSuchStage { stage, last }),
        StageChoice::One(stage) => Ok(StageSpan::one(stage)),
        StageChoice::Auto => {
            let count = |stage: &Stage| replicas.get(stage).copied().unwrap_or(0);
            let neediest = (0..stages).map(Stage).min_by_key(count).expect("there are stages");
            Ok(StageSpan::one(neediest))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(replicas: &[usize]) -> BTreeMap<Stage, usize> {
        (0..).map(Stage).zip(replicas.iter().copied()).collect()
    }

    #[test]
    fn auto_takes_the_stage_with_fewest_replicas_and_the_lowest_of_several() {
        for (replicas, stage) in [
            (&[][..], 0),
            (&[1], 1),
            (&[1, 1], 2),
            (&[2, 1, 1], 1),
            (&[1, 1, 1], 0),
            (&[3, 2, 1], 2),
        ] {
            let span = place(StageChoice::Auto, 3, &counts(replicas));
            assert_eq!(span, Ok(StageSpan::one(Stage(stage))), "{replicas:?}");
        }
    }

    #[test]
    fn newcomers_by_auto_cover_every_stage_before_any_is_doubled() {
        let mut replicas = BTreeMap::new();
        for _ in 0..8 {
            let span = place(StageChoice::Auto, 8, &replicas).expect("always possible");
            *replicas.entry(span.first).or_insert(0) += 1;
        }
        assert_eq!(replicas, counts(&[1; 8]));
    }

    #[test]
    fn a_choice_is_honoured_or_refused() {
        let replicas = counts(&[5, 0]);
        assert_eq!(place(StageChoice::All, 2, &replicas), Ok(StageSpan::all(2)));
        let first = StageSpan::one(Stage(0));
        assert_eq!(place(StageChoice::One(Stage(0)), 2, &replicas), Ok(first));
        let refused = place(StageChoice::One(Stage(2)), 2, &replicas).expect_err("no such stage");
        assert_eq!(refused.to_string(), "the run has no stage 2: choose one from 0 to 1, or auto");
    }
}
