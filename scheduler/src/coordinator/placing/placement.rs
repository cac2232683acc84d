//! Assigns stages to newcomers.

use std::collections::BTreeSet;

use shoal_protocol::ids::{PeerId, Stage, StageSpan};
use shoal_protocol::message::StageChoice;

use crate::coordinator::placing::locality::Locality;
use crate::coordinator::placing::throughput::StageThroughputs;

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

/// What a newcomer offers.
#[derive(Debug)]
pub struct Offer<'a> {
    /// The newcomer.
    pub newcomer: PeerId,
    /// The stages that it asks for.
    pub choice: StageChoice,
    /// The stages that it can host, each alone.
    pub fits: &'a BTreeSet<Stage>,
    /// How many stages in a row it gets at most, whichever; 0 if it has no choice of stages.
    pub longest: u16,
    /// The number of newcomers that the run waits for, this one included.
    pub to_come: usize,
}

/// The span of a newcomer in a run of `stages` stages. `Auto` selects the stage that needs a host most, given the
/// throughput with present and arriving hosts; among several, the nearest. Of stages without a host each newcomer takes
/// its part, as far as it has room, so that those to come cover all.
///
/// # Errors
/// If the run has no such stage, or the newcomer no room for it.
///
/// # Panics
/// If the run has no stages.
pub fn place<'a>(
    offer: &Offer<'_>,
    stages: u16,
    throughput: &StageThroughputs,
    locality: impl FnOnce() -> Locality<'a>,
) -> Result<StageSpan, PlacementError> {
    assert!(stages > 0, "a run has stages");
    let last = Stage(stages - 1);
    match offer.choice {
        // Only the peer itself can tell whether several stages fit together.
        StageChoice::All => Ok(StageSpan::all(stages)),
        StageChoice::Span(span) if span.last > last => {
            Err(PlacementError::NoSuchStage { stage: span.last, last })
        }
        StageChoice::Span(span) => match span.stages().find(|stage| !offer.fits.contains(stage)) {
            Some(stage) => Err(PlacementError::NoRoom { stage: Some(stage) }),
            None => Ok(span),
        },
        StageChoice::None => Ok(StageSpan::none()),
        StageChoice::Auto => {
            let lacking = Lacking::of(offer, stages, throughput);
            let mut neediest = throughput.neediest(offer.fits, offer.newcomer);
            neediest.retain(|stage| lacking.begins_a_part(*stage));
            let chosen = match neediest[..] {
                [] | [_] => neediest.first().copied(),
                _ => {
                    let locality = locality();
                    neediest.into_iter().min_by_key(|stage| locality.cost(offer.newcomer, *stage))
                }
            };
            let first = chosen.ok_or(PlacementError::NoRoom { stage: None })?;
            Ok(lacking.part(first))
        }
    }
}

/// The stages without a host for which a newcomer has room, in parts that the newcomers to come share.
struct Lacking {
    stages: BTreeSet<Stage>,
    /// The stages of a part.
    length: usize,
}

impl Lacking {
    fn of(offer: &Offer<'_>, stages: u16, throughput: &StageThroughputs) -> Self {
        let all = (0..stages).map(Stage).filter(|stage| throughput.hosts(*stage) == 0);
        let share = all.clone().count().div_ceil(offer.to_come.max(1));
        let length = share.min(usize::from(offer.longest)).max(1);
        Self { stages: all.filter(|stage| offer.fits.contains(stage)).collect(), length }
    }

    /// Whether a newcomer's part may begin at a stage: rows are divided from their first stage on, since what a
    /// newcomer leaves between its part and another host's needs a host of its own.
    fn begins_a_part(&self, stage: Stage) -> bool {
        let before = (0..stage.0).rev().map(Stage);
        let before = before.take_while(|stage| self.stages.contains(stage)).count();
        !self.stages.contains(&stage) || before.is_multiple_of(self.length)
    }

