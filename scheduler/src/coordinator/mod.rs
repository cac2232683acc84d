//! The run's decisions: who is a member (`registration`, `joining`), who works on what (`work`), when
//! a step is closed and committed (`closing`), what becomes of the work of who is gone (`recovery`),
//! what is written (`snapshots`) and saved (`checkpoint`), and where it all begins again when a stage
//! is lost (`rewind`).

mod checkpoint;
mod closing;
mod config;
mod joining;
mod recovery;
mod registration;
mod rewind;
mod snapshots;
#[cfg(test)]
mod tests;
mod work;

use std::collections::BTreeMap;

pub use config::{CoordinatorConfig, Resume};
use shoal_protocol::ids::{Era, Member, Stage, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, ToCoordinator, View};
use shoal_protocol::units::Moment;

use self::checkpoint::Checkpoints;
use self::closing::Rounds;
use self::joining::Newcomers;
use self::recovery::{Complaints, Gaps};
use self::rewind::Archive;
use self::snapshots::Snapshots;
use self::work::Work;
use crate::action::{CoordinatorAction, CoordinatorEvent, CoordinatorInput};
use crate::membership::Membership;

/// The run's decisions. One member at a time is the run's coordinator; what must outlast it goes
/// through the log before it is said.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    membership: Membership,
    /// The membership that the log holds; what members are told of.
    logged_view: View,
    /// Whether a membership is on its way into the log, and whether a newer one must follow.
    view_pending: bool,
    view_outdated: bool,
    /// What the run last said that it waits for.
    waiting_said: Option<(Vec<Stage>, usize)>,
    phase: Phase,
    /// The version of the weights: steps committed.
    version: Step,
    work: Work,
    rounds: Rounds,
    newcomers: Newcomers,
    snapshots: Snapshots,
    checkpoints: Checkpoints,
    archive: Archive,
    complaints: Complaints,
    /// The time of the present input.
    now: Moment,
    /// What nobody had claimed at the last look.
    gaps: Gaps,
    /// When it is looked at again, and replays are asked for again.
    replay_at: Option<Moment>,
    /// A rule that it does not keep, to see that this is noticed.
    #[cfg(test)]
    pub(crate) omit: Option<crate::sim::Omit>,
}

/// Where the run stands.
#[derive(Debug)]
enum Phase {
    /// Members are still missing.
    Gathering,
    /// A return to an earlier version is on its way into the log.
    Rewinding,
    /// Microbatches flow.
    Open,
    /// All are done, the all-reduce is on.
    Closing,
    /// The step's last word is on its way into the log.
    Committing,
    /// The last step is committed, the last checkpoint is not yet where it belongs.
    Saving,
    /// All is said and done.
    Finished,
    /// The run cannot go on.
    Stopped { reason: String },
}

/// What one input makes the coordinator do.
type Out = Vec<CoordinatorAction>;

impl Coordinator {
    /// A coordinator at the beginning of its term.
    #[must_use]
    pub fn new(config: CoordinatorConfig) -> Self {
        let stages = config.manifest.training.stages;
        Self {
            config,
            membership: Membership::new(stages),
            logged_view: View::default(),
            view_pending: false,
            view_outdated: false,
            waiting_said: None,
            phase: Phase::Gathering,
            version: Step(0),
            work: Work::new(),
            rounds: Rounds::default(),
            newcomers: Newcomers::default(),
            snapshots: Snapshots::default(),
            checkpoints: Checkpoints::default(),
            archive: Archive::default(),
            complaints: Complaints::default(),
            now: Moment::default(),
            gaps: Gaps::new(),
            replay_at: None,
            #[cfg(test)]
            omit: None,
        }
    }

    /// Begins the term. Called once, before any input.
    pub fn start(&mut self, now: Moment, out: &mut Vec<CoordinatorAction>) {
        self.now = now;
        out.push(CoordinatorAction::Append(LogRecord::Term(self.config.term)));
        match self.config.resume.take() {
            Some(resume) => self.resume(resume, out),
            None => self.open_when_gathered(out),
        }
    }

    /// Takes in what happened and adds what is to be done, in order, to `out`.
    pub fn handle(
        &mut self,
        now: Moment,
        input: CoordinatorInput,
        out: &mut Vec<CoordinatorAction>,
    ) {
        self.now = now;
        match input {
            CoordinatorInput::Message { from, message } => self.heard(from, message, out),
            CoordinatorInput::Disconnected { member } => {
                self.lost(member, "its connection broke", out);
            }
            CoordinatorInput::Appended(record) => self.appended(record, out),
            CoordinatorInput::Collected { version, whole } => {
                self.collected(version, whole, out);
            }
            CoordinatorInput::Tick => {}
        }
        if matches!(self.phase, Phase::Rewinding) {
            return;
        }
        if self.replay_at.is_some_and(|at| now >= at) {
            self.replay_old_gaps(out);
        }
        self.retry_late_rounds(out);
        self.retry_snapshots(out);
    }

    /// The era of the run.
    #[must_use]
    pub fn era(&self) -> Era {
        self.config.era
    }

