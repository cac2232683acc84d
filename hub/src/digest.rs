//! Hashes of files.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::error::HubError;

/// The hash that a file must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileHash {
    /// SHA-1 of a git blob: of `blob`, the length and the bytes.
    GitBlob([u8; 20]),
    /// SHA-256 of the bytes, as git LFS uses.
    Sha256([u8; 32]),
    /// BLAKE3 of the bytes.
    Blake3([u8; 32]),
}

impl FileHash {
    /// A git blob's hash from 40 hexadecimal digits.
    pub(crate) fn git_blob(text: &str) -> Option<Self> {
        parse(text).map(Self::GitBlob)
    }

    /// A SHA-256 from 64 hexadecimal digits.
    pub(crate) fn sha256(text: &str) -> Option<Self> {
        parse(text).map(Self::Sha256)
    }

    /// The same kind of hash of the file at this path.
    pub(crate) fn of_file(&self, path: &Path) -> Result<Self, HubError> {
        let file = File::open(path).map_err(HubError::io(path))?;
        match self {
            Self::GitBlob(_) => {
                let length = file.metadata().map_err(HubError::io(path))?.len();
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {length}\0"));
                read(file, path, &mut |bytes| hasher.update(bytes))?;
                Ok(Self::GitBlob(hasher.finalize().into()))
            }
            Self::Sha256(_) => sha256_of(file, path).map(Self::Sha256),
            Self::Blake3(_) => {
                let mut hasher = blake3::Hasher::new();
                read(file, path, &mut |bytes| {
                    hasher.update(bytes);
                })?;
                Ok(Self::Blake3(hasher.finalize().into()))
            }
        }
    }
}

impl fmt::Display for FileHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GitBlob(bytes) => formatter.write_str(&hex(bytes)),
            Self::Sha256(bytes) | Self::Blake3(bytes) => formatter.write_str(&hex(bytes)),
        }
    }
}

/// SHA-256 of what is left of a file.
pub(crate) fn sha256_of(file: impl Read, path: &Path) -> Result<[u8; 32], HubError> {
    let mut hasher = Sha256::new();
    read(file, path, &mut |bytes| hasher.update(bytes))?;
    Ok(hasher.finalize().into())
}

/// The bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn read(mut file: impl Read, path: &Path, take: &mut dyn FnMut(&[u8])) -> Result<(), HubError> {
    let mut buffer = vec![0; 256 << 10];
    loop {
        match file.read(&mut buffer).map_err(HubError::io(path))? {
            0 => return Ok(()),
            count => take(&buffer[..count]),
        }
    }
}

/// The bytes of lower-case hexadecimal digits, as the Hub writes them.
fn parse<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    let lower = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    if digits.len() != 2 * N || !digits.iter().all(lower) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_the_hashes_of_git_and_git_lfs() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, "hello\n").expect("written");
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let lfs = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        for expected in [FileHash::git_blob(git), FileHash::sha256(lfs)] {
            let expected = expected.expect("a hash");
            assert_eq!(expected.of_file(&path).expect("read"), expected);
        }
        assert_eq!(FileHash::git_blob(git).expect("a hash").to_string(), git);
        let blake3 = FileHash::Blake3(*blake3::hash(b"hello\n").as_bytes());
        assert_eq!(blake3.of_file(&path).expect("read"), blake3);
    }

    #[test]
    fn other_texts_are_no_hashes() {
        for text in ["", "ce01", &"G".repeat(40), &"A".repeat(40), &"é".repeat(20)] {
            assert_eq!(FileHash::git_blob(text), None, "{text}");
        }
    }
}
