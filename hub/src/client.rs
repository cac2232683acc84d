//! Revisions and lists of files.

use std::collections::BTreeSet;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::http::HeaderMap;

use crate::config::{HubConfig, PUBLIC_ENDPOINT};
use crate::digest::FileHash;
use crate::error::HubError;
use crate::http::{Http, Method, Payload, Request};
use crate::reference::{Repository, is_inside};
use crate::refusal::Subject;

/// The most files of a repository.
pub(crate) const MOST_FILES: usize = 100_000;

/// The longest answer with a list of files, in bytes.
const LONGEST_PAGE: u64 = 32 << 20;

/// The longest other answer, in bytes.
pub(crate) const LONGEST_ANSWER: u64 = 16 << 20;

/// The most pages of a list of files.
const MOST_PAGES: usize = 1000;

/// Characters that are encoded in one part of a path.
const PART: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Characters that are encoded in a path.
const PATH: &AsciiSet = &PART.remove(b'/');

/// A client of the Hub.
#[derive(Debug)]
pub struct Hub {
    pub(crate) http: Http,
}

/// A file of a repository at a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// The path in the repository.
    pub path: String,
    /// Length in bytes.
    pub size: u64,
    /// The hash: SHA-256 of a file in git LFS, else that of a git blob.
    pub hash: FileHash,
    /// The git blob, which for a file in git LFS is its pointer.
    pub(crate) blob_id: String,
    /// The name of the file in the Hub's chunked storage.
    pub(crate) xet_hash: Option<String>,
}

/// The answer to a request for a revision.
#[derive(Deserialize)]
struct Revision {
    sha: String,
}

/// An entry of a list of files.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    oid: String,
    #[serde(default)]
    lfs: Option<EntryLfs>,
    #[serde(default, rename = "xetHash")]
    xet_hash: Option<String>,
}

#[derive(Deserialize)]
struct EntryLfs {
    oid: String,
    size: u64,
}

impl Hub {
    /// A client with these settings.
    ///
    /// # Errors
    /// If the file of certificates is not usable.
    pub fn new(config: HubConfig) -> Result<Self, HubError> {
        Ok(Self { http: Http::new(config)? })
    }

    /// The settings.
    pub fn config(&self) -> &HubConfig {
        self.http.config()
    }

    /// The commit of a branch, tag or commit.
    ///
    /// # Errors
    /// If the Hub cannot be reached, refuses access, or has no such repository or revision.
    pub fn resolve(&self, repository: &Repository, revision: &str) -> Result<String, HubError> {
        self.online("a look-up of a revision")?;
        let url = self.api(repository, &format!("revision/{}", encoded(revision)));
        let subject = Subject::Revision(repository, revision);
        let (_, answer): (_, Revision) = self.get(url.clone(), subject, LONGEST_ANSWER)?;
        if !is_commit(&answer.sha) {
            return Err(HubError::malformed(&url, "it names no commit"));
        }
        Ok(answer.sha)
    }

    /// The files of a repository at a commit, in the order of their paths.
    ///
    /// # Errors
    /// If the Hub cannot be reached, refuses access, or has no such repository or commit, and if
    /// the list is malformed or too long.
    pub fn list(&self, repository: &Repository, commit: &str) -> Result<Vec<RemoteFile>, HubError> {
        self.online("a list of files")?;
        let subject = Subject::Revision(repository, commit);
        let first = self.api(repository, &format!("tree/{}?recursive=true", encoded(commit)));
        let mut next = Some(first);
        let mut files = Vec::new();
        let mut paths = BTreeSet::new();
        for _ in 0..MOST_PAGES {
            let Some(url) = next else {
                files.sort_by(|one: &RemoteFile, other| one.path.cmp(&other.path));
                return Ok(files);
            };
            let (headers, entries): (_, Vec<Entry>) =
                self.get(url.clone(), subject, LONGEST_PAGE)?;
            for entry in entries {
                if entry.kind != "file" {
                    continue;
                }
                let path = entry.path.clone();
                let file = entry.into_file().ok_or_else(|| {
                    HubError::malformed(&url, format!("its entry {path:?} is no file"))
                })?;
                if !paths.insert(path) {
                    return Err(HubError::malformed(&url, "it lists a file twice"));
                }
                files.push(file);
            }
            if files.len() > MOST_FILES {
                break;
            }
            next = self.next_page(&url, &headers)?;
        }
        Err(HubError::TooManyFiles { place: repository.to_string(), cap: MOST_FILES })
    }

    /// The address of a repository's interface.
    pub(crate) fn api(&self, repository: &Repository, rest: &str) -> String {
        format!("{}/api/{}/{rest}", self.config().endpoint, repository.api_path())
    }

    /// The page of a repository.
    pub(crate) fn page(&self, repository: &Repository) -> String {
        format!("{}/{repository}", self.config().endpoint)
    }

