//! What the tests of whole swarms have in common: real processes of the built binary, real sockets,
//! and the events, reports and exit codes that they leave. Nothing here knows a type of Shoal's: the
//! tests see what a user sees.
//!
//! Every wait ends: with the event, or after [`PATIENCE`] with a message that says what did not come.

pub mod emulator;
pub mod http;
pub mod namespace;
pub mod nat;
pub mod process;
pub mod program;
pub mod prometheus;
pub mod python;
pub mod run;
pub mod swarm;

use std::io::Write;
use std::time::Duration;

/// How long a test waits for one thing to happen. Only a failure takes as long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Says why a test did not run: to the terminal itself, as what a passing test prints is not shown.
pub fn skip(reason: &str) {
    // Without a terminal to say it to there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}
