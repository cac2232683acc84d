//! Which stages a newcomer hosts.

use std::collections::{BTreeMap, BTreeSet};

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
    /// Its memory or disk is too small.
    #[error(
        "this peer has no room for {wanted}: {NO_ROOM_ADVICE}",
        wanted = stage.map_or("any stage".to_owned(), |stage| format!("stage {stage}"))
    )]
    NoRoom {
        /// The stage asked for, if it was one.
        stage: Option<Stage>,
    },
}

/// What who has no room can do.
pub const NO_ROOM_ADVICE: &str = "give it more memory or disk, or cut the run into more stages";

/// The span of a newcomer in a run of `stages` stages, which has room for those that it `fits`, each
/// alone. `replicas` counts the replicas that each stage has; stages without any may be missing.
/// `Auto` takes the stage with the fewest, the lowest of several.
///
/// # Errors
/// When the run has no such stage, or the newcomer no room for it.
///
/// # Panics
/// When the run has no stages.
pub fn place(
    choice: StageChoice,
    stages: u16,
    fits: &BTreeSet<Stage>,
    replicas: &BTreeMap<Stage, usize>,
) -> Result<StageSpan, PlacementError> {
    assert!(stages > 0, "a run has stages");
    let last = Stage(stages - 1);
    match choice {
        // Whether all of them fit together only the peer itself can tell.
        StageChoice::All => Ok(StageSpan::all(stages)),
        StageChoice::One(stage) if stage > last => Err(PlacementError::NoSuchStage { stage, last }),
        StageChoice::One(stage) if !fits.contains(&stage) => {
            Err(PlacementError::NoRoom { stage: Some(stage) })
        }
        StageChoice::One(stage) => Ok(StageSpan::one(stage)),
        StageChoice::None => Ok(StageSpan::none()),
        StageChoice::Auto => {
            let count = |stage: &Stage| replicas.get(stage).copied().unwrap_or(0);
            let possible = (0..stages).map(Stage).filter(|stage| fits.contains(stage));
            let neediest = possible.min_by_key(count);
            neediest.map(StageSpan::one).ok_or(PlacementError::NoRoom { stage: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(stages: u16) -> BTreeSet<Stage> {
        (0..stages).map(Stage).collect()
    }

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
            let span = place(StageChoice::Auto, 3, &all(3), &counts(replicas));
            assert_eq!(span, Ok(StageSpan::one(Stage(stage))), "{replicas:?}");
        }
    }

    #[test]
    fn newcomers_by_auto_cover_every_stage_before_any_is_doubled() {
        let mut replicas = BTreeMap::new();
        for _ in 0..8 {
            let span = place(StageChoice::Auto, 8, &all(8), &replicas).expect("always possible");
            *replicas.entry(span.first).or_insert(0) += 1;
        }
        assert_eq!(replicas, counts(&[1; 8]));
    }

    #[test]
    fn a_choice_is_honoured_or_refused() {
        let placed = |choice| place(choice, 2, &all(2), &counts(&[5, 0]));
        assert_eq!(placed(StageChoice::All), Ok(StageSpan::all(2)));
        assert_eq!(placed(StageChoice::One(Stage(0))), Ok(StageSpan::one(Stage(0))));
        assert_eq!(placed(StageChoice::None), Ok(StageSpan::none()));
        let refused = placed(StageChoice::One(Stage(2))).expect_err("no such stage");
        assert_eq!(refused.to_string(), "the run has no stage 2: choose one from 0 to 1, or auto");
    }

    #[test]
    fn nobody_is_given_more_than_it_has_room_for() {
        let fits = BTreeSet::from([Stage(1), Stage(2)]);
        let placed = |choice| place(choice, 3, &fits, &counts(&[0, 4, 5]));
        assert_eq!(placed(StageChoice::Auto), Ok(StageSpan::one(Stage(1))));
        let no_room = PlacementError::NoRoom { stage: Some(Stage(0)) };
        assert_eq!(placed(StageChoice::One(Stage(0))), Err(no_room));
        let none = place(StageChoice::Auto, 3, &BTreeSet::new(), &counts(&[]));
        assert_eq!(none, Err(PlacementError::NoRoom { stage: None }));
    }
}
