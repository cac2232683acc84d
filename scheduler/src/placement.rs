//! Assigns stages to newcomers.

use std::collections::BTreeSet;

use shoal_protocol::ids::{PeerId, Stage, StageSpan};
use shoal_protocol::message::StageChoice;

use crate::locality::Locality;
use crate::throughput::StageThroughputs;

/// Why a newcomer cannot host the requested stages.
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
    /// The peer's memory or disk is too small.
    #[error(
        "this peer has no room for {wanted}: {NO_ROOM_ADVICE}",
        wanted = stage.map_or("any stage".to_owned(), |stage| format!("stage {stage}"))
    )]
    NoRoom {
        /// The requested stage, if one was named.
        stage: Option<Stage>,
    },
}

/// Advice for a peer without room.
pub const NO_ROOM_ADVICE: &str = "give it more memory or disk, or cut the run into more stages";

/// The span of a newcomer in a run of `stages` stages. `fits` are the stages that it can host, each
/// alone. `Auto` selects the stage that needs a host most, given the throughput with present and
/// arriving hosts; among several, the nearest.
///
/// # Errors
/// If the run has no such stage, or the newcomer no room for it.
///
/// # Panics
/// If the run has no stages.
pub fn place<'a>(
    newcomer: PeerId,
    choice: StageChoice,
    stages: u16,
    fits: &BTreeSet<Stage>,
    throughput: &StageThroughputs,
    locality: impl FnOnce() -> Locality<'a>,
) -> Result<StageSpan, PlacementError> {
    assert!(stages > 0, "a run has stages");
    let last = Stage(stages - 1);
    match choice {
        // Only the peer itself can tell whether several stages fit together.
        StageChoice::All => Ok(StageSpan::all(stages)),
        StageChoice::Span(span) if span.last > last => {
            Err(PlacementError::NoSuchStage { stage: span.last, last })
        }
        StageChoice::Span(span) => match span.stages().find(|stage| !fits.contains(stage)) {
            Some(stage) => Err(PlacementError::NoRoom { stage: Some(stage) }),
            None => Ok(span),
        },
        StageChoice::None => Ok(StageSpan::none()),
        StageChoice::Auto => {
            let neediest = throughput.neediest(fits, newcomer);
            let chosen = match neediest[..] {
                [] | [_] => neediest.first().copied(),
                _ => {
                    let locality = locality();
                    neediest.into_iter().min_by_key(|stage| locality.cost(newcomer, *stage))
                }
            };
            chosen.map(StageSpan::one).ok_or(PlacementError::NoRoom { stage: None })
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::units::Moment;

    use super::*;
    use crate::locality::{LinkEstimates, Load};
    use crate::throughput::{ServiceTimes, Throughput};

    fn all(stages: u16) -> BTreeSet<Stage> {
        (0..stages).map(Stage).collect()
    }

    /// Stages with these numbers of equal replicas.
    fn counts(replicas: &[usize]) -> StageThroughputs {
        let service_times = ServiceTimes::default();
        let stages = replicas.len() as u16;
        let mut throughput =
            StageThroughputs::of(stages, [], &service_times.estimates(stages, Moment::default()));
        for (stage, count) in (0..).map(Stage).zip(replicas) {
            (0..*count).for_each(|_| throughput.add(StageSpan::one(stage), Throughput(100)));
        }
        throughput
    }

    /// Places a newcomer without any link estimates.
    fn placed(
        newcomer: PeerId,
        choice: StageChoice,
        fits: &BTreeSet<Stage>,
        replicas: &[usize],
    ) -> Result<StageSpan, PlacementError> {
        let (link_estimates, load) = (LinkEstimates::default(), Load::of_stages(replicas.len()));
        let locality = || Locality::new(&link_estimates, &load, std::iter::empty(), 0);
        let stages = replicas.len() as u16;
        place(newcomer, choice, stages, fits, &counts(replicas), locality)
    }

    const NEWCOMER: PeerId = PeerId([1; 32]);

    #[test]
    fn auto_selects_the_stage_with_fewest_replicas_and_the_lowest_empty_one() {
        for (replicas, stage) in
            [([0, 0, 0], 0), ([1, 0, 0], 1), ([1, 1, 0], 2), ([2, 1, 2], 1), ([3, 2, 1], 2)]
        {
            let span = placed(NEWCOMER, StageChoice::Auto, &all(3), &replicas);
            assert_eq!(span, Ok(StageSpan::one(Stage(stage))), "{replicas:?}");
        }
    }

    #[test]
    fn newcomers_by_auto_cover_every_stage_before_any_is_doubled() {
        let mut replicas = [0; 8];
        for number in 0..8 {
            let newcomer = PeerId([number; 32]);
            let span = placed(newcomer, StageChoice::Auto, &all(8), &replicas);
            replicas[usize::from(span.expect("always possible").first.0)] += 1;
        }
        assert_eq!(replicas, [1; 8]);
    }

    #[test]
    fn a_choice_is_honoured_or_refused() {
        let placed = |choice| super::tests::placed(NEWCOMER, choice, &all(2), &[5, 0]);
        assert_eq!(placed(StageChoice::All), Ok(StageSpan::all(2)));
        assert_eq!(
            placed(StageChoice::Span(StageSpan::one(Stage(0)))),
            Ok(StageSpan::one(Stage(0)))
        );
        assert_eq!(placed(StageChoice::None), Ok(StageSpan::none()));
        let refused =
            placed(StageChoice::Span(StageSpan::one(Stage(2)))).expect_err("no such stage");
        assert_eq!(refused.to_string(), "the run has no stage 2: choose one from 0 to 1, or auto");
    }

    #[test]
    fn no_peer_gets_a_stage_without_room_for_it() {
        let fits = BTreeSet::from([Stage(1), Stage(2)]);
        let placed = |choice| super::tests::placed(NEWCOMER, choice, &fits, &[0, 4, 5]);
        assert_eq!(placed(StageChoice::Auto), Ok(StageSpan::one(Stage(1))));
        let no_room = PlacementError::NoRoom { stage: Some(Stage(0)) };
        assert_eq!(placed(StageChoice::Span(StageSpan::one(Stage(0)))), Err(no_room));
        let none = super::tests::placed(NEWCOMER, StageChoice::Auto, &BTreeSet::new(), &[0; 3]);
        assert_eq!(none, Err(PlacementError::NoRoom { stage: None }));
    }
}
