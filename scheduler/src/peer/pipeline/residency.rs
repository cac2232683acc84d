//! The order of passes at a peer whose memory holds only some of its stages at a time (ATOM, arXiv
//! 2403.10504).
//!
//! A *visit* runs all passes of one stage that wait, so its weights are loaded once for all of them. Visits
//! go up the stages with forward passes; the last stage turns round without leaving; then they go down with
//! backward passes. Meanwhile the next stage is loaded.

use std::collections::BTreeSet;

use shoal_protocol::ids::{ClaimKey, Microbatch, Stage, Step};

use super::job::Pass;

/// Forward passes that wait, of the latest stage first within a step.
pub(super) type Forwards = BTreeSet<(Step, std::cmp::Reverse<Stage>, Microbatch)>;
/// Backward passes that wait, of the first stage first within a step.
pub(super) type Backwards = BTreeSet<(Step, Stage, Microbatch)>;

/// A stage that is in memory, and the direction of its visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Visit {
    pub(super) stage: Stage,
    pub(super) upwards: bool,
}

impl Visit {
    /// The stage that is probably visited next, of a peer that hosts `hosted`.
    pub(super) fn next(self, hosted: &BTreeSet<Stage>) -> Option<Self> {
        let turns = hosted.last() == Some(&self.stage);
        if self.upwards && !turns {
            let stage = *hosted.range(self.stage.next()..).next()?;
            return Some(Self { stage, upwards: true });
        }
        let stage = *hosted.range(..self.stage).next_back()?;
        Some(Self { stage, upwards: false })
    }
}

/// Chooses the next pass of a step, at or after a visit.
pub(super) fn choose(
    step: Step,
    here: Option<Visit>,
    forward: &Forwards,
    backward: &Backwards,
) -> Option<(Visit, Pass)> {
    let up = |stage| Visit { stage, upwards: true };
    let down = |stage| Visit { stage, upwards: false };
    if let Some(visit) = here {
        if let Some(pass) = backward_at(step, visit.stage..=visit.stage, backward) {
            return Some((visit, Pass::Backward(pass)));
        }
        if let Some(pass) = forward_at(step, visit.stage..=visit.stage, forward) {
            // At the end of the way down the next way up begins.
            let turns = backward_at(step, Stage(0)..=visit.stage, backward).is_none();
            return Some((if turns { up(visit.stage) } else { visit }, Pass::Forward(pass)));
        }
        if visit.upwards
            && let Some(pass) = forward_at(step, visit.stage..=LAST, forward)
        {
            return Some((up(pass.stage), Pass::Forward(pass)));
        }
        if let Some(pass) = backward_at(step, Stage(0)..=visit.stage, backward) {
            return Some((down(pass.stage), Pass::Backward(pass)));
        }
    }
    if let Some(pass) = backward_at(step, Stage(0)..=LAST, backward) {
        return Some((down(pass.stage), Pass::Backward(pass)));
    }
    let pass = forward_at(step, Stage(0)..=LAST, forward)?;
    Some((up(pass.stage), Pass::Forward(pass)))
}

const LAST: Stage = Stage(u16::MAX);
const MICROBATCHES: [Microbatch; 2] = [Microbatch(0), Microbatch(u32::MAX)];

/// The first forward pass of the first of these stages that has one.
fn forward_at(
    step: Step,
    stages: std::ops::RangeInclusive<Stage>,
    forward: &Forwards,
) -> Option<ClaimKey> {
    use std::cmp::Reverse;
    let (first, last) = stages.into_inner();
    let [low, high] = MICROBATCHES;
    let all = (step, Reverse(last), low)..=(step, Reverse(first), high);
    let (_, Reverse(stage), _) = *forward.range(all).next_back()?;
    let of_stage = (step, Reverse(stage), low)..=(step, Reverse(stage), high);
    let (_, _, microbatch) = *forward.range(of_stage).next()?;
    Some(ClaimKey { step, stage, microbatch })
}

/// The first backward pass of the last of these stages that has one.
fn backward_at(
    step: Step,
    stages: std::ops::RangeInclusive<Stage>,
    backward: &Backwards,
) -> Option<ClaimKey> {
    let (first, last) = stages.into_inner();
    let [low, high] = MICROBATCHES;
    let (_, stage, _) = *backward.range((step, first, low)..=(step, last, high)).next_back()?;
    let (_, _, microbatch) = *backward.range((step, stage, low)..=(step, stage, high)).next()?;
    Some(ClaimKey { step, stage, microbatch })
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use super::*;

    /// Runs a step of a pipeline at one peer, and returns the stages of its visits in order.
    fn visits(stages: u16, microbatches: u32) -> Vec<u16> {
        let step = Step(3);
        let mut forward: Forwards =
            (0..microbatches).map(|index| (step, Reverse(Stage(0)), Microbatch(index))).collect();
        let mut backward = Backwards::new();
        let (mut here, mut order, mut ended) = (None, Vec::new(), 0);
        while let Some((visit, pass)) = choose(step, here, &forward, &backward) {
            if here.map(|visit: Visit| visit.stage) != Some(visit.stage) {
                order.push(visit.stage.0);
            }
            here = Some(visit);
            match pass {
                Pass::Forward(ClaimKey { stage, microbatch, .. }) => {
                    assert!(forward.remove(&(step, Reverse(stage), microbatch)));
                    if stage.0 + 1 < stages {
                        forward.insert((step, Reverse(stage.next()), microbatch));
                    } else {
                        backward.insert((step, stage, microbatch));
                    }
                }
                Pass::Backward(ClaimKey { stage, microbatch, .. }) => {
                    assert!(backward.remove(&(step, stage, microbatch)));
                    match stage.0.checked_sub(1) {
                        Some(before) => assert!(backward.insert((step, Stage(before), microbatch))),
                        None => ended += 1,
                    }
                }
            }
        }
        assert_eq!(ended, microbatches);
        order
    }

    #[test]
    fn each_stage_is_visited_once_on_the_way_up_and_once_on_the_way_down() {
        assert_eq!(visits(4, 5), [0, 1, 2, 3, 2, 1, 0]);
        assert_eq!(visits(1, 3), [0]);
        assert_eq!(visits(2, 1), [0, 1, 0]);
    }

    #[test]
    fn the_next_stage_is_the_next_one_hosted_in_the_direction_of_the_visit() {
        let hosted = BTreeSet::from([Stage(2), Stage(3), Stage(5)]);
        let visit = |stage, upwards| Visit { stage: Stage(stage), upwards };
        assert_eq!(visit(3, true).next(&hosted), Some(visit(5, true)));
        assert_eq!(visit(5, true).next(&hosted), Some(visit(3, false)));
        assert_eq!(visit(3, false).next(&hosted), Some(visit(2, false)));
        assert_eq!(visit(2, false).next(&hosted), None);
    }
}
