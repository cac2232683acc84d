//! The state that all components read: configuration, members, progress and time.

use shoal_protocol::ids::{Member, Step};
use shoal_protocol::message::FromCoordinator;
use shoal_protocol::units::Moment;

use super::config::CoordinatorConfig;
use super::members::Members;
use super::progress::Progress;
use super::{Out, send};

/// The state that all components read. Only the coordinator changes it, between calls of components.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) config: CoordinatorConfig,
    pub(super) members: Members,
    pub(super) progress: Progress,
    /// The time of the input that is being handled.
    pub(super) now: Moment,
}

impl Context {
    /// When a message that is sent at this moment is repeated.
    pub(super) fn retry_at(&self) -> Moment {
        self.now + self.config.retry
    }

    /// When members take stages without a host beside their own, unless that waits for other members.
    pub(super) fn extends_at(&self) -> Option<Moment> {
        let at = self.progress.lacks_hosts_since? + self.config.extend_after;
        (at > self.now).then_some(at)
    }

    /// Whether a step's passes can run: the version that it reads is committed.
    pub(super) fn has_weights_of(&self, step: Step) -> bool {
        self.config.manifest.reads(step) <= self.progress.version
    }

    /// Whether passes of a step can run in the present phase.
    pub(super) fn runs(&self, step: Step) -> bool {
        self.progress.is_training() && self.has_weights_of(step)
    }

    /// Whether the last version is committed.
    pub(super) fn is_last_version(&self) -> bool {
        self.progress.version.0 == self.config.manifest.training.steps
    }

    /// Sends a member its span. A member that does not serve yet listens from `listens_from` on.
    pub(super) fn send_admission(&self, member: Member, listens_from: Step, out: &mut Out) {
        let Some(span) = self.members.current.span_of(member) else { return };
        let serving = self.members.current.is_serving(member);
        let version = if serving { self.progress.version } else { listens_from };
        send(member, FromCoordinator::Admitted { era: self.progress.era, span, version }, out);
    }

    /// Asks a member which claims it holds. The newest commit is in the question, because an earlier
    /// coordinator may have died before it sent that. A member without the logged membership requests it
    /// and is asked again.
    pub(super) fn send_census(&self, member: Member, out: &mut Out) {
        let Some(span) = self.members.current.span_of(member) else { return };
        let Progress { term, era, began_at, version, .. } = self.progress;
        send(member, FromCoordinator::Admitted { era, span, version }, out);
        let (commit, view) = (self.progress.last_commit.clone(), self.members.logged.number);
        send(member, FromCoordinator::Census { term, era, began_at, span, commit, view }, out);
    }
}
