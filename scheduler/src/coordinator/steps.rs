//! Steps: a step opens, closes when all its work is done, and is committed when all replicas hold the
//! results of its rounds.

use std::collections::BTreeSet;

use shoal_protocol::ids::{Member, Mend, Step};
use shoal_protocol::message::{CommitRecord, FromCoordinator, LogRecord, RoundId, StoredStage};
use shoal_protocol::units::Rate;

use super::rounds::{Agreement, Going, Inputs, Report};
use super::weights::Verdict;
use super::{Coordinator, Out, Phase, event};
use crate::action::{CoordinatorAction, CoordinatorEvent, LossCause};

impl Coordinator {
    /// Opens the step whose weights are committed.
    pub(super) fn open_step(&mut self, out: &mut Out) {
        let steps = self.context.config.manifest.steps_at_once();
        self.work.open_steps(&self.context, steps, out);
        self.audits.begin_step(self.context.now);
        self.context.progress.open_step();
        event(CoordinatorEvent::Opened { step: self.context.progress.version }, out);
    }

    /// Closes the stages at which all work is done, if all members that did it are present. So the rounds of
    /// the later stages run while the earlier ones still work. The step is closed with its last stage. Rounds
    /// that a death did not touch go on; torn ones are mended.
    pub(super) fn close_when_complete(&mut self, out: &mut Out) {
        let Some(ledger) = self.work.ledger(self.context.progress.version) else { return };
        if !matches!(self.context.progress.phase, Phase::Open) {
            return;
        }
        let due = self.rounds.due(&self.context, ledger);
        let nothing = due.weights.is_empty() && !due.ending;
        if nothing || self.context.members.is_expelling() {
            return;
        }
        let inputs = Inputs { context: &self.context, ledger, newcomers: self.weights.newcomers() };
        self.rounds.close(&inputs, &due.weights, out);
        if due.ending {
            // When the next step's weights arrive, the offers of its work have been accepted. Any earlier it
            // would go to replicas whose throughput is not measured yet.
            let steps = self.context.config.manifest.steps_at_once() + 1;
            self.work.open_steps(&self.context, steps, out);
        }
        if due.complete {
            self.rounds.close_step(&self.context);
            self.context.progress.enter(Phase::Closing);
            self.commit_when_reduced(out);
        }
    }

    /// A replica holds the result of a round.
    pub(super) fn reduced(
        &mut self,
        from: Member,
        round: (RoundId, Mend),
        report: Report,
        rates: &[(u16, Rate)],
        out: &mut Out,
    ) {
        let (id, _) = round;
        let codec = self.context.config.manifest.codec.all_reduce;
        match self.rounds.reduced(from, round, report, (rates, codec)) {
            Ok(Some(Agreement::Partial | Agreement::Whole)) => self.commit_when_reduced(out),
            Ok(Some(Agreement::Minority(members))) => {
                for member in members {
                    self.member_lost(member, LossCause::Disproved, out);
                }
            }
            Ok(Some(Agreement::Split)) => {
                let reason = format!(
                    "the replicas of weight group {} came to different results in step {}",
                    id.weights, id.step
                );
                self.stop(reason, out);
            }
            Ok(Some(Agreement::Forged(owners))) => self.round_forged(id, owners, out),
            Ok(None) => {}
            Err(reason) => self.alarm(from, id.step, reason, out),
        }
    }

    /// A round's result is not the sum of what its members gave: it is made again.
    fn round_forged(&mut self, id: RoundId, owners: BTreeSet<Member>, out: &mut Out) {
        let Self { rounds, context, .. } = self;
        let home = context.config.home;
        let going = |member| match context.members.is_expendable(member, home) {
            true => Going::Well,
            false if member == home => Going::Never,
            false => Going::Badly,
        };
        let goes = rounds.discard_forged(id, owners, going, out);
        self.reopen_step();
        if let Some(member) = goes {
            self.member_lost(member, LossCause::Disproved, out);
        }
        self.close_when_complete(out);
    }

    /// Decides about replicas that wrote different files of a stage's weights.
    pub(super) fn judge_snapshots(&mut self, out: &mut Out) {
        while let Some(verdict) = self.weights.judge(&self.context, out) {
            match verdict {
                Verdict::Disproved(members) => {
                    for member in members {
                        self.member_lost(member, LossCause::Disproved, out);
                    }
                }
                Verdict::Unclear(version, stage) => {
                    let parts = [(version, stage)];
                    self.weights.replace_lost(&self.context, &parts, self.listens_from(), out);
                }
                Verdict::Split(version, stage) => {
                    let reason = format!(
                        "the replicas of stage {stage} have different weights at version {version}: \
                         one of their machines is broken, or lies"
                    );
                    return self.stop(reason, out);
                }
            }
        }
    }