    /// When a `Tick` is due, if nothing else happens before.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        // A rewind waits for the log alone, and ends whatever was due before.
        if matches!(self.phase, Phase::Finished | Phase::Stopped { .. } | Phase::Rewinding) {
            return None;
        }
        let snapshots = self.snapshots.again_at;
        [self.replay_at, self.rounds.patience(), snapshots].into_iter().flatten().min()
    }

    fn heard(&mut self, from: Member, message: ToCoordinator, out: &mut Out) {
        if let ToCoordinator::Register { choice, addresses, fingerprint } = message {
            return self.register(from, choice, addresses, fingerprint, out);
        }
        // A word is dropped because its sender is no member, and for no other reason.
        let Some(span) = self.membership.span_of(from) else {
            let reason = "it is not a member any more".to_owned();
            return send(from, FromCoordinator::Expelled { reason }, out);
        };
        if let Phase::Stopped { reason } = &self.phase {
            let reason = reason.clone();
            return send(from, FromCoordinator::Stopped { reason }, out);
        }
        if matches!(self.phase, Phase::Finished) {
            // It was told, and that was lost.
            return send(from, FromCoordinator::Finished, out);
        }
        let rewinding = matches!(self.phase, Phase::Rewinding);
        let leaves = matches!(message, ToCoordinator::Leave | ToCoordinator::CannotReach { .. });
        if rewinding && !leaves {
            return;
        }
        match message {
            ToCoordinator::Register { .. } => {}
            ToCoordinator::WorkWanted { rooms, through, pace } => {
                if span.first.0 == 0 {
                    self.work.wanted(from, &rooms, through, pace);
                    self.give_out(out);
                }
            }
            ToCoordinator::Claim { key } => {
                if span.contains(key.stage) {
                    self.claim(from, key, out);
                }
            }
            ToCoordinator::Done { key, grant, loss } => self.done(from, key, grant, loss, out),
            ToCoordinator::Reduced { round, outcome } => self.reduced(from, round, outcome, out),
            ToCoordinator::RoundRefused { round, reason } => {
                self.round_refused(from, round, &reason, out);
            }
            ToCoordinator::Diverged { key, reason } => {
                self.stop(format!("the numbers diverged at {key}: {reason}"), out);
            }
            ToCoordinator::Stored { version, stage, files } => {
                self.stored(from, version, stage, files, out);
            }
            ToCoordinator::Released { key, grant } => self.released(from, key, grant, out),
            ToCoordinator::Ready { version } => self.ready(from, version, out),
            ToCoordinator::Behind => self.behind(from, out),
            ToCoordinator::CannotReach { member } => self.cannot_reach(from, member, out),
            ToCoordinator::Leave => self.lost(from, "it left", out),
        }
    }

    fn appended(&mut self, record: LogRecord, out: &mut Out) {
        if matches!(self.phase, Phase::Stopped { .. }) {
            return;
        }
        match record {
            LogRecord::Term(_) => {}
            LogRecord::View(view) => self.view_logged(view, out),
            // What was committed last is undone by the rewind that follows it in the log.
            LogRecord::Commit(_) if matches!(self.phase, Phase::Rewinding) => {}
            LogRecord::Commit(record) => self.committed(record, out),
            LogRecord::Rewind { era, version } => self.rewound(era, version, out),
            LogRecord::Checkpoint { version, .. } => self.checkpoint_logged(version, out),
        }
    }

    /// The run cannot go on, and everybody hears why.
    fn stop(&mut self, reason: String, out: &mut Out) {
        if matches!(self.phase, Phase::Finished | Phase::Stopped { .. }) {
            return;
        }
        self.tell_all(&FromCoordinator::Stopped { reason: reason.clone() }, out);
        event(CoordinatorEvent::Stopped { reason: reason.clone() }, out);
        self.phase = Phase::Stopped { reason };
    }

    fn tell_all(&self, message: &FromCoordinator, out: &mut Out) {
        for member in self.membership.members() {
            send(member, message.clone(), out);
        }
    }

    /// The replicas of every stage that the log knows and nobody misses, in order of stages.
    fn replicas(&self) -> BTreeMap<Stage, Vec<Member>> {
        let stages = self.config.manifest.stages();
        stages.map(|stage| (stage, self.replicas_of(stage))).collect()
    }

    fn replicas_of(&self, stage: Stage) -> Vec<Member> {
        self.hosts(stage).filter(|(_, serving)| *serving).map(|(member, _)| member).collect()
    }

    /// Newcomers that will host a stage.
    fn listeners(&self, stage: Stage) -> Vec<Member> {
        self.hosts(stage).filter(|(_, serving)| !serving).map(|(member, _)| member).collect()
    }

    fn hosts(&self, stage: Stage) -> impl Iterator<Item = (Member, bool)> + '_ {
        self.logged_view
            .members
            .iter()
            .filter(move |record| record.span.contains(stage))
            .filter(|record| self.membership.contains(record.member))
            .map(|record| (record.member, record.serving))
    }
}

fn send(to: Member, message: FromCoordinator, out: &mut Out) {
    out.push(CoordinatorAction::Send { to, message });
}

fn event(event: CoordinatorEvent, out: &mut Out) {
    out.push(CoordinatorAction::Event(event));
}
