//! When a stage has lost its last replica: the whole run goes back to the newest checkpoint that
//! somebody still has, and a new era begins.

use std::collections::{BTreeMap, BTreeSet};

use shoal_protocol::ids::{Era, Member, PeerId, Stage, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, SnapshotPart, StoredStage};
use shoal_protocol::units::Moment;

use super::closing::Rounds;
use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent};

/// Complete checkpoints, and who has them.
#[derive(Debug, Default)]
pub(super) struct Archive {
    versions: BTreeMap<Step, Vec<StoredStage>>,
}

impl Archive {
    pub(super) fn of(versions: BTreeMap<Step, Vec<StoredStage>>) -> Self {
        Self { versions }
    }

    /// Takes in a complete checkpoint; those before `oldest` are forgotten.
    pub(super) fn keep(&mut self, version: Step, stages: Vec<StoredStage>, oldest: Step) {
        self.versions.insert(version, stages);
        self.versions.retain(|saved, _| *saved >= oldest);
    }

    /// The oldest of the newest `count` versions, one that is not here yet among them.
    pub(super) fn oldest_with(&self, version: Step, count: u32) -> Step {
        let mut versions: BTreeSet<Step> = self.versions.keys().copied().collect();
        versions.insert(version);
        while versions.len() > count as usize {
            versions.pop_first();
        }
        versions.pop_first().expect("one was put in, and one is kept")
    }

    /// All stages at a version.
    pub(super) fn stages(&self, version: Step) -> Option<&[StoredStage]> {
        self.versions.get(&version).map(Vec::as_slice)
    }

    /// A stage at a version.
    pub(super) fn stage(&self, version: Step, stage: Stage) -> Option<&StoredStage> {
        self.versions.get(&version)?.get(usize::from(stage.0))
    }

    pub(super) fn holds(&self, version: Step) -> bool {
        self.versions.contains_key(&version)
    }

    /// The newest version; the initial weights are stored nowhere and are always there.
    pub(super) fn newest(&self) -> Step {
        self.versions.last_key_value().map_or(Step(0), |(version, _)| *version)
    }

    pub(super) fn oldest(&self) -> Step {
        self.versions.first_key_value().map_or(Step(0), |(version, _)| *version)
    }

    fn before(&self, version: Step) -> Step {
        self.versions.range(..version).next_back().map_or(Step(0), |(version, _)| *version)
    }

    /// The run goes back: what is newer could not be had.
    fn forget_after(&mut self, version: Step) {
        self.versions.retain(|saved, _| *saved <= version);
    }

    /// Somebody has what nobody said: an archive keeps all of a checkpoint, also once others have enough of it.
    fn add(&mut self, version: Step, stage: Stage, holder: PeerId) {
        let stages = self.versions.get_mut(&version);
        if let Some(stored) = stages.and_then(|stages| stages.get_mut(usize::from(stage.0)))
            && !stored.holders.contains(&holder)
        {
            stored.holders.push(holder);
        }
    }

    /// Somebody does not have what it was said to have.
    fn forget(&mut self, version: Step, stage: Stage, holder: PeerId) {
        let stages = self.versions.get_mut(&version);
        if let Some(stored) = stages.and_then(|stages| stages.get_mut(usize::from(stage.0))) {
            stored.holders.retain(|known| *known != holder);
        }
    }
}

/// The search for a checkpoint to go back to.
#[derive(Debug)]
pub(super) struct Search {
    version: Step,
    /// Whom each stage's files were asked of, and who said that it lacks them.
    asked: BTreeSet<(Stage, Member)>,
    lack: BTreeSet<(Stage, Member)>,
    /// The stages that somebody has.
    here: BTreeSet<Stage>,
    /// Until when it is waited for those who are not members now.
    pub(super) until: Moment,
}

impl Coordinator {
    /// Goes back when a stage's weights are gone with its last replica. Returns whether it does.
    pub(super) fn rewind_when_uncovered(&mut self, gone: &[Member], out: &mut Out) -> bool {
        let training =
            matches!(self.phase, Phase::Open | Phase::Closing | Phase::Committing | Phase::Saving);
        let mut stages = self.config.manifest.stages();
        let lost = stages.any(|stage| self.replicas_of(stage).is_empty());
        let rewinds = training && !gone.is_empty() && lost;
        if rewinds {
            self.strand(out);
        }
        rewinds
    }

    /// A stage is lost: the run waits until it is known which checkpoint it can go back to.
    pub(super) fn strand(&mut self, out: &mut Out) {
        let stages = self.membership.uncovered();
        event(CoordinatorEvent::StageLost { stages, version: self.archive.newest() }, out);
        self.search(self.archive.newest(), out);
    }

    fn search(&mut self, version: Step, out: &mut Out) {
        let until = self.now + self.config.homecoming;
        let (asked, lack, here) = <_>::default();
        self.phase = Phase::StageLost(Search { version, asked, lack, here, until });
        self.ask_holders(out);
    }

