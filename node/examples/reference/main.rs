//! Writes what follows from the command line and the default run: the references in `docs/`.
//!
//!     cargo run -p shoal-node --example reference
//!
//! Its test says when those files are out of date.

mod commands;
mod configuration;

use std::io;
use std::path::{Path, PathBuf};

/// Each file and what is to be in it.
fn files() -> Vec<(PathBuf, String)> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a member of a workspace")
        .join("docs");
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
    fn what_follows_from_the_code_is_up_to_date() {
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
