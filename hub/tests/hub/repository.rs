//! A repository that the scripted server has, and a client for it.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use shoal_hub::{Hub, HubConfig, HubError, Progress, Reference, RetryPolicy, Snapshot, Token};

use crate::server::{Answer, Asked};

/// The commit of the repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The token of the client.
pub(crate) const TOKEN: &str = "hf_test_token";

/// A file: its path, its bytes, and whether it is in git LFS.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) path: &'static str,
    pub(crate) bytes: Vec<u8>,
    pub(crate) lfs: bool,
}

pub(crate) fn stored(path: &'static str, bytes: impl Into<Vec<u8>>, lfs: bool) -> Stored {
    Stored { path, bytes: bytes.into(), lfs }
}

/// Bytes that differ at every position near another.
pub(crate) fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(2_654_435_761) >> 16) as u8).collect()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Stored {
    /// The name of the blob in the cache.
    pub(crate) fn hash(&self) -> String {
        if self.lfs { hex(&Sha256::digest(&self.bytes)) } else { self.blob_id() }
    }

    fn blob_id(&self) -> String {
        let mut hasher = Sha1::new();
        hasher.update(format!("blob {}\0", self.bytes.len()));
        hasher.update(&self.bytes);
        hex(&hasher.finalize())
    }

    fn entry(&self) -> Value {
        let mut entry = json!({
            "type": "file", "path": self.path, "size": self.bytes.len(), "oid": self.blob_id(),
        });
        if self.lfs {
            let size = self.bytes.len();
            entry["lfs"] = json!({ "oid": self.hash(), "size": size, "pointerSize": 134 });
        }
        entry
    }

    /// The file, from where the request asks for it.
    pub(crate) fn answer(&self, asked: &Asked) -> Answer {
        let length = self.bytes.len();
        match asked.range_start() {
            Some(start) if start < length => Answer::new(206, &self.bytes[start..])
                .header("content-range", format!("bytes {start}-{}/{length}", length - 1)),
            Some(_) => Answer::new(416, ""),
            None => Answer::new(200, self.bytes.clone()),
        }
    }
}

/// The answers of a Hub that has this model and dataset at `owner/name`.
pub(crate) fn answer(files: &[Stored], asked: &Asked) -> Answer {
    let path = asked.path.replace("/api/datasets/", "/api/models/");
    let path = path.strip_prefix("/datasets").unwrap_or(&path);
    if path == "/api/models/owner/name/revision/main" {
        return Answer::json(&json!({ "sha": COMMIT, "id": "owner/name" }));
    }
    if path == format!("/api/models/owner/name/tree/{COMMIT}?recursive=true") {
        let mut entries = vec![json!({ "type": "directory", "path": "sub", "oid": COMMIT })];
        entries.extend(files.iter().map(Stored::entry));
        return Answer::json(&Value::Array(entries));
    }
    let file = path.strip_prefix(&format!("/owner/name/resolve/{COMMIT}/"));
    match file.and_then(|path| files.iter().find(|file| file.path == path)) {
        Some(file) => file.answer(asked),
        None => Answer::new(404, "").header("x-error-code", "EntryNotFound"),
    }
}

/// Whether the request is the first for which this is called.
pub(crate) fn first(count: &AtomicUsize) -> bool {
    count.fetch_add(1, Ordering::SeqCst) == 0
}

/// Settings with short waits.
pub(crate) fn config(endpoint: &str, cache: &Path) -> HubConfig {
    let mut config = HubConfig::new(endpoint, cache).expect("an endpoint");
    config.token = Some(Token::new(TOKEN).expect("a token"));
    config.timeouts.connect = Duration::from_secs(5);
    config.timeouts.response = Duration::from_secs(5);
    config.timeouts.stall = Duration::from_secs(5);
    config.timeouts.lock = Duration::from_secs(5);
    config.retry = RetryPolicy {
        attempts: 3,
        first_pause: Duration::from_millis(5),
        longest_pause: Duration::from_millis(20),
        longest_retry_after: Duration::from_millis(40),
    };
    config
}

pub(crate) fn hub(endpoint: &str, cache: &Path) -> Hub {
    Hub::new(config(endpoint, cache)).expect("a client")
}

pub(crate) fn reference(text: &str) -> Reference {
    text.parse().expect("a reference")
}

pub(crate) fn ignore(_: Progress<'_>) {}

/// Downloads `hf:owner/name`.
pub(crate) fn download(hub: &Hub) -> Result<Snapshot, HubError> {
    hub.download(&reference("hf:owner/name"), &mut ignore)
}

/// The message of a failed download, which is one line.
pub(crate) fn refusal(hub: &Hub) -> String {
    let error = download(hub).expect_err("refused").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}
