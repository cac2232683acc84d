//! Errors of archives in object stores, one for each cause.

use std::io;
use std::path::{Path, PathBuf};

use shoal_engine::CheckpointError;

use crate::other_run::OtherRun;

/// The longest explanation of a store that an error repeats, in characters.
const LONGEST_REASON: usize = 200;

/// Codes of stores for clocks that differ, for credentials that have expired, and for buckets of another region.
const CLOCK: [&str; 2] = ["RequestTimeTooSkewed", "RequestExpired"];
const EXPIRED: [&str; 2] = ["ExpiredToken", "TokenRefreshRequired"];
const REGION: [&str; 4] = [
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "IncorrectEndpoint",
];

/// Why an archive in an object store cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BucketError {
    /// The settings of the environment make no client.
    #[error("{place} cannot be used: {reason}; set {variables}")]
    Settings { place: String, reason: String, variables: &'static str },
    /// The bucket does not exist.
    #[error(
        "{place} is in no bucket that exists; create the bucket, or correct its name, region and endpoint"
    )]
    Missing { place: String },
    /// The store refuses the credentials, or they do not suffice.
    #[error(
        "{place} refuses the request: {reason}; check {variables}, and that they may read, write and list"
    )]
    Refused { place: String, reason: String, variables: &'static str },
    /// The clocks of this machine and of the store differ.
    #[error(
        "{place} refuses the request: {reason}; set this machine's clock: timedatectl set-ntp true"
    )]
    Clock { place: String, reason: String },
    /// The credentials were valid, and no longer are.
    #[error(
        "{place} refuses the request: {reason}; get new credentials, set {variables} and start again"
    )]
    Expired { place: String, reason: String, variables: &'static str },
    /// The bucket is in another region.
    #[error("{place} is in another region: {reason}; set AWS_REGION to the region of the bucket")]
    Region { place: String, reason: String },
    /// The store cannot be reached, or fails.
    #[error("{place} does not answer: {reason}; check the network and the endpoint")]
    Unreachable { place: String, reason: String },
    /// No answer came in time.
    #[error("{place} gave no answer in {seconds} s; check the network and the endpoint")]
    Silent { place: String, seconds: u64 },
    /// An object is not there.
    #[error("{object} is missing")]
    Lacks { object: String },
    /// An object is not what its checkpoint's index says.
    #[error("{object} is damaged: {reason}; take another checkpoint")]
    Damaged { object: String, reason: String },
    /// No checkpoint of a run is whole.
    #[error(
        "{place} is damaged, and there is no older checkpoint that is whole: bring a copy of it there, or move the \
         archive away to begin again at version 0"
    )]
    AllDamaged { place: String },
    /// There is no whole checkpoint.
    #[error("{place} has no whole checkpoint: name the folder of a checkpoint or of an archive")]
    NoCheckpoint { place: String },
    /// The weights of another run are in the way.
    #[error(transparent)]
    OtherRun(#[from] OtherRun),
    /// Two processes continue the run from this archive.
    #[error("another process has begun to continue the run from {place}: join that one")]
    Continued { place: String },
    /// A file of this machine cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    Local { path: PathBuf, source: io::Error },
    /// A checkpoint's index is damaged.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl BucketError {
    /// An error of the file system at a path.
    pub(crate) fn local(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Local { path, source }
    }

    /// The error of a request about an object, or about the whole `place`.
    pub(super) fn of(
        place: &str,
        variables: &'static str,
        object: &str,
        error: &object_store::Error,
    ) -> Self {
        let (place, text) = (place.to_owned(), error.to_string());
        let reason = reason(error);
        let names = |codes: &[&str]| codes.iter().any(|code| text.contains(code));
        match error {
            _ if names(&["NoSuchBucket", "ContainerNotFound", "bucket does not exist"]) => {
                Self::Missing { place }
            }
            _ if names(&CLOCK) => Self::Clock { place, reason },
            _ if names(&EXPIRED) => Self::Expired { place, reason, variables },
            _ if names(&REGION) => Self::Region { place, reason },
            object_store::Error::NotFound { .. } => {
                Self::Lacks { object: format!("{place}/{object}") }
            }
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => {
                Self::Refused { place, reason, variables }
            }
            _ => Self::Unreachable { place, reason },
        }
    }
}

/// The store's own explanation on one line, or that of the innermost cause.
fn reason(error: &object_store::Error) -> String {
    let text = error.to_string();
    let tag = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        Some(rest.split_once(&format!("</{name}>"))?.0)
    };
    let explained = tag("Code").map(|code| match tag("Message") {
        Some(message) => format!("{code}: {message}"),
        None => code.to_owned(),
    });
    let innermost = || {
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        cause.to_string()
    };
    let words = explained.unwrap_or_else(innermost);
    let line = words.split_whitespace().collect::<Vec<_>>().join(" ");
    line.trim_end_matches('.').chars().take(LONGEST_REASON).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: text.to_owned().into() }
    }

    #[test]
    fn the_explanation_of_a_store_is_one_line() {
        let xml = "status 403:\n<Error><Code>AccessDenied</Code><Message>Not\n yours.</Message>";
        assert_eq!(reason(&generic(xml)), "AccessDenied: Not yours");
        assert_eq!(reason(&generic("broken\npipe")), "broken pipe");
        assert_eq!(reason(&generic(&"a".repeat(1000))).len(), LONGEST_REASON);
    }

    #[test]
    fn clocks_tokens_and_regions_are_told_apart_from_the_network() {
        let of = |code: &str| {
            let text = format!("status 400: <Error><Code>{code}</Code><Message>Why.</Message>");
            BucketError::of("s3://b", "KEYS", "a", &generic(&text)).to_string()
        };
        assert!(of("RequestTimeTooSkewed").contains("set this machine's clock"));
        let expired = of("ExpiredToken");
        assert!(expired.contains("get new credentials, set KEYS"), "{expired}");
        for code in ["PermanentRedirect", "AuthorizationHeaderMalformed"] {
            let region = of(code);
            assert!(region.contains(code) && region.contains("AWS_REGION"), "{region}");
        }
        assert!(of("SlowDown").contains("check the network"));
    }

    #[test]
    fn a_missing_bucket_is_no_missing_object() {
        let error = |code: &str| object_store::Error::NotFound {
            path: "a".to_owned(),
            source: format!("<Code>{code}</Code>").into(),
        };
        let of = |code: &str| BucketError::of("s3://b", "", "a", &error(code));
        assert!(matches!(of("NoSuchBucket"), BucketError::Missing { .. }));
        assert!(matches!(of("NoSuchKey"), BucketError::Lacks { .. }));
    }
}
