//! Generates the references in `docs/` from the command line and the default run.
//!
//!     cargo run -p shoal-node --example reference
//!
//! Its test fails if the files are out of date.

mod commands;
mod configuration;

use std::io;
use std::path::{Path, PathBuf};

/// The path and the contents of each file.
fn files() -> Vec<(PathBuf, String)> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a member of a workspace")
        .join("docs/reference");
    vec![
        (docs.join("commands.md"), commands::text()),
        (docs.join("configuration.md"), configuration::text()),
    ]
}

fn main() -> io::Result<()> {
    for (path, text) in files() {
        std::fs::write(&path, text)?;
        println!("{}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_references_are_up_to_date() {
        for (path, text) in files() {
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            let path = path.display();
            assert!(
                found == text,
                "{path} is out of date: cargo run -p shoal-node --example reference"
            );
        }
    }
}
