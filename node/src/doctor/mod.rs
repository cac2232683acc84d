//! What could keep this machine out of a run, looked for before somebody has to guess: each finding says what
//! is wrong and what to do about it.

mod machine;
mod own_port;
mod peers;
mod ports;
mod router;

pub(crate) use machine::{data_dir, device, disk, papers};
pub(crate) use own_port::{by_probes, of_running};
pub(crate) use peers::{network, ticket, version};
pub(crate) use ports::{Owner, ports};
pub(crate) use router::router;

use std::fmt;

use serde::Serialize;

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// As it should be.
    Well,
    /// Worth knowing, and no hindrance.
    Note,
    /// It must be mended.
    Wrong,
}

/// Something that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What.
    pub(crate) about: String,
    /// How it is.
    pub(crate) state: State,
    /// In words.
    pub(crate) says: String,
    /// What to do.
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
