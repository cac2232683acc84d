//! When a stage has lost its last replica: the whole run goes back to the newest checkpoint that is
//! kept apart from the members, and a new era begins.

use std::collections::BTreeMap;

use shoal_protocol::ids::{Era, Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, SnapshotPart, StoredFile};

use super::closing::Rounds;
use super::{Coordinator, Out, Phase, Resume, event};
use crate::action::{CoordinatorAction, CoordinatorEvent};

/// Checkpoints that are remembered.
const KEPT: usize = 2;

/// Checkpoints that the run's keeper holds whole.
#[derive(Debug, Default)]
pub(super) struct Archive {
    versions: BTreeMap<Step, BTreeMap<Stage, Vec<StoredFile>>>,
}

impl Archive {
    /// Takes in a whole checkpoint; older ones are forgotten.
    pub(super) fn keep(&mut self, version: Step, stages: BTreeMap<Stage, Vec<StoredFile>>) {
        self.versions.insert(version, stages);
        while self.versions.len() > KEPT {
            self.versions.pop_first();
        }
    }

    pub(super) fn holds(&self, version: Step) -> bool {
        self.versions.contains_key(&version)
    }

    /// A stage's files at a version.
    pub(super) fn files(&self, version: Step, stage: Stage) -> Option<&Vec<StoredFile>> {
        self.versions.get(&version)?.get(&stage)
    }

    fn newest(&self) -> Step {
        self.versions.last_key_value().map_or(Step(0), |(version, _)| *version)
    }
}

impl Coordinator {
    /// Goes back when a stage's weights are gone with its last replica. Returns whether it does.
    pub(super) fn rewind_when_uncovered(&mut self, gone: &[Member], out: &mut Out) -> bool {
        let training =
            matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing | Phase::Saving);
        let lost = self.replicas().values().any(Vec::is_empty);
        if !training || gone.is_empty() || !lost {
            return false;
        }
        self.phase = Phase::Rewinding;
        // No membership that is written from here on calls anybody a replica.
        self.membership.stop_serving();
        let (era, version) = (self.config.era.next(), self.archive.newest());
        out.push(CoordinatorAction::Append(LogRecord::Rewind { era, version }));
        self.view_changed(out);
        true
    }

    /// A run that went on before goes on from a checkpoint: nobody's claims or weights are known any
    /// more, so that it is as if every stage were lost.
    pub(super) fn resume(&mut self, resume: Resume, out: &mut Out) {
        let (era, version) = (self.config.era.next(), resume.version);
        if version.0 > 0 {
            self.archive.keep(version, resume.files);
        }
        self.phase = Phase::Rewinding;
        out.push(CoordinatorAction::Append(LogRecord::Rewind { era, version }));
    }

    /// The new era is in the log: everybody begins again.
    pub(super) fn rewound(&mut self, era: Era, version: Step, out: &mut Out) {
        assert!(matches!(self.phase, Phase::Rewinding), "only this coordinator rewinds");
        let steps = self.version.0.saturating_sub(version.0);
        self.config.era = era;
        self.version = version;
        self.work.begin_again();
        self.rounds = Rounds::default();
        self.snapshots.forget_all();
        self.checkpoints.begin_again();
        self.newcomers.forget_all();
        self.replay_at = None;
        self.waiting_said = None;
        self.phase = Phase::Gathering;
        event(CoordinatorEvent::Rewound { era, version, steps }, out);
        self.tell_all(&FromCoordinator::Rewind { era, version }, out);
        let members: Vec<Member> = self.membership.members().collect();
        for member in members {
            self.begin_again(member, out);
        }
        self.open_when_gathered(out);
    }

    /// A stage's files where the run's keeper holds them.
    pub(super) fn archived(&self, version: Step, stage: Stage) -> Option<SnapshotPart> {
        let files = self.archive.files(version, stage)?.clone();
        Some(SnapshotPart { stage, holder: self.config.home, files })
    }
}
