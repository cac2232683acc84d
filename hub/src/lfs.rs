//! Uploads of large files by the protocol of git LFS.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Value, json};
use ureq::http::HeaderMap;

use crate::client::{Hub, LONGEST_ANSWER};
use crate::digest::hex;
use crate::error::{HubError, printable};
use crate::folder::LocalFile;
use crate::http::{Method, Payload, Request};
use crate::progress::Progress;
use crate::reference::Repository;
use crate::refusal::Subject;

/// The type of the messages of git LFS.
const LFS_JSON: &str = "application/vnd.git-lfs+json";

/// Files of one request for upload addresses.
const BATCH: usize = 100;

/// The most parts of one file.
const MOST_PARTS: u64 = 10_000;

/// The most headers that the server can ask for.
const MOST_HEADERS: usize = 32;

/// A large file, with its hash.
#[derive(Debug)]
pub(crate) struct LargeFile<'a> {
    /// The file.
    pub(crate) file: &'a LocalFile,
    /// The SHA-256 in hexadecimal digits.
    pub(crate) oid: String,
}

#[derive(Deserialize)]
struct BatchAnswer {
    objects: Vec<Object>,
}

/// What to do with one file.
#[derive(Deserialize)]
struct Object {
    oid: String,
    #[serde(default)]
    actions: Option<Actions>,
    #[serde(default)]
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    #[serde(default)]
    upload: Option<Action>,
    #[serde(default)]
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: Option<BTreeMap<String, Value>>,
}

impl<'a> LargeFile<'a> {
    /// Reads the file for its hash.
    pub(crate) fn new(file: &'a LocalFile) -> Result<Self, HubError> {
        Ok(Self { file, oid: hex(&file.sha256()?) })
    }
}

