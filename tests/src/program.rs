//! The binary `shoal`, and the commands that start its processes.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use serde_json::Value;

/// The binary of this test's profile. Builds it where it is out of date.
///
/// # Panics
/// When the build fails.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(build)
}

/// The workspace's root folder.
#[must_use]
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of a workspace")
}

/// Builds the binary. Cargo prints its path, which depends on the target directory.
fn build() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // The build script of a dependency reads what cargo says of the test's package, and would run again.
    let of_test =
        |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_test)) {
        command.env_remove(name);
    }
    let built = command
        .current_dir(root())
        // With all members and an example, which needs the dev-dependencies, features are the same as in the
        // tests' own build: nothing is built twice.
        .args(["build", "--workspace", "--bin", "shoal", "--example", "emulated_network"])
        .args(["--message-format", "json"])
        .args(["--profile", &profile()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "the binary does not build");
    String::from_utf8(built.stdout)
        .expect("cargo writes UTF-8")
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == "shoal")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .expect("cargo names the executable")
}

/// The profile of this test, whose executable lies in `PROFILE/deps`.
fn profile() -> String {
    let executable = std::env::current_exe().expect("a running program");
    let folder = executable.parent().and_then(Path::parent).and_then(Path::file_name);
    match folder.and_then(OsStr::to_str).expect("a folder named after the profile") {
        "debug" => "dev".to_owned(),
        other => other.to_owned(),
    }
}

/// A command line of `shoal`.
#[must_use]
pub fn shoal<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(binary());
    command.args(arguments);
    prepared(command)
}

/// A command with an empty stdin and captured output, whose process dies with the test.
#[must_use]
pub fn prepared(mut command: Command) -> Command {
    command
        // Threads that wait by spinning would take processor time from other processes.
        .env("OMP_WAIT_POLICY", "passive")
        .env_remove("SHOAL_LOG")
        .env_remove("SHOAL_DIE_AT")
        .env_remove("SHOAL_COMPUTES_WRONG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // SAFETY: between fork and exec it makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
    command
}