    /// The newcomer's part, from `first` on; `first` alone if it has a host.
    fn part(&self, first: Stage) -> StageSpan {
        let row = (first.0..).map(Stage).take(self.length);
        let last = row.take_while(|stage| self.stages.contains(stage)).last();
        StageSpan { first, last: last.unwrap_or(first) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shoal_protocol::message::LinkEstimate;
    use shoal_protocol::units::{Bytes, Moment};

    use super::*;
    use crate::coordinator::placing::locality::{LinkEstimates, Load};
    use crate::coordinator::placing::throughput::{ServiceTimes, Throughput};

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
        let offer = Offer { newcomer, choice, fits, longest: 1, to_come: 1 };
        place(&offer, stages, &counts(replicas), locality)
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
    fn newcomers_share_the_stages_without_a_host() {
        let fits = all(8);
        let placed = |replicas: &[usize], longest, to_come| {
            let (link_estimates, load) = (LinkEstimates::default(), Load::of_stages(8));
            let locality = || Locality::new(&link_estimates, &load, std::iter::empty(), 0);
            let choice = StageChoice::Auto;
            let offer = Offer { newcomer: NEWCOMER, choice, fits: &fits, longest, to_come };
            place(&offer, 8, &counts(replicas), locality).expect("there is room").to_string()
        };
        assert_eq!(placed(&[0; 8], 8, 1), "0-7");
        assert_eq!(placed(&[0; 8], 8, 3), "0-2");
        assert_eq!(placed(&[1, 1, 1, 0, 0, 0, 0, 0], 8, 2), "3-5");
        assert_eq!(placed(&[1, 1, 1, 1, 1, 1, 0, 0], 8, 1), "6-7");
        assert_eq!(placed(&[0; 8], 2, 1), "0-1", "at most so many");
        assert_eq!(placed(&[0; 8], 0, 1), "0", "no room for a choice");
        assert_eq!(placed(&[1, 0, 0, 1, 0, 0, 0, 0], 8, 1), "1-2", "stages in a row");
        assert_eq!(placed(&[1; 8], 8, 4).len(), 1, "all have a host");
    }

    /// The last stage has one neighbour only, so it costs least where all are far.
    #[test]
    fn far_neighbours_leave_no_stage_between_two_parts() {
        let neighbour = PeerId([2; 32]);
        let mut link_estimates = LinkEstimates::default();
        let round_trip = Duration::from_millis(80);
        link_estimates.note(NEWCOMER, &[(neighbour, LinkEstimate { round_trip, rate: None })]);
        let load = Load::with_gradients(Bytes(1_000), vec![Bytes(0); 6]);
        let placed = |replicas: &[usize], longest, to_come| {
            let hosts = [0, 1].map(|stage| (neighbour, Stage(stage)));
            let locality = || Locality::new(&link_estimates, &load, hosts.into_iter(), 0);
            let (choice, fits) = (StageChoice::Auto, &all(6));
            let offer = Offer { newcomer: NEWCOMER, choice, fits, longest, to_come };
            let span = place(&offer, 6, &counts(replicas), locality).expect("there is room");
            span.to_string()
        };
        assert_eq!(placed(&[1, 1, 0, 0, 0, 0], 1, 4), "5");
        assert_eq!(placed(&[1, 1, 0, 0, 0, 0], 2, 2), "2-3");
        assert_eq!(placed(&[1, 1, 1, 1, 0, 0], 2, 1), "4-5");
        assert_eq!(placed(&[1, 1, 0, 0, 0, 0], 6, 1), "2-5");
    }

    #[test]
    fn a_part_has_only_stages_with_room() {
        let (fits, replicas) = (BTreeSet::from([Stage(0), Stage(1), Stage(3)]), [0; 4]);
        let (link_estimates, load) = (LinkEstimates::default(), Load::of_stages(4));
        let locality = || Locality::new(&link_estimates, &load, std::iter::empty(), 0);
        let choice = StageChoice::Auto;
        let offer = Offer { newcomer: NEWCOMER, choice, fits: &fits, longest: 4, to_come: 1 };
        let span = place(&offer, 4, &counts(&replicas), locality).expect("there is room");
        assert_eq!(span.to_string(), "0-1");
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
