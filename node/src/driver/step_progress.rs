//! How far this peer is in the open step, for people who wait for a long one.

use std::collections::BTreeMap;
use std::time::Duration;

use shoal_formats::open_step::OpenStep;
use shoal_protocol::ids::{ClaimKey, Stage, Step};
use shoal_protocol::units::Moment;

/// How long a step lasts before its progress is reported, and how often.
const EVERY: Duration = Duration::from_secs(30);

/// The microbatches of the open steps that this peer has done.
#[derive(Debug, Default)]
pub(super) struct StepProgress {
    /// Microbatches of each step and hosted stage. A microbatch of all hosted stages ends at the lowest one.
    done: BTreeMap<(Step, Stage), u32>,
    /// When the newest step was committed, or progress was reported since.
    reported_at: Moment,
    /// What was reported since.
    reported: Option<OpenStep>,
}

impl StepProgress {
    /// Counts a microbatch of a stage.
    pub(super) fn counted(&mut self, key: ClaimKey) {
        *self.done.entry((key.step, key.stage)).or_default() += 1;
    }

    /// Takes in a commit, after which this version of the weights is the newest.
    pub(super) fn committed(&mut self, now: Moment, version: Step) {
        self.done = self.done.split_off(&(version, Stage(0)));
        (self.reported_at, self.reported) = (now, None);
    }

    /// Takes in a return to a checkpoint.
    pub(super) fn rewound(&mut self, now: Moment) {
        *self = Self { reported_at: now, ..Self::default() };
    }

    /// The oldest open step, of which this peer has done a microbatch.
    pub(super) fn open_step(&self, microbatches: u32) -> Option<OpenStep> {
        let ((step, _), done) = self.done.first_key_value()?;
        Some(OpenStep { step: step.0, done: *done, microbatches })
    }

    /// The progress of a step that takes long, if it is due and something was done since the last time.
    pub(super) fn due(&mut self, now: Moment, microbatches: u32) -> Option<OpenStep> {
        if now < self.reported_at + EVERY {
            return None;
        }
        let open_step =
            self.open_step(microbatches).filter(|open| Some(open) != self.reported.as_ref())?;
        self.reported_at = now;
        self.reported = Some(open_step.clone());
        Some(open_step)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::Microbatch;

    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    fn key(step: u64, stage: u16, microbatch: u32) -> ClaimKey {
        let (step, stage, microbatch) = (Step(step), Stage(stage), Microbatch(microbatch));
        ClaimKey { step, stage, microbatch }
    }

    fn open(step: u64, done: u32) -> Option<OpenStep> {
        Some(OpenStep { step, done, microbatches: 16 })
    }

    #[test]
    fn a_long_step_is_reported_at_intervals_while_it_goes_on() {
        let mut progress = StepProgress::default();
        assert_eq!(progress.due(at(60), 16), None, "nothing is done yet");
        // The upper stage is ahead.
        for done in [key(0, 2, 0), key(0, 2, 1), key(0, 1, 0)] {
            progress.counted(done);
        }
        assert_eq!(progress.due(at(29), 16), None);
        assert_eq!(progress.due(at(30), 16), open(0, 1));
        progress.counted(key(0, 1, 1));
        assert_eq!(progress.due(at(59), 16), None);
        assert_eq!(progress.due(at(60), 16), open(0, 2));
        assert_eq!(progress.due(at(90), 16), None, "nothing was done since");
    }

    #[test]
    fn a_commit_begins_the_next_step_and_a_rewind_begins_anew() {
        let mut progress = StepProgress::default();
        progress.counted(key(4, 0, 0));
        progress.counted(key(5, 0, 0));
        progress.committed(at(100), Step(5));
        assert_eq!(progress.open_step(16), open(5, 1));
        assert_eq!(progress.due(at(129), 16), None);
        assert_eq!(progress.due(at(130), 16), open(5, 1));
        progress.rewound(at(140));
        assert_eq!((progress.open_step(16), progress.due(at(200), 16)), (None, None));
    }
}
