//! Progress of one file.

/// Progress of one file that is downloaded or uploaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The path of the file in its repository, or its URL on a mirror.
    pub file: &'a str,
    /// Bytes that are done, those of an earlier attempt included.
    pub bytes: u64,
    /// Length of the file in bytes.
    pub total: u64,
}
