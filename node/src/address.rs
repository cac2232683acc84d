//! The address to join at: given on the command line, or read from a file that the first peer writes.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;

use crate::exit::{Exit, ExitWith};

/// Interval at which the file is looked for.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The most bytes of an address, so that a wrong file is not read whole.
const LONGEST: u64 = 1024;

/// The address to join at, as given on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JoinAddress {
    /// The address itself.
    Typed(String),
    /// A file that holds the address, or will.
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

impl From<OsString> for JoinAddress {
    /// Reads an argument. Paths may be of any bytes; an address that is no text is refused as an address.
    fn from(argument: OsString) -> Self {
        match argument.as_bytes() {
            [b'@', path @ ..] => Self::File(OsStr::from_bytes(path).into()),
            _ => Self::Typed(argument.to_string_lossy().into_owned()),
        }
    }
}

impl JoinAddress {
    /// The address, or none while its file is missing. Another process writes the file, perhaps on
    /// another machine's file system, and polling is the only method that works everywhere.
    ///
    /// # Errors
    /// If the file cannot be read or is too large for an address.
    pub fn read(&self) -> anyhow::Result<Option<String>> {
        let path = match self {
            Self::Typed(address) => return Ok(Some(address.clone())),
            Self::File(path) => path,
        };
        let failed =
            |error| Err(error).with_context(|| path.display().to_string()).exit_with(Exit::Usage);
        match std::fs::metadata(path) {
            Ok(about) if about.len() > LONGEST => {
                return Err(anyhow::anyhow!("{} holds no address", path.display()))
                    .exit_with(Exit::Usage);
            }
            Ok(about) if about.len() > 0 => {}
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return failed(error),
            _ => return Ok(None),
        }
        match std::fs::read_to_string(path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) => failed(error),
        }
    }

    /// The error for a file that did not appear.
    #[must_use]
    pub fn missing(&self, waited: Duration) -> anyhow::Error {
        let place = match self {
            Self::Typed(address) => address.clone(),
            Self::File(path) => path.display().to_string(),
        };
        let seconds = waited.as_secs();
        anyhow::anyhow!(
            "no address in {place} after {seconds} s: check that the first peer is running"
        )
    }
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
    fn a_path_of_any_bytes_is_a_file() {
        let bytes = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
        let path = JoinAddress::from(bytes(b"@x\xff/address"));
        assert_eq!(path, JoinAddress::File(bytes(b"x\xff/address").into()));
        let address = JoinAddress::from(bytes(b"/ip4/\xff"));
        assert_eq!(address, JoinAddress::Typed("/ip4/\u{fffd}".to_owned()));
    }

    #[test]
    fn a_file_that_appears_later_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("address");
        let address = JoinAddress::File(path.clone());
        assert_eq!(address.read().expect("nothing wrong"), None);
        std::fs::write(path, "/ip4/1.2.3.4\n").expect("written");
        assert_eq!(address.read().expect("an address").as_deref(), Some("/ip4/1.2.3.4"));
    }

    #[test]
    fn a_file_without_an_address_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let large = folder.path().join("large");
        std::fs::write(&large, vec![b'x'; 2000]).expect("written");
        let refused = JoinAddress::File(large).read().expect_err("no address");
        assert_eq!(Exit::of(&refused), Exit::Usage);
    }
}
