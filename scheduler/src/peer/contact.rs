//! Contact with the coordinator: its identity, its last message and its term.

use std::time::Duration;

use shoal_protocol::ids::{Member, Term};
use shoal_protocol::units::Moment;

/// The last known coordinator.
#[derive(Debug, Default)]
pub(super) struct CoordinatorContact {
    current: Option<Member>,
    last_message_at: Moment,
    /// The highest term in which a coordinator took a census of this peer.
    term: Term,
}

impl CoordinatorContact {
    /// The sender of the newest coordinator message.
    pub(super) fn current(&self) -> Option<Member> {
        self.current
    }

    pub(super) fn note_message(&mut self, now: Moment, from: Member) {
        self.current = Some(from);
        self.last_message_at = now;
    }

    /// Whether the coordinator sent nothing for at least this long.
    pub(super) fn is_silent_for(&self, now: Moment, limit: Duration) -> bool {
        now.since(self.last_message_at) >= limit
    }

    pub(super) fn term(&self) -> Term {
        self.term
    }

    /// Follows a term from here on. Returns whether it is a new one.
    pub(super) fn enter_term(&mut self, term: Term) -> bool {
        let newer = term > self.term;
        self.term = self.term.max(term);
        newer
    }
}
