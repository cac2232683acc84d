//! The number of a step for people, the same in log lines, `shoal status`, `shoal top`, the web page and events: step N is
//! the Nth of the run, and the version of the weights after it is N. Inside, a step's index is the version that it reads.

use std::fmt;

/// A number of committed steps, which is also the version of the weights after them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StepCount(u64);

impl StepCount {
    /// The steps up to the one with an index, which it is once that one is committed.
    pub(crate) fn through(index: u64) -> Self {
        Self(index.saturating_add(1))
    }

    /// The steps that a version of the weights has had.
    pub(crate) fn of_version(version: u64) -> Self {
        Self(version)
    }

    /// The bare number.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// The step and the length of the run: `step 40 of 200`.
    pub(crate) fn of(self, steps: u64) -> String {
        format!("{self} of {steps}")
    }
}

impl fmt::Display for StepCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::ContentHash;

    use super::*;
    use crate::event_text::describe;
    use crate::events::RunEvent;
    use crate::progress::step_line;
    use crate::status::{Observation, RunStatus, Status, StatusWatch, example, labels};
    use crate::training_rate::TrainingRate;
    use crate::training_rate::tests::step;

    /// The line in the log and the status after the commit of the step with an index, of 200.
    fn after(index: u64) -> (String, Status) {
        let committed = step(index, 4.0);
        let mut rate = TrainingRate::default();
        rate.note(&committed);
        rate.steps = 200;
        let line = step_line(&rate.describe(&committed));
        let Status { node, run, members, .. } = example::status();
        let run = run.map(|run| RunStatus { version: 0, ..run });
        let watch = StatusWatch::default();
        watch.see(Observation { node, run, view: 1, members });
        watch.note(&RunEvent::Committed(committed));
        (line, watch.status())
    }

    #[test]
    fn every_view_counts_a_moment_alike() {
        for index in [0, 39] {
            let (line, status) = after(index);
            let count = StepCount::through(index);
            assert_eq!(count.to_string(), format!("step {}", index + 1));
            assert!(line.starts_with(&format!("{count}/200  loss ")), "{line}");
            let run = status.run.as_ref().expect("there is one");
            assert_eq!(StepCount::of_version(run.version), count);
            assert_eq!(status.training.step, Some(count.number()), "page and `shoal top`");
            assert_eq!(status.curves.loss.last().map(|point| point.0), Some(count.number()));
            let standing = labels::standing(&status);
            let of = |name| &standing.iter().find(|(found, _)| *found == name).expect("a line").1;
            assert!(of("run").contains(&format!(": {}, era", count.of(200))), "{}", of("run"));
            assert!(of("training").starts_with(&format!("{count}: loss ")), "{}", of("training"));
            let hash = ContentHash([1; 32]);
            let saved =
                RunEvent::Checkpoint { version: index + 1, directory: "there".to_owned(), hash };
            let text = describe(&saved).expect("it is shown");
            assert!(text.contains(&format!("{count} ")), "{text}");
        }
    }
}
