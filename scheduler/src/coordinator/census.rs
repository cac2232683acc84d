//! The census at the beginning of a term: each member reports the claims that it holds.

use std::collections::BTreeMap;

use shoal_protocol::ids::Member;
use shoal_protocol::units::Moment;

/// The members whose reports are missing.
#[derive(Debug)]
pub(super) struct Census {
    /// With the part of the report that comes next.
    missing: BTreeMap<Member, u32>,
    /// When they are asked again.
    retry_at: Moment,
}

impl Census {
    pub(super) fn new(members: impl IntoIterator<Item = Member>, retry_at: Moment) -> Self {
        Self { missing: members.into_iter().map(|member| (member, 0)).collect(), retry_at }
    }

    /// When members without a complete report are asked again.
    pub(super) fn retry_at(&self) -> Moment {
        self.retry_at
    }

    /// The members to ask again, if that is due; the next time is `again`.
    pub(super) fn retry(&mut self, now: Moment, again: Moment) -> Vec<Member> {
        if now < self.retry_at {
            return Vec::new();
        }
        self.retry_at = again;
        self.missing.keys().copied().collect()
    }

    /// A part of a member's report. Returns whether it is expected: the next part, or the first one again.
    pub(super) fn take(&mut self, from: Member, part: u32, last: bool) -> bool {
        let Some(expected) = self.missing.get_mut(&from) else { return false };
        if part != 0 && part != *expected {
            return false;
        }
        *expected = part.saturating_add(1);
        if last {
            self.missing.remove(&from);
        }
        true
    }

    /// Whether all reports are complete, except those of members that are gone.
    pub(super) fn is_complete(&self, is_member: impl Fn(Member) -> bool) -> bool {
        self.missing.keys().all(|member| !is_member(*member))
    }
}
