//! Errors of the client, one for each cause.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::origin::shown;

/// Why a request, a download or a push failed.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The endpoint is no URL.
    #[error("HF_ENDPOINT = \"{endpoint}\" is no URL; write for example https://huggingface.co")]
    BadEndpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// The token has characters that no token has.
    #[error(
        "the access token is no token; copy one from https://huggingface.co/settings/tokens into \
         HF_TOKEN"
    )]
    BadToken,
    /// There is no folder for the cache.
    #[error("there is no folder for downloads: set HF_HOME")]
    NoCache,
    /// The file of certificate authorities is not usable.
    #[error("{path} has no usable certificates: {reason}; correct or unset SSL_CERT_FILE",
            path = path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// Offline mode, and the cache has no such revision.
    #[error("{repository} at {revision} is not in {cache}; unset HF_HUB_OFFLINE to download it",
            cache = cache.display())]
    NotCached {
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// Offline mode, and the cache lacks a file.
    #[error("{file} of {repository} is not in the cache; unset HF_HUB_OFFLINE to download it")]
    FileNotCached {
        /// The file.
        file: String,
        /// The repository.
        repository: String,
    },
    /// Offline mode, and the request needs the Hub.
    #[error("{action} needs the Hub; unset HF_HUB_OFFLINE")]
    Offline {
        /// The action.
        action: &'static str,
    },
    /// The host does not exist, or names cannot be resolved.
    #[error("no host {host} is known; check the network, the name and HF_ENDPOINT")]
    NoSuchHost {
        /// The host.
        host: String,
    },
    /// The server cannot be reached, or the connection breaks.
    #[error("{url} cannot be reached: {reason}; check the network, then run the command again")]
    Unreachable {
        /// The URL.
        url: String,
        /// The last failure.
        reason: String,
    },
    /// The server's certificate is not trusted.
    #[error(
        "{url} has no certificate that is trusted: {reason}; set SSL_CERT_FILE to the authorities \
         of your network"
    )]
    Untrusted {
        /// The URL.
        url: String,
        /// The cause.
        reason: String,
    },
    /// A redirect that is not followed.
    #[error("{url} redirects to \"{location}\", which is not followed; check HF_ENDPOINT")]
    Redirect {
        /// The URL.
        url: String,
        /// The target.
        location: String,
    },
    /// The repository does not exist or needs a token.
    #[error(
        "{repository} does not exist or is private: check the name, or set HF_TOKEN to a token of \
         https://huggingface.co/settings/tokens"
    )]
    NeedsToken {
        /// The repository.
        repository: String,
    },
    /// The Hub does not accept the token.
    #[error(
        "the Hub does not accept the access token for {repository}: set HF_TOKEN to a valid token \
         of https://huggingface.co/settings/tokens"
    )]
    InvalidToken {
        /// The repository.
        repository: String,
    },
    /// The repository is gated.
    #[error("{repository} is gated: set HF_TOKEN and accept its licence at {url}")]
    Gated {
        /// The repository.
        repository: String,
        /// The page on which its licence is accepted.
        url: String,
    },
    /// The token's permissions do not suffice.
    #[error(
        "the Hub refuses access to {repository}: {reason}; set HF_TOKEN to a token with this \
         permission"
    )]
    Forbidden {
        /// The repository.
        repository: String,
        /// The message of the server.
        reason: String,
    },
    /// The repository does not exist.
    #[error("there is no repository {repository}; check its name at {url}")]
    NoSuchRepository {
        /// The repository.
        repository: String,
        /// Its page.
        url: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repository} has no branch, tag or commit {revision}; see {url}")]
    NoSuchRevision {
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
        /// The page that lists its files and branches.
        url: String,
    },
    /// The file does not exist.
    #[error("there is no file {file} at {url}; check its name")]
    NoSuchFile {
        /// The file.
        file: String,
        /// The address that was asked.
        url: String,
    },
    /// The pattern selects no file.
    #[error("{pattern} selects no file of {repository}; see {url}")]
    NothingSelected {
        /// The pattern.
        pattern: String,
        /// The repository.
        repository: String,
        /// The page that lists its files.
        url: String,
    },
    /// The server limits the rate of requests.
    #[error("{url} limits the rate of requests; wait some minutes, or set HF_TOKEN")]
    RateLimited {
        /// The URL.
        url: String,
    },
    /// The server fails.
    #[error("{url} fails with status {status}; run the command again later")]
    ServerFailure {
        /// The URL.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// A status that has no other meaning here.
    #[error("{url} refuses the request with status {status}: {reason}")]
    Refused {
        /// The URL.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The message of the server.
        reason: String,
    },
    /// Only a part of the file arrives.
    #[error(
        "{file} breaks off after {have} of {length} bytes: {reason}; run the command again to \
         resume it"
    )]
    Incomplete {
        /// The file.
        file: String,
        /// Bytes that are there.
        have: u64,
        /// Length of the file.
        length: u64,
        /// The cause.
        reason: String,
    },
    /// The server sends a file of another length.
    #[error(
        "{file} has {actual} bytes instead of {length}; the server at {url} sends another file"
    )]
    WrongLength {
        /// The file.
        file: String,
        /// The expected length.
        length: u64,
        /// The length that the server announces.
        actual: u64,
        /// The URL.
        url: String,
    },
    /// The bytes do not match their hash.
    #[error(
        "{file} does not match its hash {expected}: it has {actual}; run the command again, or \
         use another endpoint or mirror"
    )]
    HashMismatch {
        /// The file.
        file: String,
        /// The expected hash.
        expected: String,
        /// The hash of the bytes that arrived.
        actual: String,
    },
    /// An answer that is not what the interface of the Hub describes.
    #[error("the answer of {url} is not that of a Hub: {reason}; check HF_ENDPOINT")]
    Malformed {
        /// The URL.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// An answer over its size limit.
    #[error("the answer of {url} is longer than {cap} bytes; check HF_ENDPOINT")]
    TooLong {
        /// The URL.
        url: String,
        /// The limit in bytes.
        cap: u64,
    },
    /// More files than one command handles.
    #[error("{place} has more than {cap} files; select fewer")]
    TooManyFiles {
        /// The repository or folder.
        place: String,
        /// The limit.
        cap: usize,
    },
    /// Another process holds the lock for too long.
    #[error("another process has held {path} for {waited:?}; wait for its download, or end it",
            path = path.display())]
    Locked {
        /// The file of the lock.
        path: PathBuf,
        /// The time that was waited.
        waited: Duration,
    },
    /// The disk is full.
    #[error(
        "the disk is full at {path}; free some space, then run the command again to resume",
        path = path.display()
    )]
    DiskFull {
        /// The file that does not fit.
        path: PathBuf,
    },
    /// The file system refuses.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The folder cannot be pushed.
    #[error("{path} cannot be pushed: {reason}", path = path.display())]
    BadFolder {
        /// The folder or file.
        path: PathBuf,
        /// The cause.
        reason: &'static str,
    },
    /// A push without a token.
    #[error(
        "a push needs an access token: set HF_TOKEN to one with write permission of \
         https://huggingface.co/settings/tokens"
    )]
    PushNeedsToken,
    /// The storage refuses a file.
    #[error("the Hub does not store {file}: {reason}")]
    NotStored {
        /// The file.
        file: String,
        /// The message of the server.
        reason: String,
    },
    /// The branch has changed during the push.
    #[error("{repository} has changed during the push; look at {url}, then push again")]
    Conflict {
        /// The repository.
        repository: String,
        /// Its page.
        url: String,
    },
}

impl HubError {
    /// An error of the file system at this path.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::DiskFull { path },
            _ => Self::Io { path, source },
        }
    }

    /// An answer that is not that of a Hub.
    pub(crate) fn malformed(url: &str, reason: impl ToString) -> Self {
        Self::Malformed { url: shown(url).to_owned(), reason: printable(&reason.to_string()) }
    }
}

/// The start of a server's message, without line breaks and control characters.
pub(crate) fn printable(message: &str) -> String {
    let start = message.chars().take(200);
    start.map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}
