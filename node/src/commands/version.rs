//! `shoal --version -v`: the version, and what passes are computed with on this machine.

use std::ffi::OsString;
use std::fmt::Write;

use shoal_engine::MklDispatch;

/// Whether arguments, without the program's name, ask for nothing but the verbose version.
#[must_use]
pub fn is_verbose(arguments: impl IntoIterator<Item = OsString>) -> bool {
    let (mut version, mut verbose) = (false, false);
    for argument in arguments {
        match argument.to_str() {
            Some("--version" | "-V") => version = true,
            Some("--verbose" | "-v") => verbose = true,
            Some("-Vv" | "-vV") => (version, verbose) = (true, true),
            _ => return false,
        }
    }
    version && verbose
}

/// The verbose version, a line for each part.
#[must_use]
pub fn verbose() -> String {
    let mkl = MklDispatch::of_this_process();
    let mut text = format!("shoal {}\n", env!("CARGO_PKG_VERSION"));
    for (part, value) in [
        ("libtorch", shoal_engine::torch_version()),
        ("vectors", shoal_engine::instruction_set().to_owned()),
        ("MKL dispatch", mkl.to_string()),
    ] {
        let _ = writeln!(text, "{part:<13} {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_both_flags_ask_for_the_verbose_version() {
        let asked = |line: &str| is_verbose(line.split_whitespace().map(OsString::from));
        assert!(asked("--version -v") && asked("-v --version") && asked("-Vv"));
        assert!(asked("-V --verbose"));
        assert!(!asked("--version") && !asked("-v") && !asked("") && !asked("demo --version -v"));
    }
}
