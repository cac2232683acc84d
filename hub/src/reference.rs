//! `hf:` names of repositories, revisions and files.

use std::fmt;
use std::str::FromStr;

use crate::pattern::Pattern;

/// The revision that is used if a reference names none.
const DEFAULT_REVISION: &str = "main";

/// The longest owner, name, revision or pattern, in bytes.
const LONGEST_PART: usize = 255;

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RepositoryKind {
    /// A model.
    Model,
    /// A dataset.
    Dataset,
}

/// A repository of the Hub.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Repository {
    kind: RepositoryKind,
    owner: String,
    name: String,
}

/// Files of a repository at a revision, as written after `hf:`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    repository: Repository,
    revision: String,
    pattern: Option<Pattern>,
}

/// Why a text is no reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// The text does not begin with `hf:`.
    #[error("\"{text}\" does not begin with `hf:`; write for example hf:owner/name")]
    NoPrefix {
        /// The text.
        text: String,
    },
    /// The text has no owner and name.
    #[error("\"{text}\" names no repository; write for example hf:owner/name@revision")]
    NoRepository {
        /// The text.
        text: String,
    },
    /// The owner or the name has characters that the Hub refuses.
    #[error(
        "\"{part}\" is no owner or name: use letters, digits and single - . _ between them, for \
         example hf:owner/name"
    )]
    BadName {
        /// The owner or the name.
        part: String,
    },
    /// The revision is no branch, tag or commit.
    #[error(
        "\"{revision}\" is no branch, tag or commit; write for example hf:owner/name@main or \
         hf:owner/name@v1.0"
    )]
    BadRevision {
        /// The revision.
        revision: String,
    },
    /// The path or pattern leads outside the repository, is empty or is too long.
    #[error(
        "\"{pattern}\" selects no files; write for example hf:datasets/owner/name:data/*.parquet"
    )]
    BadPattern {
        /// The path or pattern.
        pattern: String,
    },
}

impl Repository {
    /// A repository of this kind, owner and name.
    ///
    /// # Errors
    /// If the Hub allows no such owner or name.
    pub fn new(kind: RepositoryKind, owner: &str, name: &str) -> Result<Self, ReferenceError> {
        for part in [owner, name] {
            if !is_name(part) {
                return Err(ReferenceError::BadName { part: part.to_owned() });
            }
        }
        Ok(Self { kind, owner: owner.to_owned(), name: name.to_owned() })
    }

    /// What the repository holds.
    pub fn kind(&self) -> RepositoryKind {
        self.kind
    }

    /// The user or organization that owns the repository.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The name without its owner.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder of the repository in the Hub's cache.
    pub(crate) fn cache_folder(&self) -> String {
        format!("{}--{}--{}", self.api_kind(), self.owner, self.name)
    }

    /// The path of the repository below `/api/`.
    pub(crate) fn api_path(&self) -> String {
        format!("{}/{}/{}", self.api_kind(), self.owner, self.name)
    }

    fn api_kind(&self) -> &'static str {
        match self.kind {
            RepositoryKind::Model => "models",
            RepositoryKind::Dataset => "datasets",
        }
    }
}

/// The path of the repository's page: `owner/name` or `datasets/owner/name`.
impl fmt::Display for Repository {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = match self.kind {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        };
        write!(formatter, "{prefix}{}/{}", self.owner, self.name)
    }
}

impl FromStr for Repository {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let (kind, id) = match text.strip_prefix("datasets/") {
            Some(id) if id.contains('/') => (RepositoryKind::Dataset, id),
            _ => (RepositoryKind::Model, text),
        };
        let Some((owner, name)) = id.split_once('/') else {
            return Err(ReferenceError::NoRepository { text: text.to_owned() });
        };
        Self::new(kind, owner, name)
    }
}

impl Reference {
    /// All files of a repository's main branch.
    pub fn new(repository: Repository) -> Self {
        Self { repository, revision: DEFAULT_REVISION.to_owned(), pattern: None }
    }

    /// The same files at this branch, tag or commit.
    ///
    /// # Errors
    /// If it is no name of a revision.
    pub fn at(mut self, revision: &str) -> Result<Self, ReferenceError> {
        if !is_revision(revision) {
            return Err(ReferenceError::BadRevision { revision: revision.to_owned() });
        }
        revision.clone_into(&mut self.revision);
        Ok(self)
    }

    /// Only the files that a path, folder or pattern selects.
    ///
    /// # Errors
    /// If it is empty, too long or leads outside the repository.
    pub fn only(mut self, pattern: &str) -> Result<Self, ReferenceError> {
        if !is_inside(pattern.trim_end_matches('/')) {
            return Err(ReferenceError::BadPattern { pattern: pattern.to_owned() });
        }
        self.pattern = Some(Pattern::new(pattern));
        Ok(self)
    }

