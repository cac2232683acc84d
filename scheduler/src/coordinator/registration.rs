//! Newcomers, and the beginning of training.

use std::net::SocketAddr;

use shoal_protocol::ids::{ContentHash, Member, Stage};
use shoal_protocol::message::{FromCoordinator, LogRecord, StageChoice, View};

use super::{Coordinator, Out, Phase, event, send};
use crate::action::{CoordinatorAction, CoordinatorEvent};

impl Coordinator {
    pub(super) fn register(
        &mut self,
        from: Member,
        choice: StageChoice,
        addresses: Vec<SocketAddr>,
        fingerprint: ContentHash,
        out: &mut Out,
    ) {
        let gathering = matches!(self.phase, Phase::Gathering);
        if !gathering && !self.membership.contains(from) {
            let reason = match &self.phase {
                Phase::Stopped { reason } => format!("the run has stopped: {reason}"),
                Phase::Finished => "the run is over".to_owned(),
                _ => format!(
                    "the run is at step {} and takes in no more peers: join before its first step",
                    self.version
                ),
            };
            return send(from, FromCoordinator::Refused { reason }, out);
        }
        match self.membership.admit(from, choice, addresses, fingerprint) {
            Err(error) => {
                send(from, FromCoordinator::Refused { reason: error.to_string() }, out);
            }
            Ok(admission) if admission.again => {
                if self.logged_view.members.iter().any(|record| record.member == from) {
                    self.welcome(from, out);
                    send(from, FromCoordinator::View(self.logged_view.clone()), out);
                }
            }
            Ok(admission) => {
                if let Some(member) = admission.replaced {
                    self.work.forget(member);
                    event(CoordinatorEvent::Lost { member, span: admission.span }, out);
                }
                event(CoordinatorEvent::Admitted { member: from, span: admission.span }, out);
                if admission.unlike {
                    event(CoordinatorEvent::Unlike { member: from }, out);
                }
                self.view_changed(out);
            }
        }
    }

    /// Writes the membership down. While one is on its way into the log the next one waits, so that
    /// a crowd of newcomers makes few records.
    pub(super) fn view_changed(&mut self, out: &mut Out) {
        if self.view_pending {
            self.view_outdated = true;
        } else {
            self.view_pending = true;
            let view = self.membership.next_view();
            out.push(CoordinatorAction::Append(LogRecord::View(view)));
        }
    }

    pub(super) fn view_logged(&mut self, view: View, out: &mut Out) {
        assert!(view.number > self.logged_view.number, "the log keeps its order");
        let old = std::mem::replace(&mut self.logged_view, view);
        self.view_pending = false;
        let members: Vec<Member> =
            self.logged_view.members.iter().map(|record| record.member).collect();
        for member in members {
            if !self.membership.contains(member) {
                continue;
            }
            if !old.members.iter().any(|record| record.member == member) {
                self.welcome(member, out);
            }
            send(member, FromCoordinator::View(self.logged_view.clone()), out);
        }
        if std::mem::take(&mut self.view_outdated) {
            self.view_changed(out);
        }
        self.open_when_gathered(out);
    }

    fn welcome(&mut self, member: Member, out: &mut Out) {
        let span = self.membership.span_of(member).expect("only members are welcomed");
        send(member, FromCoordinator::Admitted { span, version: self.version }, out);
    }

    /// Opens the first step as soon as everybody who is waited for is in the log.
    pub(super) fn open_when_gathered(&mut self, out: &mut Out) {
        if !matches!(self.phase, Phase::Gathering) || self.view_pending {
            return;
        }
        let stages = self.membership.uncovered();
        let members = self.config.wait_for.saturating_sub(self.membership.len());
        if !stages.is_empty() || members > 0 {
            let waiting = Some((stages.clone(), members));
            if self.waiting_said != waiting {
                self.waiting_said = waiting;
                event(CoordinatorEvent::Waiting { stages, members }, out);
            }
            return;
        }
        self.work.set_givers(self.membership.replicas(Stage(0)));
        if self.is_last_version() {
            self.phase = Phase::Saving;
            self.start_checkpoint(out);
        } else {
            self.open_step(out);
        }
    }

    /// Whether training is complete.
    pub(super) fn is_last_version(&self) -> bool {
        self.version.0 == self.config.manifest.training.steps
    }
}