    /// The address of a file at a commit.
    pub(crate) fn file_url(&self, repository: &Repository, commit: &str, path: &str) -> String {
        let path = utf8_percent_encode(path, PATH);
        format!("{}/resolve/{commit}/{path}", self.page(repository))
    }

    /// # Errors
    /// In offline mode.
    pub(crate) fn online(&self, action: &'static str) -> Result<(), HubError> {
        if self.config().offline { Err(HubError::Offline { action }) } else { Ok(()) }
    }

    /// The URL at the endpoint, if it is one of the public Hub that this endpoint mirrors.
    pub(crate) fn at_endpoint(&self, url: &str) -> String {
        match url.strip_prefix(PUBLIC_ENDPOINT) {
            Some(rest) if rest.starts_with('/') => format!("{}{rest}", self.config().endpoint),
            _ => url.to_owned(),
        }
    }

    fn next_page(&self, url: &str, headers: &HeaderMap) -> Result<Option<String>, HubError> {
        let Some(link) = headers.get("link").and_then(|value| value.to_str().ok()) else {
            return Ok(None);
        };
        let Some(next) = next_link(link) else { return Ok(None) };
        let next = self.at_endpoint(next);
        if !self.http.is_home(&next) {
            return Err(HubError::malformed(url, "its next page is at another host"));
        }
        Ok(Some(next))
    }

    fn get<T: DeserializeOwned>(
        &self,
        url: String,
        subject: Subject<'_>,
        cap: u64,
    ) -> Result<(HeaderMap, T), HubError> {
        let request = Request::new(Method::Get, url, Payload::None);
        self.call(&request, subject, cap)
    }

    /// Sends a value and parses the answer.
    pub(crate) fn post_json<T: DeserializeOwned>(
        &self,
        url: &str,
        body: &Value,
        subject: Subject<'_>,
    ) -> Result<T, HubError> {
        let body = body.to_string();
        let payload = Payload::Bytes(body.as_bytes());
        let request = Request::new(Method::Post, url.to_owned(), payload)
            .header("content-type", "application/json");
        Ok(self.call(&request, subject, LONGEST_ANSWER)?.1)
    }

    /// Sends a request and parses its answer.
    pub(crate) fn call<T: DeserializeOwned>(
        &self,
        request: &Request<'_>,
        subject: Subject<'_>,
        cap: u64,
    ) -> Result<(HeaderMap, T), HubError> {
        let (headers, body) = self.http.call(request, subject, cap, &mut |_| {})?;
        let parsed = serde_json::from_slice(&body)
            .map_err(|error| HubError::malformed(&request.url, error))?;
        Ok((headers, parsed))
    }
}

impl Entry {
    fn into_file(self) -> Option<RemoteFile> {
        let (size, hash) = match &self.lfs {
            Some(lfs) => (lfs.size, FileHash::sha256(&lfs.oid)?),
            None => (self.size, FileHash::git_blob(&self.oid)?),
        };
        is_inside(&self.path).then_some(RemoteFile {
            path: self.path,
            size,
            hash,
            blob_id: self.oid,
            xet_hash: self.xet_hash,
        })
    }
}

/// The target of a `Link` header with the relation `next`.
fn next_link(header: &str) -> Option<&str> {
    header.split('<').find_map(|link| {
        let (target, parameters) = link.split_once('>')?;
        let next = parameters.contains("rel=\"next\"") || parameters.contains("rel=next");
        next.then_some(target)
    })
}

/// One part of a path, with `/` encoded too.
pub(crate) fn encoded(part: &str) -> String {
    utf8_percent_encode(part, PART).to_string()
}

/// Whether the text is a commit: 40 lower-case hexadecimal digits.
pub(crate) fn is_commit(text: &str) -> bool {
    FileHash::git_blob(text).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_found_among_links() {
        for (header, next) in [
            ("<https://hub/x?cursor=1>; rel=\"next\"", Some("https://hub/x?cursor=1")),
            ("<https://hub/a>; rel=\"prev\", <https://hub/b>; rel=\"next\"", Some("https://hub/b")),
            ("<https://hub/a>; rel=\"prev\"", None),
            ("<https://hub/a", None),
            ("", None),
            ("<><><", None),
        ] {
            assert_eq!(next_link(header), next, "{header}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_header_and_entry_is_read_without_a_panic(
            header in "[<>;,=\"a-z/:éx ]{0,40}",
            path in "[a./\\\\é\\x00 ]{0,20}",
            oid in "[0-9a-f]{40}|[ -~é]{0,44}",
            size: u64,
        ) {
            next_link(&header);
            let lfs = Some(EntryLfs { oid: oid.clone(), size });
            let entry = Entry { kind: "file".into(), path, size, oid, lfs, xet_hash: None };
            if let Some(file) = entry.into_file() {
                assert!(is_inside(&file.path));
            }
        }
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encoded("refs/pr/1"), "refs%2Fpr%2F1");
        assert_eq!(utf8_percent_encode("a b/c#?.txt", PATH).to_string(), "a%20b/c%23%3F.txt");
    }
}