impl Hub {
    /// Uploads files that the Hub does not have yet, and returns the bytes that were sent.
    pub(crate) fn upload_large(
        &self,
        repository: &Repository,
        revision: &str,
        files: &[LargeFile<'_>],
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<u64, HubError> {
        let url = format!("{}.git/info/lfs/objects/batch", self.page(repository));
        let mut sent = 0;
        let mut seen = BTreeSet::new();
        for batch in files.chunks(BATCH) {
            let objects: Vec<Value> = batch
                .iter()
                .map(|large| json!({ "oid": large.oid, "size": large.file.size }))
                .collect();
            let body = json!({
                "operation": "upload",
                "transfers": ["basic", "multipart"],
                "objects": objects,
                "hash_algo": "sha256",
                "ref": { "name": revision },
            });
            let subject = Subject::Repository(repository);
            let body = self.post_lfs(&url, true, &body, subject)?;
            let answer: BatchAnswer =
                serde_json::from_slice(&body).map_err(|error| HubError::malformed(&url, error))?;
            let mut objects: BTreeMap<String, Object> = BTreeMap::new();
            for object in answer.objects {
                objects.insert(object.oid.clone(), object);
            }
            for large in batch {
                // Files with the same bytes share one object.
                if !seen.insert(&large.oid) {
                    continue;
                }
                let object = objects
                    .get(&large.oid)
                    .ok_or_else(|| HubError::malformed(&url, "it leaves out a file"))?;
                sent += self.upload_object(repository, large, object, progress)?;
            }
        }
        Ok(sent)
    }

    fn upload_object(
        &self,
        repository: &Repository,
        large: &LargeFile<'_>,
        object: &Object,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<u64, HubError> {
        let file = large.file;
        if let Some(error) = &object.error {
            let reason = printable(&error.message);
            return Err(HubError::NotStored { file: file.path.clone(), reason });
        }
        let actions = object.actions.as_ref();
        let Some(upload) = actions.and_then(|actions| actions.upload.as_ref()) else {
            progress(Progress { file: &file.path, bytes: file.size, total: file.size });
            return Ok(0);
        };
        match upload.chunk_size() {
            Some(chunk) => self.upload_parts(large, upload, chunk, progress)?,
            None => {
                let payload = Payload::File { path: &file.local, start: 0, length: file.size };
                self.put(&upload.href, upload.headers(), file, payload, &mut |bytes| {
                    progress(Progress { file: &file.path, bytes, total: file.size });
                })?;
            }
        }
        if let Some(verify) = actions.and_then(|actions| actions.verify.as_ref()) {
            let body = json!({ "oid": large.oid, "size": file.size });
            let url = self.at_endpoint(&verify.href);
            self.post_lfs(&url, true, &body, Subject::Repository(repository))?;
        }
        Ok(file.size)
    }

    /// Uploads a file in parts, and completes it.
    fn upload_parts(
        &self,
        large: &LargeFile<'_>,
        upload: &Action,
        chunk: u64,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<(), HubError> {
        let file = large.file;
        let urls = upload.part_urls();
        let count = file.size.checked_div(chunk).map_or(0, |_| file.size.div_ceil(chunk));
        if count == 0 || count > MOST_PARTS || urls.len() as u64 != count {
            return Err(HubError::malformed(&upload.href, "its parts do not make up the file"));
        }
        let mut parts = Vec::with_capacity(urls.len());
        for (index, url) in (0..).zip(urls) {
            let start = index * chunk;
            let length = chunk.min(file.size - start);
            let payload = Payload::File { path: &file.local, start, length };
            let headers = self.put(url, Vec::new(), file, payload, &mut |bytes| {
                let bytes = start + bytes;
                progress(Progress { file: &file.path, bytes, total: file.size });
            })?;
            let etag = headers.get("etag").and_then(|etag| etag.to_str().ok());
            let etag =
                etag.ok_or_else(|| HubError::malformed(url, "it confirms no part of the file"))?;
            parts.push(json!({ "partNumber": index + 1, "etag": etag }));
        }
        let url = self.at_endpoint(&upload.href);
        let body = json!({ "oid": large.oid, "parts": parts });
        self.post_lfs(&url, false, &body, Subject::Plain(&file.path))?;
        Ok(())
    }

    /// Sends a part of a file to the storage, which never receives the token.
    fn put(
        &self,
        href: &str,
        headers: Vec<(String, String)>,
        file: &LocalFile,
        payload: Payload<'_>,
        report: &mut dyn FnMut(u64),
    ) -> Result<HeaderMap, HubError> {
        let url = self.at_endpoint(href);
        let request = Request { method: Method::Put, url, headers, payload, with_token: false };
        let subject = Subject::Plain(&file.path);
        Ok(self.http.call(&request, subject, LONGEST_ANSWER, report)?.0)
    }

    fn post_lfs(
        &self,
        url: &str,
        with_token: bool,
        body: &Value,
        subject: Subject<'_>,
    ) -> Result<Vec<u8>, HubError> {
        let body = body.to_string();
        let payload = Payload::Bytes(body.as_bytes());
        let mut request = Request::new(Method::Post, url.to_owned(), payload)
            .header("accept", LFS_JSON)
            .header("content-type", LFS_JSON);
        request.with_token = with_token;
        Ok(self.http.call(&request, subject, LONGEST_ANSWER, &mut |_| {})?.1)
    }
}

impl Action {
    /// The length of a part, if the file is sent in parts.
    fn chunk_size(&self) -> Option<u64> {
        match self.header.as_ref()?.get("chunk_size")? {
            Value::String(text) => Some(text.parse().unwrap_or(0)),
            number => Some(number.as_u64().unwrap_or(0)),
        }
    }

    /// The addresses of the parts, in their order.
    fn part_urls(&self) -> Vec<&str> {
        let mut urls: Vec<(u64, &str)> = self
            .header
            .iter()
            .flatten()
            .filter_map(|(name, url)| Some((name.parse().ok()?, url.as_str()?)))
            .collect();
        urls.sort_unstable();
        urls.into_iter().map(|(_, url)| url).collect()
    }

    /// The headers that the storage asks for, without those that the connection sets.
    fn headers(&self) -> Vec<(String, String)> {
        let own = ["content-length", "transfer-encoding", "host", "connection"];
        self.header
            .iter()
            .flatten()
            .filter(|(name, _)| !own.contains(&name.to_ascii_lowercase().as_str()))
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
            .take(MOST_HEADERS)
            .collect()
    }
}
