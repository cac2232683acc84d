//! Addresses of archives: a folder, or a place in an object store.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{
    OsStringValueParser, TryMapValueParser, TypedValueParser as _, ValueParserFactory,
};
use object_store::path::Path;

/// The longest name of a bucket; Google's, with dots, is the longest of all.
const LONGEST_BUCKET: usize = 222;

/// The longest path in a bucket. Names of objects have 1024 bytes at most.
const LONGEST_PREFIX: usize = 768;

/// An object store's protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// Amazon S3, and every store that speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
}

impl Scheme {
    const ALL: [Self; 3] = [Self::S3, Self::Gs, Self::Az];

    fn name(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Gs => "gs",
            Self::Az => "az",
        }
    }

    /// The beginning of the names of the store's variables.
    pub(super) fn variables(self) -> &'static str {
        match self {
            Self::S3 => "AWS_",
            Self::Gs => "GOOGLE_",
            Self::Az => "AZURE_",
        }
    }

    /// The variables that give the store's credentials.
    pub(super) fn credentials(self) -> &'static str {
        match self {
            Self::S3 => "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
            Self::Gs => "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
            Self::Az => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        }
    }
}

/// A folder of a bucket, `s3://BUCKET/PREFIX`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketUrl {
    /// The protocol.
    pub scheme: Scheme,
    /// The name of the bucket; Azure calls it a container.
    pub bucket: String,
    /// The path in the bucket; empty for the bucket itself.
    pub prefix: Path,
}

/// Why a text is no address of a bucket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It has another scheme.
    #[error(
        "{scheme}:// is no object store: write s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
    )]
    Scheme {
        /// The scheme.
        scheme: String,
    },
    /// The bucket has no name, or one that no bucket has.
    #[error(
        "{name:?} is no name of a bucket: it has letters, digits, dots, hyphens and underscores"
    )]
    Bucket {
        /// The name.
        name: String,
    },
    /// The path has empty or relative parts, or is too long.
    #[error("{path:?} is no path in a bucket: {reason}")]
    Path {
        /// The path.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

impl FromStr for BucketUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (scheme, rest) = text.split_once("://").unwrap_or((text, ""));
        let known = Scheme::ALL.into_iter().find(|known| known.name() == scheme);
        let scheme = known.ok_or_else(|| UrlError::Scheme { scheme: scheme.to_owned() })?;
        let (bucket, path) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let named = bucket.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !named || bucket.len() > LONGEST_BUCKET || !bucket.chars().all(plain) {
            return Err(UrlError::Bucket { name: bucket.to_owned() });
        }
        let refused = |reason: String| UrlError::Path { path: path.to_owned(), reason };
        if path.len() > LONGEST_PREFIX {
            return Err(refused(format!("it has more than {LONGEST_PREFIX} bytes")));
        }
        let inner = path.strip_suffix('/').unwrap_or(path);
        if inner.starts_with('/') || inner.ends_with('/') {
            return Err(refused("it has an empty part".to_owned()));
        }
        let prefix = Path::parse(inner).map_err(|error| refused(error.to_string()))?;
        Ok(Self { scheme, bucket: bucket.to_owned(), prefix })
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scheme, bucket, prefix } = self;
        write!(formatter, "{}://{bucket}", scheme.name())?;
        if prefix.as_ref().is_empty() { Ok(()) } else { write!(formatter, "/{prefix}") }
    }
}

/// The place of an archive, or of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArchivePlace {
    /// A folder of this machine.
    Folder(PathBuf),
    /// A folder of a bucket.
    Bucket(BucketUrl),
}

impl FromStr for ArchivePlace {
    type Err = UrlError;

    /// Whatever has a scheme is a bucket, everything else a folder.
    fn from_str(text: &str) -> Result<Self, UrlError> {
        if text.contains("://") {
            text.parse().map(Self::Bucket)
        } else {
            Ok(Self::Folder(text.into()))
        }
    }
}

impl ValueParserFactory for ArchivePlace {
    type Parser = TryMapValueParser<OsStringValueParser, fn(OsString) -> Result<Self, UrlError>>;

    /// Reads an argument. A folder's path may be of any bytes.
    fn value_parser() -> Self::Parser {
        OsStringValueParser::new().try_map(|argument| match argument.into_string() {
            Ok(text) => text.parse(),
            Err(path) => Ok(Self::Folder(path.into())),
        })
    }
}

impl fmt::Display for ArchivePlace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(formatter),
            Self::Bucket(url) => url.fmt(formatter),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, written) in [
            ("s3://models", "s3://models"),
            ("s3://models/", "s3://models"),
            ("gs://my.models_1/a/b c", "gs://my.models_1/a/b c"),
            ("az://container/run/7/", "az://container/run/7"),
        ] {
            let url: BucketUrl = text.parse().expect(text);
            assert_eq!(url.to_string(), written);
            assert_eq!(written.parse(), Ok(url));
        }
    }

    #[test]
    fn addresses_of_no_bucket_are_refused() {
        for text in [
            "",
            "models",
            "s3:/models",
            "http://models/a",
            "S3://models",
            "s3://",
            "s3:///a",
            "s3://.",
            "s3://user:secret@models/a",
            "s3://models?region=x",
            "s3://models//a",
            "s3://models/a//",
            "s3://models/a/../b",
            "s3://models/./b",
            "s3://models/a\0",
        ] {
            assert!(text.parse::<BucketUrl>().is_err(), "{text:?}");
        }
        let long = format!("s3://models/{}", "a".repeat(LONGEST_PREFIX + 1));
        assert!(long.parse::<BucketUrl>().is_err());
    }

    #[test]
    fn a_place_without_a_scheme_is_a_folder() {
        for text in ["archive", "/mnt/archive", "s3:archive", "./a b"] {
            assert_eq!(text.parse(), Ok(ArchivePlace::Folder(text.into())));
        }
        assert!(matches!("gs://models".parse(), Ok(ArchivePlace::Bucket(_))));
        assert!("ftp://models".parse::<ArchivePlace>().is_err());
    }
}
