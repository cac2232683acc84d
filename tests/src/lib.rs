//! Shared code of the tests of whole swarms: real processes of the built binary, real sockets, and the
//! events, reports and exit codes that they leave. Only `hostile`, which speaks the protocol, uses types of the
//! other crates: the tests see what a user sees.
//!
//! Every wait ends with its event, or after [`PATIENCE`] with a message that names the missing event.

pub mod cgroup;
pub mod emulator;
pub mod failing_disk;
pub mod hostile;
pub mod http;
pub mod namespace;
pub mod nat;
pub mod object_store;
pub mod process;
pub mod program;
pub mod prometheus;
pub mod python;
pub mod run;
pub mod swarm;

use std::io::Write;
use std::time::Duration;

/// The time that a test waits for one event. Only a failure takes that long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Prints why a test did not run. It writes to stderr itself, as the harness hides the output of passing tests.
pub fn skip(reason: &str) {
    // A closed stderr has no reader.
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}