    /// The repository.
    pub fn repository(&self) -> &Repository {
        &self.repository
    }

    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Whether it selects the file at a path: all, without a pattern.
    pub fn selects(&self) -> impl Fn(&str) -> bool + '_ {
        let pattern = self.pattern.as_ref().map(Pattern::selects);
        move |path| pattern.as_ref().is_none_or(|selects| selects(path))
    }

    /// The pattern that selects files; `None` selects all.
    pub fn pattern(&self) -> Option<&Pattern> {
        self.pattern.as_ref()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "hf:{}", self.repository)?;
        if self.revision != DEFAULT_REVISION {
            write!(formatter, "@{}", self.revision)?;
        }
        match &self.pattern {
            Some(pattern) => write!(formatter, ":{pattern}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let Some(rest) = text.strip_prefix("hf:") else {
            return Err(ReferenceError::NoPrefix { text: text.to_owned() });
        };
        let (head, pattern) = match rest.split_once(':') {
            Some((head, pattern)) => (head, Some(pattern)),
            None => (rest, None),
        };
        let (repository, revision) = match head.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (head, None),
        };
        let mut reference = Self::new(repository.parse()?);
        if let Some(revision) = revision {
            reference = reference.at(revision)?;
        }
        if let Some(pattern) = pattern {
            reference = reference.only(pattern)?;
        }
        Ok(reference)
    }
}

/// Whether the Hub allows the owner or name.
fn is_name(part: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| !b"-.".contains(byte));
    part.len() <= 96
        && part.bytes().all(allowed)
        && edge(part.as_bytes().first())
        && edge(part.as_bytes().last())
        && !part.contains("--")
        && !part.contains("..")
}

/// Whether git allows the name of the branch, tag or commit.
pub(crate) fn is_revision(revision: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !b"~^:?*[\\@".contains(&byte);
    revision.bytes().all(allowed) && !revision.starts_with('-') && is_inside(revision)
}

/// Whether the path stays inside the folder that it starts in.
pub(crate) fn is_inside(path: &str) -> bool {
    path.len() <= LONGEST_PART * 4
        && !path.chars().any(char::is_control)
        && path.split('/').all(|part| {
            !part.is_empty() && part != "." && part != ".." && part.len() <= LONGEST_PART
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        let error = text.parse::<Reference>().expect_err("refused").to_string();
        assert!(error.contains("hf:") && !error.contains('\n'), "{error}");
        error
    }

    #[test]
    fn references_parse_and_print() {
        for text in [
            "hf:owner/name",
            "hf:owner/name@v1.0",
            "hf:owner/name@refs/pr/1",
            "hf:owner/name:config.json",
            "hf:datasets/owner/name",
            "hf:datasets/owner/name@v1:data/*.parquet",
            "hf:datasets/owner/name:sub/a@b:c.txt",
        ] {
            let reference: Reference = text.parse().expect("a reference");
            assert_eq!(reference.to_string(), text);
        }
        let reference: Reference = "hf:datasets/a/b@v1:x/*".parse().expect("a reference");
        assert_eq!(reference.repository().kind(), RepositoryKind::Dataset);
        assert_eq!(reference.repository().owner(), "a");
        assert_eq!(reference.repository().name(), "b");
        assert_eq!(reference.revision(), "v1");
        assert!(reference.selects()("x/y"));
        let main: Reference = "hf:a/b@main".parse().expect("a reference");
        assert_eq!(main.to_string(), "hf:a/b");
    }

    proptest::proptest! {
        #[test]
        fn any_text_parses_to_itself_or_is_refused(text in "hf:(datasets/)?[a-c./@:*-]{0,20}|.{0,20}") {
            if let Ok(reference) = text.parse::<Reference>() {
                assert_eq!(reference.to_string().parse::<Reference>(), Ok(reference.clone()));
                assert!(!reference.repository().cache_folder().contains(['/', '\0']));
                assert!(is_inside(reference.revision()));
            }
        }
    }

    #[test]
    fn an_owner_may_be_called_datasets() {
        let reference: Reference = "hf:datasets/name".parse().expect("a reference");
        assert_eq!(reference.repository().kind(), RepositoryKind::Model);
    }

    #[test]
    fn other_texts_are_refused_with_an_example() {
        assert!(refusal("owner/name").contains("does not begin with `hf:`"));
        assert!(refusal("hf:name").contains("names no repository"));
        assert!(refusal("hf:").contains("names no repository"));
        for name in ["hf:/b", "hf:a/", "hf:a/b/c", "hf:../b", "hf:a/b--c", "hf:a/-b", "hf:a/b c"] {
            assert!(refusal(name).contains("is no owner or name"), "{name}");
        }
        for name in ["hf:a/b@", "hf:a/b@../x", "hf:a/b@/x", "hf:a/b@x y", "hf:a/b@-x"] {
            assert!(refusal(name).contains("is no branch, tag or commit"), "{name}");
        }
        for name in ["hf:a/b:", "hf:a/b:../x", "hf:a/b:/etc/passwd", "hf:a/b:x//y"] {
            assert!(refusal(name).contains("selects no files"), "{name}");
        }
    }
}
