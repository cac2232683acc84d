//! The Python interpreter with PyTorch and transformers.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::process::Process;
use crate::program::{prepared, root};

/// Runs a script of this workspace, and parses its output as JSON.
///
/// # Panics
/// When the interpreter is not installed, or the script fails.
pub fn python<A: AsRef<OsStr>>(script: &Path, arguments: impl IntoIterator<Item = A>) -> Value {
    let interpreter = root().join(".venv/bin/python");
    assert!(
        interpreter.exists(),
        "this test compares with PyTorch: scripts/setup.sh --tests installs it"
    );
    let mut command = Command::new(interpreter);
    command
        .arg(root().join(script))
        .args(arguments)
        .env("OMP_NUM_THREADS", "1")
        // No requests to the network.
        .env("HF_HUB_OFFLINE", "1");
    let printed = Process::start("python", prepared(command)).end().success();
    serde_json::from_str(&printed).expect("the script prints JSON")
}
