//! `shoal init`: writes a run configuration to start from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};

use anyhow::{Context, anyhow};

use crate::cli::InitArgs;
use crate::config::RunConfig;
use crate::exit::{Exit, ExitWith};

/// Writes the default run configuration. Never overwrites a file.
///
/// # Errors
/// If the file exists or cannot be written.
pub(super) fn run(args: &InitArgs) -> anyhow::Result<()> {
    let path = args.output.display();
    let created = OpenOptions::new().write(true).create_new(true).open(&args.output);
    let mut file = match created {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            Err(anyhow!("{path} exists: remove it, or choose another name with -o"))
        }
        other => other.with_context(|| path.to_string()),
    }
    .exit_with(Exit::Usage)?;
    file.write_all(RunConfig::default().to_toml().as_bytes()).with_context(|| path.to_string())?;
    println!("wrote {path}; train it with `shoal start {path}` or `shoal local {path} --out DIR`");
    Ok(())
}
