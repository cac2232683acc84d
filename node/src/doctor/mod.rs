//! Checks whether this machine can join a run. Each finding states a fact and, if something is
//! wrong, how to fix it.

mod libtorch;
mod machine;
mod own_port;
mod peers;
mod ports;
mod room;
mod router;

pub(crate) use libtorch::libtorch;
pub(crate) use machine::{certificate, data_dir, devices, disk};
pub(crate) use own_port::{by_probes, of_running};
pub(crate) use peers::{network, ticket, version};
pub(crate) use ports::{Owner, ports};
pub(crate) use room::memory;
pub(crate) use router::router;

use std::fmt;

use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// As it should be.
    Well,
    /// Worth knowing; it does not prevent joining.
    Note,
    /// It must be fixed before this machine can join.
    Wrong,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// The subject.
    pub(crate) about: String,
    /// The severity.
    pub(crate) state: State,
    /// The finding in a sentence.
    pub(crate) says: String,
    /// How to fix it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Finding {
    fn new(about: &str, state: State, says: impl Into<String>) -> Self {
        Self { about: about.to_owned(), state, says: says.into(), fix: None }
    }

    fn well(about: &str, says: impl Into<String>) -> Self {
        Self::new(about, State::Well, says)
    }

    fn note(about: &str, says: impl Into<String>) -> Self {
        Self::new(about, State::Note, says)
    }

    fn wrong(about: &str, says: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..Self::new(about, State::Wrong, says) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.state {
            State::Well => "ok",
            State::Note => "note",
            State::Wrong => "WRONG",
        };
        write!(f, "{mark:<6} {:<15} {}", self.about, self.says)?;
        if let Some(fix) = &self.fix {
            write!(f, "\n{:23}-> {fix}", "")?;
        }
        Ok(())
    }
}
