//! What the log says of a run: everything that a coordinator must know of those before it.

use std::collections::BTreeMap;

use crate::ids::{Era, Incarnation, Member, PeerId, Step, Term};
use crate::limits;
use crate::message::{CommitRecord, LogRecord, StoredStage, View, ViewChange, is_stopped};

/// A run as its log's records leave it, taken in one after the other from the first.
#[derive(Debug, Clone, PartialEq, Default, bincode::Encode, bincode::Decode)]
pub struct History {
    /// The newest term.
    pub term: Term,
    /// The newest membership.
    pub view: View,
    /// The newest life of each peer that ever was a member.
    pub lives: BTreeMap<PeerId, Incarnation>,
    /// The present era.
    pub era: Era,
    /// The version of the weights that the era began at.
    pub began_at: Step,
    /// The version of the weights: steps committed.
    pub version: Step,
    /// The commit that made this version; none where the era began at it.
    pub commit: Option<CommitRecord>,
    /// The newest complete checkpoints, oldest first.
    pub checkpoints: BTreeMap<Step, Vec<StoredStage>>,
    /// Whether the run is over.
    pub completed: bool,
}

/// A record that does not follow those before it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// A term that is over.
    #[error("term {term} does not follow term {last}")]
    Term {
        /// The record's.
        term: Term,
        /// The newest before it.
        last: Term,
    },
    /// A change of another membership than the newest.
    #[error("membership {number}, made of membership {since}, does not follow membership {last}")]
    View {
        /// The record's.
        number: u64,
        /// What it begins from.
        since: u64,
        /// The newest before it.
        last: u64,
    },
    /// More members than a run has.
    #[error("membership {number} has {count} members: a run has {} at most", limits::MEMBERS)]
    Members {
        /// The record's.
        number: u64,
        /// How many there would be.
        count: usize,
    },
    /// A second commit of a step, one of another era, or one ahead of its time.
    #[error(
        "a commit of step {step} in era {era} does not make version {version} of era {now} a newer one"
    )]
    Commit {
        /// The record's era.
        era: Era,
        /// Its step.
        step: Step,
        /// The present era.
        now: Era,
        /// The present version.
        version: Step,
    },
    /// A checkpoint of what is not trained yet.
    #[error("a checkpoint of version {version} is ahead of version {now}")]
    Checkpoint {
        /// The record's version.
        version: Step,
        /// The present one.
        now: Step,
    },
    /// A rewind into the past or the future.
    #[error("a rewind to version {version} in era {era} does not follow era {last}")]
    Rewind {
        /// The record's era.
        era: Era,
        /// Its version.
        version: Step,
        /// The era before.
        last: Era,
    },
}

impl History {
    /// Takes in the next record.
    ///
    /// # Errors
    /// When it does not follow those before it; then nothing changes.
    pub fn apply(&mut self, record: &LogRecord) -> Result<(), HistoryError> {
        match record {
            LogRecord::Term(term) => self.begin_term(*term),
            LogRecord::View(view) => self.change_view(view),
            LogRecord::Commit(commit) => self.commit(commit),
            LogRecord::Rewind { era, version } => self.rewind(*era, *version),
            LogRecord::Checkpoint { version, stages, oldest } => {
                self.save(*version, stages, *oldest)
            }
            LogRecord::Completed => {
                self.completed = true;
                Ok(())
            }
        }
    }

