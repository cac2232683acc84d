//! Pushes of folders.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicUsize;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use shoal_hub::{Hub, HubError, Push, Pushed, Repository};

use crate::repository::{COMMIT, TOKEN, bytes, config, first, hex, hub, ignore};
use crate::server::{Answer, Asked, Server};

/// The commit that a push makes.
const PUSHED: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// Length of the parts of a large file.
const PART: usize = 4000;

/// A folder with a small file, an empty one and two large ones.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    fs::create_dir_all(root.join("sub")).expect("a folder");
    fs::write(root.join("config.json"), "{\"a\": 1}").expect("written");
    fs::write(root.join("empty.bin"), "").expect("written");
    fs::write(root.join("sub/model.bin"), bytes(9000)).expect("written");
    fs::write(root.join("small.bin"), bytes(300)).expect("written");
    folder
}

fn push(hub: &Hub, folder: &Path) -> Result<Pushed, HubError> {
    let repository: Repository = "owner/name".parse().expect("a repository");
    let push = Push {
        repository: &repository,
        revision: "main",
        folder,
        private: true,
        message: "Add \"weights\"",
    };
    hub.push(&push, &mut ignore)
}

/// The answers of a Hub without the repository; `object` is what it wants of a large file.
fn answer(asked: &Asked, object: impl Fn(&Value, &str) -> Value) -> Answer {
    let here = format!("http://{}", asked.header("host").expect("a host"));
    match (asked.method.as_str(), asked.path.as_str()) {
        ("GET", "/api/models/owner/name") => {
            Answer::new(404, "").header("x-error-code", "RepoNotFound")
        }
        ("GET", "/api/models/owner/name/revision/main") => Answer::json(&json!({ "sha": COMMIT })),
        ("POST", "/api/repos/create") => Answer::json(&json!({ "url": "x" })),
        ("POST", "/api/models/owner/name/preupload/main") => {
            let listed = asked.json();
            let modes = listed["files"].as_array().expect("files").iter().map(|file| {
                let path = file["path"].as_str().expect("a path").to_owned();
                let mode = if path.ends_with(".bin") { "lfs" } else { "regular" };
                json!({ "path": path, "uploadMode": mode, "shouldIgnore": false })
            });
            Answer::json(&json!({ "files": modes.collect::<Vec<_>>() }))
        }
        ("POST", "/owner/name.git/info/lfs/objects/batch") => {
            let asked = asked.json();
            let objects = asked["objects"].as_array().expect("objects").iter();
            let objects: Vec<Value> = objects.map(|wanted| object(wanted, &here)).collect();
            Answer::json(&json!({ "transfer": "basic", "objects": objects }))
        }
        ("POST", "/api/models/owner/name/commit/main") => {
            let url = format!("{here}/owner/name/commit/{PUSHED}");
            Answer::json(&json!({ "success": true, "commitOid": PUSHED, "commitUrl": url }))
        }
        ("POST", "/verify" | "/complete") => Answer::json(&json!({})),
        ("PUT", part) => Answer::new(200, "").header("etag", format!("\"{part}\"")),
        _ => Answer::new(404, ""),
    }
}

/// The upload of an object: in one part if it is small, else in parts of `PART` bytes.
fn upload(wanted: &Value, storage: &str, endpoint: &str) -> Value {
    let (oid, size) = (wanted["oid"].clone(), wanted["size"].as_u64().expect("a size"));
    if size < PART as u64 {
        let upload = json!({ "href": format!("{storage}/small"), "header": { "x-kind": "small" } });
        let verify = json!({ "href": format!("{endpoint}/verify") });
        let actions = json!({ "upload": upload, "verify": verify });
        return json!({ "oid": oid, "size": size, "actions": actions });
    }
    let mut header = json!({ "chunk_size": PART.to_string() });
    for part in 1..=size.div_ceil(PART as u64) {
        header[format!("{part:05}")] = json!(format!("{storage}/part/{part}"));
    }
    let upload = json!({ "href": format!("{endpoint}/complete"), "header": header });
    json!({ "oid": oid, "size": size, "actions": { "upload": upload } })
}

