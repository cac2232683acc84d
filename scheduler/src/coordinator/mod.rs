//! The run's decisions: who is a member (`registration`), who works on what (`work`), when a
//! step is closed and committed (`closing`), what is saved (`checkpoint`).

mod checkpoint;
mod closing;
mod config;
mod registration;
#[cfg(test)]
mod tests;
mod work;

use std::collections::BTreeMap;

pub use config::CoordinatorConfig;
use shoal_protocol::ids::{Member, Stage, StageSpan, Step};
use shoal_protocol::message::{FromCoordinator, LogRecord, ToCoordinator, View};
use shoal_protocol::units::Moment;

use self::checkpoint::Checkpoints;
use self::closing::Closing;
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
    checkpoints: Checkpoints,
}

/// Where the run stands.
#[derive(Debug)]
enum Phase {
    /// Members are still missing.
    Gathering,
    /// Microbatches flow.
    Open,
    /// All are done, the all-reduce is on.
    Closing(Closing),
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
            checkpoints: Checkpoints::default(),
        }
    }

    /// Begins the term. Called once, before any input.
    pub fn start(&mut self, _now: Moment, out: &mut Vec<CoordinatorAction>) {
        out.push(CoordinatorAction::Append(LogRecord::Term(self.config.term)));
        self.open_when_gathered(out);
    }

    /// Takes in what happened and adds what is to be done, in order, to `out`.
    pub fn handle(
        &mut self,
        _now: Moment,
        input: CoordinatorInput,
        out: &mut Vec<CoordinatorAction>,
    ) {
        match input {
            CoordinatorInput::Message { from, message } => self.heard(from, message, out),
            CoordinatorInput::Disconnected { member } => {
                self.lost(member, "its connection broke", out);
            }
            CoordinatorInput::Appended(record) => self.appended(record, out),
            CoordinatorInput::Collected { version } => self.collected(version, out),
            CoordinatorInput::Tick => {}
        }
    }

    /// When a `Tick` is due, if nothing else happens before: never, since the coordinator waits for
    /// members only, and hears of those that break off.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Moment> {
        None
    }

    fn heard(&mut self, from: Member, message: ToCoordinator, out: &mut Out) {
        if let ToCoordinator::Register { choice, addresses, fingerprint } = message {
            return self.register(from, choice, addresses, fingerprint, out);
        }
        // A word is dropped because its sender is no member, and for no other reason.
        let Some(span) = self.membership.span_of(from) else { return };
        if let Phase::Stopped { reason } = &self.phase {
            let reason = reason.clone();
            return send(from, FromCoordinator::Stopped { reason }, out);
        }
        match message {
            ToCoordinator::Register { .. } => {}
            ToCoordinator::WorkWanted { room, through, pace } => {
                if span.first.0 == 0 {
                    self.work.wanted(from, room, through, pace);
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
                let reason =
                    format!("{from} refused the all-reduce of stage {}: {reason}", round.stage);
                self.stop(reason, out);
            }
            ToCoordinator::Diverged { key, reason } => {
                self.stop(format!("the numbers diverged at {key}: {reason}"), out);
            }
            ToCoordinator::Stored { version, stage, files } => {
                self.stored(from, version, stage, files, out);
            }
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
            LogRecord::Commit(record) => self.committed(record, out),
            LogRecord::Checkpoint { version, .. } => self.checkpoint_logged(version, out),
        }
    }

    /// A member is gone. Until the first step nothing depends on it; from then on the run needs it.
    fn lost(&mut self, member: Member, how: &str, out: &mut Out) {
        let over = matches!(self.phase, Phase::Finished | Phase::Stopped { .. });
        let Some(span) = self.membership.span_of(member).filter(|_| !over) else { return };
        event(CoordinatorEvent::Lost { member, span }, out);
        if matches!(self.phase, Phase::Gathering) {
            self.membership.remove(member);
            self.work.forget(member);
            self.view_changed(out);
            self.open_when_gathered(out);
        } else {
            let reason = self.loss_reason(member, span, how);
            self.membership.remove(member);
            self.stop(reason, out);
        }
    }

    fn loss_reason(&self, member: Member, span: StageSpan, how: &str) -> String {
        format!(
            "peer {} with stages {span} is gone ({how}); training went up to step {} of {}: \
             start the run again",
            member.peer, self.version, self.config.manifest.training.steps
        )
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

    /// The replicas of every stage, in order of stages.
    fn replicas(&self) -> BTreeMap<Stage, Vec<Member>> {
        let stages = self.config.manifest.stages();
        stages.map(|stage| (stage, self.membership.replicas(stage).collect())).collect()
    }
}

fn send(to: Member, message: FromCoordinator, out: &mut Out) {
    out.push(CoordinatorAction::Send { to, message });
}

fn event(event: CoordinatorEvent, out: &mut Out) {
    out.push(CoordinatorAction::Event(event));
}