    /// Asks who is said to have the checkpoint, and archives, whether they do; goes back to it when all of it is
    /// there, and to the one before when it cannot be had.
    pub(super) fn ask_holders(&mut self, out: &mut Out) {
        let Phase::StageLost(search) = &mut self.phase else { return };
        let version = search.version;
        if version == Step(0) {
            return self.go_back_to(version, out);
        }
        let archives: Vec<Member> = self.membership.with_duty(|duties| duties.archive).collect();
        let mut hopeless = self.now >= search.until;
        for stage in self.config.manifest.stages() {
            if search.here.contains(&stage) {
                continue;
            }
            let Some(stored) = self.archive.stage(version, stage) else { continue };
            let lacks = |archive: &Member| search.lack.contains(&(stage, *archive));
            hopeless |= stored.holders.is_empty() && archives.iter().all(lacks);
            let lives = stored.holders.iter().filter_map(|peer| self.membership.life_of(*peer));
            for member in lives.chain(archives.iter().copied()) {
                if search.asked.insert((stage, member)) {
                    let part = SnapshotPart { stage, stored: stored.clone() };
                    send(member, FromCoordinator::Keep { version, part }, out);
                }
            }
        }
        let stages = usize::from(self.config.manifest.training.stages);
        if search.here.len() == stages {
            self.go_back_to(version, out);
        } else if hopeless {
            self.search(self.archive.before(version), out);
        }
    }

    /// Somebody has a stage of a checkpoint, or has it not.
    pub(super) fn holder_found(
        &mut self,
        from: Member,
        version: Step,
        stage: Stage,
        whole: bool,
        out: &mut Out,
    ) {
        if whole {
            self.archive.add(version, stage, from.peer);
        } else {
            self.archive.forget(version, stage, from.peer);
        }
        match &mut self.phase {
            Phase::StageLost(search) if search.version == version => {
                if whole {
                    search.here.insert(stage);
                } else {
                    search.lack.insert((stage, from));
                }
                self.ask_holders(out);
            }
            _ => self.strand_again(out),
        }
    }

    /// Searches anew when what the era began with can be had no more, and a stage still lacks it.
    pub(super) fn strand_again(&mut self, out: &mut Out) {
        let waits = matches!(self.phase, Phase::Gathering) && self.version > Step(0);
        if !waits || self.last_commit.is_some() {
            return;
        }
        let lost = |stage: &Stage| !self.is_archived(self.version, *stage);
        if self.membership.uncovered().iter().any(lost) {
            self.strand(out);
        }
    }

    /// A newcomer cannot get what the era began with: do those who have it still have it?
    pub(super) fn ask_holders_again(&self, member: Member, out: &mut Out) {
        let version = self.version;
        let Some(span) = self.membership.span_of(member) else { return };
        if !matches!(self.phase, Phase::Gathering) {
            return;
        }
        for stage in span.stages() {
            let Some(stored) = self.archive.stage(version, stage) else { continue };
            for holder in stored.holders.iter().filter_map(|peer| self.membership.life_of(*peer)) {
                let part = SnapshotPart { stage, stored: stored.clone() };
                send(holder, FromCoordinator::Keep { version, part }, out);
            }
        }
    }

    fn go_back_to(&mut self, version: Step, out: &mut Out) {
        self.phase = Phase::Rewinding { version, logging: false };
        // No membership that is written from here on calls anybody a replica.
        self.membership.stop_serving();
        self.move_for_next_era(out);
        self.view_changed(out);
    }

    /// Who hosts what in the new era is in the log: the era begins.
    pub(super) fn rewind_when_placed(&mut self, out: &mut Out) {
        if let Phase::Rewinding { version, logging } = &mut self.phase
            && !self.view_pending
            && !std::mem::replace(logging, true)
        {
            let (era, version) = (self.era.next(), *version);
            out.push(CoordinatorAction::Append(LogRecord::Rewind { era, version }));
        }
    }

    /// The new era is in the log: everybody begins again.
    pub(super) fn rewound(&mut self, era: Era, version: Step, out: &mut Out) {
        assert!(matches!(self.phase, Phase::Rewinding { .. }), "only this coordinator rewinds");
        let steps = self.version.0.saturating_sub(version.0);
        self.era = era;
        self.began_at = version;
        self.version = version;
        self.moved_for_era(version, out);
        self.balance.is_level();
        self.membership.stands_at(era, version);
        self.last_commit = None;
        self.archive.forget_after(version);
        self.work.begin_again();
        self.stragglers.forget_work();
        self.rounds = Rounds::default();
        self.snapshots.forget_all();
        self.checkpoints.begin_again();
        self.newcomers.forget_all();
        self.replay_at = None;
        self.waiting_said = None;
        self.phase = Phase::Gathering;
        event(CoordinatorEvent::Rewound { era, version, steps }, out);
        let members: Vec<Member> = self.membership.members().collect();
        for member in &members {
            let span = self.membership.span_of(*member).expect("it was just listed");
            send(*member, FromCoordinator::Rewind { era, version, span }, out);
        }
        self.begin_each(members, out);
        self.open_when_gathered(out);
    }

    /// Whether a member has a stage of a complete checkpoint.
    pub(super) fn is_archived(&self, version: Step, stage: Stage) -> bool {
        let stored = self.archive.stage(version, stage);
        let mut holders = stored.iter().flat_map(|stored| &stored.holders);
        holders.any(|peer| self.membership.life_of(*peer).is_some())
    }

    /// A stage's files where a complete checkpoint has them.
    pub(super) fn archived(&self, version: Step, stage: Stage) -> Option<SnapshotPart> {
        let stored = self.archive.stage(version, stage)?.clone();
        self.is_archived(version, stage).then_some(SnapshotPart { stage, stored })
    }
}
