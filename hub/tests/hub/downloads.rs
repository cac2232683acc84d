//! Downloads into the cache.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;
use shoal_hub::HubError;

use crate::repository::{
    COMMIT, TOKEN, answer, bytes, config, download, hub, ignore, reference, refusal, stored,
};
use crate::server::{Answer, Server};

#[test]
fn a_snapshot_has_the_layout_of_the_hubs_cache() {
    let files = vec![
        stored("config.json", "{}", false),
        stored("sub/folder/model.bin", bytes(700_000), true),
        stored("empty", "", false),
    ];
    let cache = tempfile::tempdir().expect("a folder");
    let server = {
        let files = files.clone();
        Server::start(move |asked| answer(&files, asked))
    };
    let hub = hub(&server.url(), cache.path());
    let mut seen = Vec::new();
    let snapshot = hub
        .download(&reference("hf:owner/name"), &mut |progress| {
            seen.push((progress.file.to_owned(), progress.bytes, progress.total));
        })
        .expect("downloaded");
    let folder = cache.path().join("models--owner--name");
    assert_eq!(snapshot.commit, COMMIT);
    assert_eq!(snapshot.folder, folder.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(folder.join("refs/main")).expect("a ref"), COMMIT);
    for file in &files {
        let link = snapshot.folder.join(file.path);
        assert_eq!(fs::read(&link).expect("a file"), file.bytes);
        let blob = folder.join("blobs").join(file.hash()).canonicalize().expect("a blob");
        assert_eq!(link.canonicalize().expect("a target"), blob);
        let length = file.bytes.len() as u64;
        assert!(seen.contains(&(file.path.to_owned(), length, length)), "{seen:?}");
    }
    let target = fs::read_link(snapshot.folder.join("sub/folder/model.bin")).expect("a link");
    assert!(target.starts_with("../../../../blobs"), "{target:?}");
    for asked in server.asked() {
        assert_eq!(asked.header("authorization"), Some(format!("Bearer {TOKEN}").as_str()));
    }

    let before = server.asked().len();
    assert_eq!(download(&hub).expect("cached"), snapshot);
    assert_eq!(server.asked().len(), before + 1, "only the revision is asked for");
    let commit = reference(&format!("hf:owner/name@{COMMIT}"));
    assert_eq!(hub.download(&commit, &mut ignore).expect("cached"), snapshot);
    assert_eq!(server.asked().len(), before + 1, "nothing is asked for");
}

#[test]
fn a_pattern_selects_files() {
    let files = vec![
        stored("config.json", "{}", false),
        stored("data/a.parquet", "aa", false),
        stored("data/b.parquet", "bb", false),
    ];
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(move |asked| answer(&files, asked));
    let hub = hub(&server.url(), cache.path());
    let wanted = reference("hf:datasets/owner/name:data/*.parquet");
    let snapshot = hub.download(&wanted, &mut ignore).expect("downloaded");
    let paths: Vec<_> = snapshot.files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["data/a.parquet", "data/b.parquet"]);
    assert!(cache.path().join("datasets--owner--name/refs/main").exists());
    assert_eq!(server.asked_for("/datasets/owner/name/resolve/").len(), 2);
    let nothing = hub.download(&reference("hf:datasets/owner/name:*.txt"), &mut ignore);
    assert!(matches!(nothing, Err(HubError::NothingSelected { .. })), "{nothing:?}");
}

#[test]
fn pages_of_a_list_are_followed_at_the_endpoint_only() {
    let cache = tempfile::tempdir().expect("a folder");
    let entry = |name: &str| {
        json!([{ "type": "file", "path": name, "size": 0,
                 "oid": "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391" }])
    };
    let server = Server::start(move |asked| {
        let here = format!("http://{}", asked.header("host").expect("a host"));
        let tree = format!("/api/models/owner/name/tree/{COMMIT}");
        match asked.path.strip_prefix(&tree) {
            Some("?recursive=true") => Answer::json(&entry("a"))
                .header("link", format!("<{here}{tree}?recursive=true&cursor=b>; rel=\"next\"")),
            // The address of the public Hub stands for the endpoint.
            Some("?recursive=true&cursor=b") => Answer::json(&entry("b"))
                .header("link", format!("<https://huggingface.co{tree}?cursor=c>; rel=\"next\"")),
            Some("?cursor=c") => Answer::json(&entry("c")),
            _ => Answer::json(&entry("evil"))
                .header("link", "<http://127.0.0.2:1/next>; rel=\"next\""),
        }
    });
    let hub = hub(&server.url(), cache.path());
    let repository = reference("hf:owner/name").repository().clone();
    let files = hub.list(&repository, COMMIT).expect("listed");
    let paths: Vec<_> = files.iter().map(|file| file.path.as_str()).collect();
    assert_eq!(paths, ["a", "b", "c"]);
    let elsewhere = hub.list(&repository, &COMMIT.replace('0', "f"));
    let error = elsewhere.expect_err("another host").to_string();
    assert!(error.contains("next page is at another host"), "{error}");
}

