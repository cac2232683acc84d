//! A membership that a member has is the one that the log has under its number.

use std::collections::BTreeMap;

use shoal_protocol::ids::Member;
use shoal_protocol::message::View;

/// The memberships that the log had.
#[derive(Debug, Default)]
pub(in crate::sim) struct Views {
    logged: BTreeMap<u64, View>,
}

impl Views {
    /// The log has a membership.
    pub(in crate::sim) fn logged(&mut self, view: &View) {
        self.logged.insert(view.number, view.clone());
    }

    /// A member has one, by all that it was told.
    pub(in crate::sim) fn has(&self, member: Member, view: &View) -> Result<(), String> {
        match self.logged.get(&view.number) {
            Some(logged) if logged == view => Ok(()),
            _ => Err(format!("{member} has another membership {} than the log", view.number)),
        }
    }
}
