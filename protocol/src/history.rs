//! The state of a run according to its log: everything that a new coordinator must know of earlier
//! ones.

use std::collections::BTreeMap;

use crate::ids::{Era, Incarnation, Member, PeerId, Step, Term};
use crate::limits;
use crate::message::{
    CommitRecord, Founding, LogRecord, StoredStage, View, ViewChange, is_stopped,
};
use crate::stays::Stays;

/// A run's state after its log's records, applied in order from the first.
#[derive(Debug, Clone, PartialEq, Default, bincode::Encode, bincode::Decode)]
pub struct History {
    /// The newest term.
    pub term: Term,
    /// The newest membership.
    pub view: View,
    /// The newest incarnation of each peer that has ever been a member.
    pub lives: BTreeMap<PeerId, Incarnation>,
    /// The present era.
    pub era: Era,
    /// The version of the weights that the present era began at.
    pub began_at: Step,
    /// The version of the weights: the number of the first step that is not committed.
    pub version: Step,
    /// The commit that made this version; `None` if the era began at it.
    pub commit: Option<CommitRecord>,
    /// The newest complete checkpoints, oldest first.
    pub checkpoints: BTreeMap<Step, Vec<StoredStage>>,
    /// Whether the run is complete.
    pub completed: bool,
    /// Since when peers take part, and who may not any more.
    pub stays: Stays,
    /// What was computed after this version has something wrong in it: the run must go back to it, or further.
    pub tainted_after: Option<Step>,
    /// The number of earlier histories of the run, whose logs are lost.
    pub number: u16,
}

/// Errors of records that do not follow the ones before them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// The term is not newer than the last one.
    #[error("term {term} does not follow term {last}")]
    Term {
        /// The record's term.
        term: Term,
        /// The newest term before it.
        last: Term,
    },
    /// The change starts from a membership other than the newest.
    #[error("membership {number}, made of membership {since}, does not follow membership {last}")]
    View {
        /// The record's membership.
        number: u64,
        /// The membership that the change starts from.
        since: u64,
        /// The newest membership before it.
        last: u64,
    },
    /// The membership has more members than a run may have.
    #[error("membership {number} has {count} members: a run has {} at most", limits::MEMBERS)]
    Members {
        /// The record's membership.
        number: u64,
        /// The number of its members.
        count: usize,
    },
    /// A repeated commit, one of another era, or one that skips a step.
    #[error(
        "a commit of step {step} in era {era} does not make version {version} of era {now} a newer one"
    )]
    Commit {
        /// The record's era.
        era: Era,
        /// The record's step.
        step: Step,
        /// The present era.
        now: Era,
        /// The present version.
        version: Step,
    },
    /// A checkpoint of a version that is not committed.
    #[error("a checkpoint of version {version} is ahead of version {now}")]
    Checkpoint {
        /// The record's version.
        version: Step,
        /// The present version.
        now: Step,
    },
    /// The rewind starts no newer era, or goes to a version that is not committed.
    #[error("a rewind to version {version} in era {era} does not follow era {last}")]
    Rewind {
        /// The record's era.
        era: Era,
        /// The record's version.
        version: Step,
        /// The era before it.
        last: Era,
    },
    /// The log has other records, or the number is that of the first history.
    #[error("history {number} is founded in a log that has begun, or is none after another")]
    Founding {
        /// The number of the history.
        number: u16,
    },
}

impl History {
    /// The empty log of a run that begins at this version of the weights.
    #[must_use]
    pub fn beginning_at(version: Step) -> Self {
        Self { began_at: version, version, ..Self::default() }
    }

