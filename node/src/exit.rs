//! Exit codes, and errors that carry one.

use std::fmt;
use std::process::ExitCode;

/// The cause of a failure, as an exit code. Success is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// 1: the run failed, was stopped, or differs from its reference.
    Failed = 1,
    /// 2: a flag, a run configuration or a text is not usable.
    Usage = 2,
    /// 3: the swarm is unreachable, or did not admit this peer.
    NotAdmitted = 3,
    /// 4: a checkpoint or one of its files is truncated, corrupt or incomplete.
    Corrupt = 4,
}

impl Exit {
    /// The exit codes, as `shoal --help` lists them.
    pub const HELP: &'static str = "\
Exit codes:
  0  success
  1  the run failed, was stopped, or differs from its reference
  2  a flag, a run configuration or a text is not usable
  3  the swarm is unreachable, or did not admit this peer
  4  a checkpoint or one of its files is truncated, corrupt or incomplete";

    /// The exit code of an error: the one that it or a cause of it carries, or `Failed`.
    #[must_use]
    pub fn of(error: &anyhow::Error) -> Self {
        let carried = |cause: &(dyn std::error::Error + 'static)| {
            cause.downcast_ref::<Failure>().map(|failure| failure.exit)
        };
        error
            .downcast_ref::<Failure>()
            .map(|failure| failure.exit)
            .or_else(|| error.chain().find_map(carried))
            .unwrap_or(Self::Failed)
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An error with an exit code. It prints as the error alone.
#[derive(Debug)]
struct Failure {
    exit: Exit,
    error: anyhow::Error,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_causes(&self.error))
    }
}

impl std::error::Error for Failure {}

/// Attaches an exit code to an error.
pub trait ExitWith<T> {
    /// Attaches `exit` to an error, unless a cause of it carries another code already.
    ///
    /// # Errors
    /// If `self` is an error.
    fn exit_with(self, exit: Exit) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> ExitWith<T> for Result<T, E> {
    fn exit_with(self, exit: Exit) -> anyhow::Result<T> {
        self.map_err(|error| {
            let error = error.into();
            let exit = match Exit::of(&error) {
                Exit::Failed => exit,
                inner => inner,
            };
            Failure { exit, error }.into()
        })
    }
}

/// An error and its causes. Many errors include the text of their cause, which is not repeated.
fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| {
        if text.is_empty() {
            cause
        } else if text.contains(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// An error and its causes, on one line.
#[must_use]
pub fn one_line(error: &anyhow::Error) -> String {
    let text = with_causes(error);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join(" ")
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn the_innermost_code_wins() {
        let inner: anyhow::Result<()> = Err(anyhow!("bad")).exit_with(Exit::Corrupt);
        let outer = inner.context("reading").exit_with(Exit::Usage).context("running");
        let error = outer.expect_err("still an error");
        assert_eq!(Exit::of(&error), Exit::Corrupt);
        assert_eq!(one_line(&error), "running: reading: bad");
    }

    #[test]
    fn errors_without_a_code_are_failures() {
        assert_eq!(Exit::of(&anyhow!("oh")), Exit::Failed);
    }

    #[test]
    fn a_cause_is_not_repeated() {
        let system = std::io::Error::other("no room");
        let error = anyhow::Error::new(system).context("a: no room").context("writing");
        assert_eq!(one_line(&error), "writing: a: no room");
    }

    #[test]
    fn many_lines_become_one() {
        assert_eq!(one_line(&anyhow!("a\n\n  b\n")), "a b");
    }

    #[test]
    fn every_code_is_documented() {
        for exit in [Exit::Failed, Exit::Usage, Exit::NotAdmitted, Exit::Corrupt] {
            assert!(Exit::HELP.contains(&format!("\n  {}  ", exit as u8)));
        }
    }
}
