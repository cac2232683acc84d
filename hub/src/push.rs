//! Pushes of a folder as one commit.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::client::{Hub, LONGEST_ANSWER, encoded};
use crate::error::HubError;
use crate::folder::{LocalFile, files_of};
use crate::http::{Method, Payload, Request};
use crate::lfs::LargeFile;
use crate::progress::Progress;
use crate::reference::{Repository, RepositoryKind, is_revision};
use crate::refusal::Subject;

/// Files of one request for upload modes.
const BATCH: usize = 256;

/// The longest file that is sent inside the commit.
const LONGEST_INLINE: u64 = 10 << 20;

/// The type of a commit's description.
const NDJSON: &str = "application/x-ndjson";

/// A folder to push.
#[derive(Debug, Clone, Copy)]
pub struct Push<'a> {
    /// The repository, which is made if it does not exist.
    pub repository: &'a Repository,
    /// The branch.
    pub revision: &'a str,
    /// The folder, whose files go to their paths in it.
    pub folder: &'a Path,
    /// Whether the repository is private if it is made.
    pub private: bool,
    /// The first line of the commit's message.
    pub message: &'a str,
}

/// What a push has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// The new commit.
    pub commit: String,
    /// The page of the commit.
    pub url: String,
    /// Number of files in the commit.
    pub files: usize,
    /// Bytes of large files that were sent; the Hub had the others.
    pub uploaded: u64,
}

/// How the Hub stores files.
#[derive(Deserialize)]
struct Modes {
    files: Vec<Mode>,
}

#[derive(Deserialize)]
struct Mode {
    path: String,
    #[serde(rename = "uploadMode")]
    mode: String,
    #[serde(default, rename = "shouldIgnore")]
    ignored: bool,
}

/// The answer to a commit.
#[derive(Deserialize)]
struct Committed {
    #[serde(rename = "commitOid")]
    oid: String,
    #[serde(rename = "commitUrl")]
    url: String,
}

/// Files by the way in which they are stored.
#[derive(Debug, Default)]
struct Sorted<'a> {
    inline: Vec<&'a LocalFile>,
    large: Vec<LargeFile<'a>>,
}

impl Hub {
    /// Uploads the files of a folder as one commit. Large files that the Hub has are not sent
    /// again, so a push that broke off continues with the file at which it did.
    ///
    /// # Errors
    /// If the Hub cannot be reached or refuses, or the folder cannot be read.
    pub fn push(
        &self,
        push: &Push<'_>,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Pushed, HubError> {
        self.online("a push")?;
        if self.config().token.is_none() {
            return Err(HubError::PushNeedsToken);
        }
        let Push { repository, revision, .. } = *push;
        if !is_revision(revision) {
            return Err(HubError::NoSuchRevision {
                repository: repository.to_string(),
                revision: revision.to_owned(),
                url: self.page(repository),
            });
        }
        let files = files_of(push.folder)?;
        self.ensure_repository(repository, push.private)?;
        let parent = self.resolve(repository, revision)?;
        let sorted = self.sort(push, &files)?;
        let uploaded = self.upload_large(repository, revision, &sorted.large, progress)?;
        let commit = self.commit(push, &parent, &sorted)?;
        for file in &sorted.inline {
            progress(Progress { file: &file.path, bytes: file.size, total: file.size });
        }
        let files = sorted.inline.len() + sorted.large.len();
        Ok(Pushed { commit: commit.oid, url: commit.url, files, uploaded })
    }

    /// Makes the repository if it does not exist.
    fn ensure_repository(&self, repository: &Repository, private: bool) -> Result<(), HubError> {
        let subject = Subject::Repository(repository);
        let url = format!("{}/api/{}", self.config().endpoint, repository.api_path());
        let request = Request::new(Method::Get, url, Payload::None);
        match self.http.call(&request, subject, LONGEST_ANSWER, &mut |_| {}) {
            Ok(_) => return Ok(()),
            Err(HubError::NoSuchRepository { .. }) => {}
            Err(error) => return Err(error),
        }
        let kind = match repository.kind() {
            RepositoryKind::Model => "model",
            RepositoryKind::Dataset => "dataset",
        };
        let body = json!({
            "type": kind,
            "name": repository.name(),
            "organization": repository.owner(),
            "private": private,
        });
        let url = format!("{}/api/repos/create", self.config().endpoint);
        match self.post_json::<Value>(&url, &body, subject) {
            Ok(_) => Ok(()),
            // Another process has made it meanwhile.
            Err(HubError::Refused { status: 409, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks the Hub how it stores each file.
    fn sort<'f>(&self, push: &Push<'_>, files: &'f [LocalFile]) -> Result<Sorted<'f>, HubError> {
        let url = self.api(push.repository, &format!("preupload/{}", encoded(push.revision)));
        let subject = Subject::Revision(push.repository, push.revision);
        let mut sorted = Sorted::default();
        for batch in files.chunks(BATCH) {
            let described = batch
                .iter()
                .map(|file| {
                    let sample = BASE64.encode(file.sample()?);
                    Ok(json!({ "path": file.path, "sample": sample, "size": file.size }))
                })
                .collect::<Result<Vec<Value>, HubError>>()?;
            let modes: Modes = self.post_json(&url, &json!({ "files": described }), subject)?;
            for file in batch {
                let mode = modes.files.iter().find(|mode| mode.path == file.path);
                let mode = mode.ok_or_else(|| HubError::malformed(&url, "it leaves out a file"))?;
                if mode.ignored {
                    continue;
                }
                // The storage refuses empty objects.
                let large = mode.mode == "lfs" || file.size > LONGEST_INLINE;
                if large && file.size > 0 {
                    sorted.large.push(LargeFile::new(file)?);
                } else {
                    sorted.inline.push(file);
                }
            }
        }
        Ok(sorted)
    }

    /// Makes the commit. Its description is a file, so that memory does not bound it.
    fn commit(
        &self,
        push: &Push<'_>,
        parent: &str,
        sorted: &Sorted<'_>,
    ) -> Result<Committed, HubError> {
        let written = NamedTempFile::new().map_err(HubError::io(&std::env::temp_dir()))?;
        let path = written.path();
        describe(written.as_file(), path, push.message, parent, sorted)?;
        let length = written.as_file().metadata().map_err(HubError::io(path))?.len();
        let url = self.api(push.repository, &format!("commit/{}", encoded(push.revision)));
        let payload = Payload::File { path, start: 0, length };
        let request = Request::new(Method::Post, url, payload).header("content-type", NDJSON);
        let subject = Subject::Revision(push.repository, push.revision);
        Ok(self.call(&request, subject, LONGEST_ANSWER)?.1)
    }
}

/// Writes the lines of a commit: its message, then its files.
fn describe(
    file: &File,
    path: &Path,
    message: &str,
    parent: &str,
    sorted: &Sorted<'_>,
) -> Result<(), HubError> {
    let mut writer = BufWriter::new(file);
    let mut line = |value: &Value| writeln!(writer, "{value}").map_err(HubError::io(path));
    line(&json!({
        "key": "header",
        "value": { "summary": message, "description": "", "parentCommit": parent },
    }))?;
    for file in &sorted.inline {
        let content = BASE64.encode(file.read()?);
        line(&json!({
            "key": "file",
            "value": { "content": content, "path": file.path, "encoding": "base64" },
        }))?;
    }
    for large in &sorted.large {
        line(&json!({
            "key": "lfsFile",
            "value": {
                "path": large.file.path, "algo": "sha256", "oid": large.oid,
                "size": large.file.size,
            },
        }))?;
    }
    writer.flush().map_err(HubError::io(path))
}