#[test]
fn paths_that_lead_outside_the_snapshot_are_refused() {
    for path in ["../x", "/etc/passwd", "a/../../x", "", "a//b", "a\u{0}b"] {
        let cache = tempfile::tempdir().expect("a folder");
        let server = Server::start(move |asked| {
            if asked.path.contains("/tree/") {
                return Answer::json(&json!([{ "type": "file", "path": path, "size": 0,
                    "oid": "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391" }]));
            }
            answer(&[], asked)
        });
        let error = refusal(&hub(&server.url(), cache.path()));
        assert!(error.contains("is no file"), "{error}");
    }
}

#[test]
fn the_token_stays_at_the_endpoint() {
    let file = stored("model.bin", bytes(1000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let storage = {
        let file = file.clone();
        Server::start(move |asked| file.answer(asked))
    };
    let signed = format!("{}/signed?key=1", storage.url());
    let server = Server::start(move |asked| {
        if asked.path.contains("/resolve/") {
            return Answer::new(302, "").header("location", signed.clone());
        }
        answer(std::slice::from_ref(&file), asked)
    });
    download(&hub(&server.url(), cache.path())).expect("downloaded");
    let asked = storage.asked();
    assert_eq!(asked.len(), 1);
    assert_eq!(asked[0].path, "/signed?key=1");
    assert_eq!(asked[0].header("authorization"), None);
    assert!(server.asked().iter().all(|asked| asked.header("authorization").is_some()));
}

#[test]
fn a_refusal_of_another_host_shows_no_signature() {
    let cache = tempfile::tempdir().expect("a folder");
    let storage = Server::start(|_| Answer::new(403, "the address has expired"));
    let signed = format!("{}/signed?key=secret", storage.url());
    let server = Server::start(move |asked| {
        if asked.path.contains("/resolve/") {
            return Answer::new(302, "").header("location", signed.clone());
        }
        answer(&[stored("a", "aa", false)], asked)
    });
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("/signed refuses the request with status 403"), "{error}");
    assert!(error.contains("expired") && !error.contains("secret"), "{error}");
}

#[test]
fn a_redirect_within_the_endpoint_is_followed() {
    let cache = tempfile::tempdir().expect("a folder");
    let file = stored("config.json", "{}", false);
    let server =
        Server::start(move |asked| match asked.path.strip_prefix("/api/models/old/name/") {
            Some(rest) => {
                Answer::new(307, "").header("location", format!("/api/models/owner/name/{rest}"))
            }
            None => answer(std::slice::from_ref(&file), asked),
        });
    let hub = hub(&server.url(), cache.path());
    let old = reference("hf:old/name").repository().clone();
    assert_eq!(hub.resolve(&old, "main").expect("resolved"), COMMIT);
    assert!(server.asked().iter().all(|asked| asked.header("authorization").is_some()));
}

#[test]
fn redirects_in_a_circle_end() {
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(|asked| Answer::new(302, "").header("location", asked.path.clone()));
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("which is not followed"), "{error}");
    assert_eq!(server.asked().len(), 6);
}

#[test]
fn offline_mode_reads_the_cache_alone() {
    let files = vec![stored("config.json", "{}", false), stored("sub/b", "bb", true)];
    let cache = tempfile::tempdir().expect("a folder");
    let server = Server::start(move |asked| answer(&files, asked));
    let mut settings = config(&server.url(), cache.path());
    settings.offline = true;
    let offline = shoal_hub::Hub::new(settings).expect("a client");
    assert!(refusal(&offline).contains("unset HF_HUB_OFFLINE"));

    let online = hub(&server.url(), cache.path());
    let part = online.download(&reference("hf:owner/name:sub"), &mut ignore).expect("downloaded");
    let asked = server.asked().len();
    let again = offline.download(&reference("hf:owner/name:sub"), &mut ignore).expect("cached");
    assert_eq!(again, part);
    assert!(refusal(&offline).contains("config.json of owner/name is not in the cache"));

    // A cache that another tool has filled may have no list of files.
    fs::remove_dir_all(cache.path().join("models--owner--name/trees")).expect("removed");
    assert_eq!(download(&offline).expect("cached").files, part.files);
    assert_eq!(server.asked().len(), asked);
    let error = offline.resolve(reference("hf:a/b").repository(), "main").expect_err("offline");
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
}

#[test]
fn blobs_of_the_cache_are_used() {
    let file = stored("model.bin", bytes(1000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let blobs = cache.path().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).expect("a folder");
    fs::write(blobs.join(file.hash()), &file.bytes).expect("written");
    let server = Server::start(move |asked| answer(std::slice::from_ref(&file), asked));
    let snapshot = download(&hub(&server.url(), cache.path())).expect("cached");
    assert_eq!(fs::read(&snapshot.files[0].local).expect("a file"), bytes(1000));
    assert!(server.asked_for("/resolve/").is_empty());
}

#[test]
fn a_full_disk_is_named() {
    let file = stored("model.bin", bytes(1000), true);
    let cache = tempfile::tempdir().expect("a folder");
    let blobs = cache.path().join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).expect("a folder");
    let partial = blobs.join(format!("{}.incomplete", file.hash()));
    symlink("/dev/full", &partial).expect("a link");
    let server = Server::start(move |asked| answer(std::slice::from_ref(&file), asked));
    let error = refusal(&hub(&server.url(), cache.path()));
    assert!(error.contains("the disk is full at") && error.contains("to resume"), "{error}");
    assert!(partial.exists(), "what has arrived stays");
}