#[test]
fn a_folder_becomes_one_commit() {
    let folder = folder();
    let count = AtomicUsize::new(0);
    let storage = Server::start(move |asked| {
        if asked.path == "/part/2" && first(&count) {
            return Answer::new(500, "");
        }
        answer(asked, |_, _| Value::Null)
    });
    let server = {
        let storage = storage.url();
        Server::start(move |asked| answer(asked, |wanted, here| upload(wanted, &storage, here)))
    };
    let cache = tempfile::tempdir().expect("a folder");
    let pushed = push(&hub(&server.url(), cache.path()), folder.path()).expect("pushed");
    assert_eq!(pushed.commit, PUSHED);
    assert_eq!(pushed.url, format!("{}/owner/name/commit/{PUSHED}", server.url()));
    assert_eq!((pushed.files, pushed.uploaded), (4, 9300));

    let created = &server.asked_for("/api/repos/create")[0];
    let expected =
        json!({ "type": "model", "name": "name", "organization": "owner", "private": true });
    assert_eq!(created.json(), expected);
    for asked in server.asked() {
        let token = asked.header("authorization").is_some();
        assert_eq!(token, asked.path != "/complete", "{}", asked.path);
    }
    assert_stored(&storage, &server);
    assert_commit(&server);
}

/// The storage has the bytes of both large files, and never the token.
fn assert_stored(storage: &Server, server: &Server) {
    for asked in storage.asked() {
        assert_eq!(asked.header("authorization"), None);
        assert_eq!(asked.header("transfer-encoding"), None);
        assert_eq!(asked.header("content-length"), Some(asked.body.len().to_string().as_str()));
    }
    let small = &storage.asked_for("/small")[0];
    assert_eq!(small.body, bytes(300));
    assert_eq!(small.header("x-kind"), Some("small"));
    let whole: Vec<u8> = (1..=3)
        .flat_map(|part| {
            storage.asked_for(&format!("/part/{part}")).last().expect("a part").body.clone()
        })
        .collect();
    assert_eq!(whole, bytes(9000));
    assert_eq!(storage.asked_for("/part/2").len(), 2, "a failed part is sent again");
    let completed = server.asked_for("/complete")[0].json();
    let parts = json!([
        { "partNumber": 1, "etag": "\"/part/1\"" },
        { "partNumber": 2, "etag": "\"/part/2\"" },
        { "partNumber": 3, "etag": "\"/part/3\"" },
    ]);
    assert_eq!(completed, json!({ "oid": hex(&Sha256::digest(bytes(9000))), "parts": parts }));
    let verified = server.asked_for("/verify")[0].json();
    assert_eq!(verified, json!({ "oid": hex(&Sha256::digest(bytes(300))), "size": 300 }));
}

fn assert_commit(server: &Server) {
    let commit = &server.asked_for("/commit/main")[0];
    assert_eq!(commit.header("content-type"), Some("application/x-ndjson"));
    assert_eq!(commit.header("authorization"), Some(format!("Bearer {TOKEN}").as_str()));
    let text = String::from_utf8(commit.body.clone()).expect("a text");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let file = |path: &str, content: &str| {
        let content = BASE64.encode(content);
        json!({ "key": "file",
                "value": { "path": path, "content": content, "encoding": "base64" } })
    };
    let large = |path: &str, size: usize| {
        let oid = hex(&Sha256::digest(bytes(size)));
        json!({ "key": "lfsFile",
                "value": { "path": path, "algo": "sha256", "oid": oid, "size": size } })
    };
    let header = json!({ "summary": "Add \"weights\"", "description": "", "parentCommit": COMMIT });
    assert_eq!(
        lines,
        [
            json!({ "key": "header", "value": header }),
            file("config.json", "{\"a\": 1}"),
            file("empty.bin", ""),
            large("small.bin", 300),
            large("sub/model.bin", 9000),
        ]
    );
}