    /// Whether anything was ever trained, as far as that is written down.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        let stopped = is_stopped(self.view.members.iter().map(AsRef::as_ref));
        self.version > Step(0) || self.era > Era(0) || stopped
    }

    fn save(
        &mut self,
        version: Step,
        stages: &[StoredStage],
        oldest: Step,
    ) -> Result<(), HistoryError> {
        if version > self.version {
            return Err(HistoryError::Checkpoint { version, now: self.version });
        }
        self.checkpoints.insert(version, stages.to_vec());
        self.checkpoints.retain(|saved, _| *saved >= oldest);
        while self.checkpoints.len() > limits::CHECKPOINTS as usize {
            self.checkpoints.pop_first();
        }
        Ok(())
    }

    fn begin_term(&mut self, term: Term) -> Result<(), HistoryError> {
        if term <= self.term {
            return Err(HistoryError::Term { term, last: self.term });
        }
        self.term = term;
        Ok(())
    }

    fn change_view(&mut self, change: &ViewChange) -> Result<(), HistoryError> {
        let (number, since, last) = (change.number, change.since, self.view.number);
        if since != last || number <= last {
            return Err(HistoryError::View { number, since, last });
        }
        let mut view = self.view.clone();
        let _gone = view.take(change);
        let count = view.members.len();
        if count > limits::MEMBERS {
            return Err(HistoryError::Members { number, count });
        }
        self.view = view;
        for record in &change.here {
            let Member { peer, incarnation } = record.member;
            let known = self.lives.entry(peer).or_insert(incarnation);
            *known = incarnation.max(*known);
        }
        Ok(())
    }

    fn commit(&mut self, commit: &CommitRecord) -> Result<(), HistoryError> {
        let CommitRecord { era, step, .. } = *commit;
        if era != self.era || step != self.version {
            let (now, version) = (self.era, self.version);
            return Err(HistoryError::Commit { era, step, now, version });
        }
        self.version = step.next();
        self.commit = Some(commit.clone());
        Ok(())
    }

    fn rewind(&mut self, era: Era, version: Step) -> Result<(), HistoryError> {
        if era <= self.era || version > self.version {
            return Err(HistoryError::Rewind { era, version, last: self.era });
        }
        self.era = era;
        self.began_at = version;
        self.version = version;
        self.commit = None;
        // A newer one could not be had. What is computed again is saved again, and is the same.
        self.checkpoints.retain(|saved, _| *saved <= version);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::StageSpan;
    use crate::message::{Duties, FixedLoss, MemberRecord};

    fn commit(era: u32, step: u64) -> LogRecord {
        LogRecord::Commit(CommitRecord {
            era: Era(era),
            term: Term(1),
            step: Step(step),
            stages: Vec::new(),
            gradient_norm: 1.0,
            loss: FixedLoss(0),
            held_out_loss: None,
        })
    }

    fn view(number: u64, life: u64) -> LogRecord {
        let member = Member { peer: PeerId([1; 32]), incarnation: Incarnation(life) };
        let record = MemberRecord {
            member,
            span: StageSpan::one(crate::ids::Stage(0)),
            addresses: Vec::new(),
            serving: true,
            duties: Duties::default(),
            mobile: false,
            moves: None,
        };
        let since = number - 1;
        let here = vec![record.into()];
        LogRecord::View(ViewChange { since, number, here, ..ViewChange::default() })
    }

    #[test]
    fn a_step_is_committed_once_in_an_era() {
        let mut history = History::default();
        history.apply(&commit(0, 0)).expect("the first");
        let before = history.clone();
        for wrong in [commit(0, 0), commit(0, 2), commit(1, 1)] {
            assert!(matches!(history.apply(&wrong), Err(HistoryError::Commit { .. })));
            assert_eq!(history, before);
        }
        history.apply(&commit(0, 1)).expect("the next");
        assert_eq!(history.version, Step(2));
    }

    #[test]
    fn a_rewind_ends_an_era() {
        let mut history = History::default();
        for record in [view(1, 4), commit(0, 0), commit(0, 1)] {
            history.apply(&record).expect("in order");
        }
        history.apply(&LogRecord::Rewind { era: Era(1), version: Step(1) }).expect("back");
        assert_eq!((history.version, history.began_at), (Step(1), Step(1)));
        assert!(history.commit.is_none());
        let again = LogRecord::Rewind { era: Era(1), version: Step(0) };
        assert!(matches!(history.apply(&again), Err(HistoryError::Rewind { .. })));
        assert!(matches!(history.apply(&commit(0, 1)), Err(HistoryError::Commit { .. })));
        history.apply(&commit(1, 1)).expect("computed again");
    }

    #[test]
    fn terms_and_views_only_grow_and_lives_are_remembered() {
        let mut history = History::default();
        for record in [LogRecord::Term(Term(1)), view(1, 4), view(2, 3)] {
            history.apply(&record).expect("in order");
        }
        assert!(matches!(history.apply(&LogRecord::Term(Term(1))), Err(HistoryError::Term { .. })));
        for wrong in [view(2, 5), view(4, 5)] {
            assert!(matches!(history.apply(&wrong), Err(HistoryError::View { .. })));
        }
        assert_eq!(history.lives.get(&PeerId([1; 32])), Some(&Incarnation(4)));
    }

    #[test]
    fn the_newest_checkpoints_are_remembered() {
        let mut history = History::default();
        let save = |version: u64| {
            let oldest = Step(version.saturating_sub(1));
            LogRecord::Checkpoint { version: Step(version), stages: Vec::new(), oldest }
        };
        let ahead = history.apply(&save(1));
        assert!(matches!(ahead, Err(HistoryError::Checkpoint { .. })), "{ahead:?}");
        for step in 0..3 {
            history.apply(&commit(0, step)).expect("the next");
            history.apply(&save(step + 1)).expect("of now");
        }
        let kept = |history: &History| -> Vec<u64> {
            history.checkpoints.keys().map(|version| version.0).collect()
        };
        assert_eq!(kept(&history), [2, 3]);
        history.apply(&LogRecord::Rewind { era: Era(1), version: Step(2) }).expect("back");
        assert_eq!(kept(&history), [2], "the newest could not be had");
    }
}