    /// Applies the next record.
    ///
    /// # Errors
    /// If the record does not follow those before it; the state is then unchanged.
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
            LogRecord::Founded(founding) => self.found(founding),
            LogRecord::Convicted(conviction) => {
                self.stays.convict(conviction);
                self.taint(conviction.back);
                Ok(())
            }
        }
    }

    fn found(&mut self, founding: &Founding) -> Result<(), HistoryError> {
        if *self != Self::beginning_at(self.began_at) || founding.number == 0 {
            return Err(HistoryError::Founding { number: founding.number });
        }
        let Founding { number, version, stages } = founding;
        self.number = *number;
        self.term = founding.term();
        self.era = founding.era();
        self.began_at = *version;
        self.version = *version;
        self.checkpoints.insert(*version, stages.clone());
        Ok(())
    }

    /// What was computed after this version has something wrong in it: no checkpoint of it is used any more.
    fn taint(&mut self, back: Step) {
        self.checkpoints.retain(|saved, _| *saved <= back);
        self.tainted_after = Some(self.tainted_after.map_or(back, |earlier| earlier.min(back)));
    }

    /// Whether the run has trained anything, according to the log.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        let stopped = is_stopped(self.view.members.iter().map(AsRef::as_ref));
        self.version > self.began_at || self.era > Era(0) || stopped
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
            self.stays.list(peer, self.version);
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
        self.tainted_after.take_if(|sound| version <= *sound);
        self.stays.rewind(version);
        // Newer checkpoints were not available. The repeated steps save identical ones again.
        self.checkpoints.retain(|saved, _| *saved <= version);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ClaimKey, ContentHash, Microbatch, Stage, StageSpan};
    use crate::message::{
        Conviction, Evidence, FixedLoss, Handed, InputId, MemberRecord, Recalled, Seal,
    };

    fn commit(era: u32, step: u64) -> LogRecord {
        LogRecord::Commit(CommitRecord {
            era: Era(era),
            term: Term(1),
            step: Step(step),
            rounds: Vec::new(),
            gradient_norm: 1.0,
            loss: FixedLoss::new(0, 1),
            held_out_loss: None,
        })
    }

    fn view(number: u64, life: u64) -> LogRecord {
        let member = Member { peer: PeerId([1; 32]), incarnation: Incarnation(life) };
        let record = MemberRecord::plain(member, StageSpan::one(Stage(0)));
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
    fn a_run_may_begin_at_a_later_version() {
        let mut history = History::beginning_at(Step(7));
        assert!(!history.has_begun());
        assert!(matches!(history.apply(&commit(0, 0)), Err(HistoryError::Commit { .. })));
        history.apply(&commit(0, 7)).expect("the first");
        assert!(history.has_begun());
        assert_eq!(history.version, Step(8));
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
    fn a_history_is_founded_on_nothing_else() {
        let founding = |number| Founding { number, version: Step(7), stages: Vec::new() };
        let mut history = History::default();
        let none = history.apply(&LogRecord::Founded(founding(0)));
        assert!(matches!(none, Err(HistoryError::Founding { .. })));
        history.apply(&LogRecord::Founded(founding(2))).expect("the first record");
        assert_eq!((history.version, history.began_at, history.number), (Step(7), Step(7), 2));
        assert!(history.has_begun() && history.checkpoints.contains_key(&Step(7)));
        assert!(matches!(history.apply(&commit(0, 7)), Err(HistoryError::Commit { .. })));
        assert!(history.apply(&LogRecord::Term(Term(9))).is_err(), "a term of an earlier history");
        history.apply(&LogRecord::Term(history.term.next())).expect("the next term");
        history.apply(&commit(history.era.0, 7)).expect("the next step");
        let again = history.apply(&LogRecord::Founded(founding(3)));
        assert!(matches!(again, Err(HistoryError::Founding { number: 3 })));
        assert!(founding(1).era() < founding(2).era() && founding(1).term() < founding(2).term());
    }

    #[test]
    fn a_conviction_discards_what_came_of_the_peers_work() {
        let mut history = History::default();
        let peer = PeerId([1; 32]);
        let save = |version| LogRecord::Checkpoint { version, stages: Vec::new(), oldest: Step(0) };
        for step in 0..4 {
            history.apply(&commit(0, step)).expect("the next");
            history.apply(&save(Step(step + 1))).expect("of now");
            if step == 1 {
                history.apply(&view(1, 4)).expect("it joins");
            }
        }
        assert_eq!(history.stays.since(peer, history.version), Step(2));
        let (step, stage) = (Step(4), Stage(0));
        let key = ClaimKey { step, stage: Stage(1), microbatch: Microbatch(0) };
        let of = InputId { key, input: Recalled::Activation };
        let by = Member { peer, incarnation: Incarnation(1) };
        let seal = Seal { era: Era(0), by, signature: [0; 64] };
        let made = Handed { hash: ContentHash([1; 32]), seal };
        let evidence = Evidence::Unsealed { of, stated: None, other: Some(made) };
        let conviction = Conviction { peer, step, stage, back: Step(2), evidence };
        history.apply(&LogRecord::Convicted(Box::new(conviction.clone()))).expect("at any time");
        assert_eq!(history.checkpoints.keys().copied().collect::<Vec<_>>(), [Step(1), Step(2)]);
        assert_eq!(history.stays.conviction(peer), Some(&conviction));
        assert_eq!(history.tainted_after, Some(Step(2)));
        let to = |era, version| LogRecord::Rewind { era: Era(era), version: Step(version) };
        history.apply(&to(1, 3)).expect("it was on its way");
        assert_eq!(history.tainted_after, Some(Step(2)), "not far enough");
        history.apply(&to(2, 1)).expect("older");
        assert_eq!(history.tainted_after, None);
        assert_eq!(history.stays.since(peer, history.version), Step(1));
    }

    #[test]
    fn terms_and_views_only_grow_and_incarnations_are_kept() {
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
    fn only_the_newest_checkpoints_are_kept() {
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
        history
            .apply(&LogRecord::Rewind { era: Era(1), version: Step(2) })
            .expect("an earlier version");
        assert_eq!(kept(&history), [2], "a rewind discards newer checkpoints");
    }
}
