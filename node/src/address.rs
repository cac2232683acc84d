//! The address to join at: typed, or read from a file that a first peer writes.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::exit::{Exit, ExitWith};

/// How long to wait for the file of a first peer that is still starting.
const PATIENCE: Duration = Duration::from_secs(60);

/// From one look for the file to the next.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// No address is longer; the cap keeps a wrong file from being read whole.
const LONGEST: u64 = 1024;

/// Where to join, as typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinAddress {
    /// The address itself.
    Typed(String),
    /// A file that holds it, or will.
    File(PathBuf),
}

impl FromStr for JoinAddress {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text
            .strip_prefix('@')
            .map_or_else(|| Self::Typed(text.to_owned()), |path| Self::File(path.into())))
    }
}

impl JoinAddress {
    /// The address; waits a minute for its file.
    ///
    /// # Errors
    /// When there is no such file by then, or none that can be an address.
    pub fn resolve(self) -> anyhow::Result<String> {
        match self {
            Self::Typed(address) => Ok(address),
            Self::File(path) => wait_for(&path, PATIENCE),
        }
    }
}

/// Another process writes the file, perhaps on another machine's file system: looking for it again
/// and again is the one way that works everywhere.
fn wait_for(path: &std::path::Path, patience: Duration) -> anyhow::Result<String> {
    let start = Instant::now();
    loop {
        match std::fs::metadata(path) {
            Ok(about) if about.len() > LONGEST => {
                return Err(anyhow::anyhow!("{} holds no address", path.display()))
                    .exit_with(Exit::Usage);
            }
            Ok(about) if about.len() > 0 => break,
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context(path.display().to_string()).exit_with(Exit::Usage);
            }
            _ if start.elapsed() >= patience => {
                let waited = || -> anyhow::Result<String> {
                    bail!(
                        "no address in {} after {} s: is the first peer running?",
                        path.display(),
                        patience.as_secs()
                    )
                };
                return waited().exit_with(Exit::NotAdmitted);
            }
            _ => std::thread::sleep(LOOK_EVERY),
        }
    }
    let text = std::fs::read_to_string(path)
        .with_context(|| path.display().to_string())
        .exit_with(Exit::Usage)?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_at_sign_names_a_file() {
        assert_eq!("@a/b".parse(), Ok(JoinAddress::File("a/b".into())));
        assert_eq!("/ip4/x".parse(), Ok(JoinAddress::Typed("/ip4/x".into())));
    }

    #[test]
    fn a_file_that_appears_later_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("address");
        let writer = std::thread::spawn({
            let path = path.clone();
            move || std::fs::write(path, "/ip4/1.2.3.4\n").expect("written")
        });
        assert_eq!(wait_for(&path, PATIENCE).expect("an address"), "/ip4/1.2.3.4");
        writer.join().expect("it wrote");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = wait_for(&folder.path().join("none"), Duration::ZERO).expect_err("missing");
        assert_eq!(Exit::of(&missing), Exit::NotAdmitted);
        let large = folder.path().join("large");
        std::fs::write(&large, vec![b'x'; 2000]).expect("written");
        assert!(wait_for(&large, Duration::ZERO).is_err());
    }
}