    /// A member refuses a round's result. The owner of the piece that shows it reduces nothing from then on; the
    /// member itself raises an alarm if it names none that reduces anything.
    pub(super) fn round_refused(
        &mut self,
        from: Member,
        (round, owner): (RoundId, Option<Member>),
        reason: &str,
        out: &mut Out,
    ) {
        if !self.rounds.has_replica(round, from) {
            return;
        }
        let owner = owner.filter(|owner| *owner != from && self.rounds.reduces(round, *owner));
        if let Some(owner) = owner {
            self.round_forged(round, [owner].into(), out);
        } else {
            let weights = round.weights;
            let reason =
                format!("{from} refused the all-reduce of weight group {weights}: {reason}");
            self.alarm(from, round.step, reason, out);
        }
    }

    /// Appends the commit to the log when the step is closed, all replicas hold its results, and nothing of it is being
    /// audited.
    pub(super) fn commit_when_reduced(&mut self, out: &mut Out) {
        let is_closed = matches!(self.context.progress.phase, Phase::Closing);
        if !is_closed || !self.rounds.are_complete() || !self.are_audits_closed(out) {
            return;
        }
        let ledger = self.work.ledger(self.context.progress.version);
        let ledger = ledger.expect("a closed step has a ledger");
        if let Some((record, took)) = self.rounds.commit(&self.context, ledger) {
            self.context.progress.enter(Phase::Committing);
            self.work.record_all_reduce(took);
            out.push(CoordinatorAction::Append(LogRecord::Commit(record)));
        }
    }

    /// Tears the rounds with a member that is gone, and reopens the step until its work is done again.
    pub(super) fn tear_rounds(&mut self, gone: Member) {
        // All remaining replicas hold the results of a step that is being committed.
        if matches!(self.context.progress.phase, Phase::Committing) {
            return;
        }
        self.rounds.tear(gone);
        self.reopen_step();
    }

    /// Tries late rounds again.
    pub(super) fn retry_late_rounds(&mut self, out: &mut Out) {
        let closing = matches!(self.context.progress.phase, Phase::Closing);
        if closing && self.rounds.is_late(self.context.now) {
            let withheld = self.rounds.discard_late(&self.context, out);
            self.reopen_step();
            for member in withheld {
                if self.context.members.is_expendable(member, self.context.config.home) {
                    self.member_lost(member, LossCause::Withholds, out);
                }
            }
            self.close_when_complete(out);
        }
    }

    fn reopen_step(&mut self) {
        if self.context.progress.reopen_step() {
            self.rounds.reopen_step();
            self.audits.reopen_step();
        }
    }

    /// The commit is in the log: all members apply it.
    pub(super) fn committed(&mut self, record: CommitRecord, out: &mut Out) {
        self.context.progress.commit(record.clone());
        self.alarms.forget_through(record.step);
        self.rounds.end_step();
        self.rounds.retain_members(|member| self.context.members.current.contains(member));
        let (era, version) = (self.context.progress.era, self.context.progress.version);
        let others = self.context.members.set_position(era, version);
        self.work.forget_service_times(&others);
        self.balance.stepped(self.context.now);
        self.context.members.broadcast(&FromCoordinator::Commit(record.clone()), out);
        // Members that have changed over, by this step or in the last rewind, must be listed at their new stage.
        self.context.members.append_unlogged(out);
        let counts = self.work.close_step(record.step);
        event(CoordinatorEvent::Committed { record: Box::new(record), counts }, out);
        if self.context.is_last_version() {
            self.save_last_version(out);
        } else {
            if self.weights.is_checkpoint_due(&self.context) {
                self.weights.start_checkpoint(&self.context, out);
            }
            self.open_step(out);
            self.weights.take_turns(&self.context, self.listens_from(), out);
            self.close_when_complete(out);
        }
    }

    /// The last step is committed: its checkpoint is the model.
    pub(super) fn save_last_version(&mut self, out: &mut Out) {
        self.context.progress.enter(Phase::Saving);
        self.weights.start_checkpoint(&self.context, out);
        self.end_when_saved(out);
    }

    /// A checkpoint is in the log.
    pub(super) fn checkpoint_logged(
        &mut self,
        checkpoint: (Step, Vec<StoredStage>, Step),
        out: &mut Out,
    ) {
        self.weights.complete_checkpoint(&self.context, checkpoint, out);
        self.end_when_saved(out);
    }

    /// Appends the end of the run to the log once the last checkpoint is complete and archived. Only then may
    /// members go, since a later coordinator could not find out any more.
    pub(super) fn end_when_saved(&mut self, out: &mut Out) {
        let saving = matches!(self.context.progress.phase, Phase::Saving);
        if saving && self.weights.is_saved(&self.context) {
            self.context.progress.enter(Phase::Ending);
            out.push(CoordinatorAction::Append(LogRecord::Completed));
        }
    }

    /// The end of the run is in the log.
    pub(super) fn finish(&mut self, out: &mut Out) {
        self.context.progress.enter(Phase::Finished);
        self.context.members.broadcast(&FromCoordinator::Finished, out);
        event(CoordinatorEvent::Finished, out);
    }
}