#[test]
fn files_that_the_hub_has_are_not_sent() {
    let folder = folder();
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|asked| answer(asked, |wanted, _| wanted.clone()));
    let pushed = push(&hub(&server.url(), cache.path()), folder.path()).expect("pushed");
    assert_eq!((pushed.files, pushed.uploaded), (4, 0));
    assert!(server.asked().iter().all(|asked| asked.method != "PUT"));
}

/// The message of a push to a Hub that answers this to a path.
fn refusal(path: &'static str, status: u16, body: &'static str) -> String {
    let folder = folder();
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(move |asked| {
        if asked.path.contains(path) {
            return Answer::new(status, body);
        }
        answer(asked, |wanted, here| upload(wanted, here, here))
    });
    let error = push(&hub(&server.url(), cache.path()), folder.path()).expect_err("refused");
    let error = error.to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn refused_pushes_say_what_to_do() {
    let error = refusal("/api/repos/create", 403, "{\"error\": \"read-only token\"}");
    assert!(error.contains("refuses access to owner/name: read-only token"), "{error}");
    let error = refusal("/revision/main", 404, "");
    assert!(error.contains("no branch, tag or commit main"), "{error}");
    let error = refusal("/small", 403, "expired");
    assert!(error.contains("/small refuses the request with status 403: expired"), "{error}");
    let error = refusal("/commit/main", 412, "");
    assert!(error.contains("has changed during the push"), "{error}");
    let error = refusal("/part/2", 500, "");
    assert!(error.contains("/part/2 fails with status 500"), "{error}");
    let error = refusal("/preupload/", 200, "{\"files\": []}");
    assert!(error.contains("it leaves out a file"), "{error}");
    let error = refusal("/objects/batch", 200, "{\"objects\": []}");
    assert!(error.contains("it leaves out a file"), "{error}");
}

#[test]
fn a_file_that_is_not_stored_is_named() {
    let folder = folder();
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|asked| {
        answer(
            asked,
            |wanted, _| json!({ "oid": wanted["oid"], "error": { "code": 413, "message": "quota\nexceeded" } }),
        )
    });
    let error = push(&hub(&server.url(), cache.path()), folder.path()).expect_err("refused");
    assert_eq!(error.to_string(), "the Hub does not store small.bin: quota exceeded");
}

#[test]
fn parts_that_do_not_make_up_the_file_are_refused() {
    for header in [
        json!({ "chunk_size": "0", "1": "http://x/1" }),
        json!({ "chunk_size": 100, "1": "http://x/1" }),
        json!({ "chunk_size": "many" }),
        json!({ "chunk_size": u64::MAX }),
    ] {
        let folder = folder();
        let cache = tempfile::tempdir().expect("a folder");
        let server = Server::start(move |asked| {
            answer(asked, |wanted, here| {
                let upload = json!({ "href": format!("{here}/complete"), "header": header });
                json!({ "oid": wanted["oid"], "actions": { "upload": upload } })
            })
        });
        let error = push(&hub(&server.url(), cache.path()), folder.path()).expect_err("refused");
        assert!(error.to_string().contains("do not make up the file"), "{error}");
    }
}

#[test]
fn a_push_needs_a_token_and_the_network() {
    let folder = folder();
    let mut settings = config("http://127.0.0.1:1", folder.path());
    settings.token = None;
    let refused = push(&Hub::new(settings.clone()).expect("a client"), folder.path());
    assert!(matches!(refused, Err(HubError::PushNeedsToken)), "{refused:?}");
    settings.offline = true;
    let refused = push(&Hub::new(settings).expect("a client"), folder.path());
    assert!(matches!(refused, Err(HubError::Offline { .. })), "{refused:?}");
}
