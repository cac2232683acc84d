//! The Python interpreter with PyTorch and transformers.

#[path = "../../engine/tests/python/serve.rs"]
mod serve;

use std::ffi::OsStr;
use std::path::Path;

use serde_json::Value;

/// Runs a script of this workspace, and parses its output as JSON.
///
/// # Panics
/// When the interpreter is not installed, or the script fails.
pub fn python<A: AsRef<OsStr>>(script: &Path, arguments: impl IntoIterator<Item = A>) -> Value {
    let arguments: Vec<A> = arguments.into_iter().collect();
    serve::run(script, &arguments.iter().map(AsRef::as_ref).collect::<Vec<_>>())
}
