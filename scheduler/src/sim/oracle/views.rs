//! A member's view equals the logged one of the same number.

use std::collections::BTreeMap;

use shoal_protocol::ids::Member;
use shoal_protocol::message::View;

/// The logged views.
#[derive(Debug, Default)]
pub(in crate::sim) struct Views {
    logged: BTreeMap<u64, View>,
}

impl Views {
    /// A view was logged.
    pub(in crate::sim) fn logged(&mut self, view: &View) {
        self.logged.insert(view.number, view.clone());
    }

    /// Compares a member's view with the logged one.
    pub(in crate::sim) fn has(&self, member: Member, view: &View) -> Result<(), String> {
        match self.logged.get(&view.number) {
            Some(logged) if logged == view => Ok(()),
            _ => Err(format!("{member} has another membership {} than the log", view.number)),
        }
    }
}
