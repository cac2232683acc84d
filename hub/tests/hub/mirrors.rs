//! Plain mirrors.

use std::fs;
use std::sync::atomic::AtomicUsize;

use shoal_hub::HubError;

use crate::repository::{bytes, first, hub, ignore, stored};
use crate::server::{Answer, Server};

#[test]
fn a_file_of_a_mirror_is_resumed_and_checked() {
    let file = stored("chunk", bytes(200_000), false);
    let hash = *blake3::hash(&file.bytes).as_bytes();
    let folder = tempfile::tempdir().expect("a folder");
    let count = AtomicUsize::new(0);
    let server = Server::start(move |asked| {
        let answered = file.answer(asked);
        if first(&count) { answered.cut(50_000) } else { answered }
    });
    // Even a mirror at the endpoint gets no token.
    let hub = hub(&server.url(), folder.path());
    let url = format!("{}/{}", server.url(), blake3::Hash::from(hash));
    let destination = folder.path().join("sub").join("chunk");
    let mut last = (0, 0);
    hub.fetch_url(&url, &destination, hash, 200_000, &mut |progress| {
        last = (progress.bytes, progress.total);
    })
    .expect("fetched");
    assert_eq!(last, (200_000, 200_000));
    assert_eq!(fs::read(&destination).expect("a file"), bytes(200_000));
    let asked = server.asked();
    assert_eq!(asked[1].header("range"), Some("bytes=50000-"));
    assert!(asked.iter().all(|asked| asked.header("authorization").is_none()));
    hub.fetch_url(&url, &destination, hash, 200_000, &mut ignore).expect("there");
    assert_eq!(server.asked().len(), asked.len());
    let left = fs::read_dir(folder.path().join("sub")).expect("a folder").count();
    assert_eq!(left, 1, "neither a lock nor a part stays");
}

#[test]
fn other_bytes_of_a_mirror_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(|_| Answer::new(200, "abc"));
    let hub = hub(&server.url(), folder.path());
    let url = format!("{}/x", server.url());
    let destination = folder.path().join("x");
    let refused = hub.fetch_url(&url, &destination, [1; 32], 3, &mut ignore);
    assert!(matches!(refused, Err(HubError::HashMismatch { .. })), "{refused:?}");
    assert!(!destination.exists());
    let refused = hub.fetch_url(&url, &destination, [1; 32], 4, &mut ignore);
    assert!(matches!(refused, Err(HubError::WrongLength { .. })), "{refused:?}");
}

#[test]
fn a_file_that_a_mirror_lacks_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(|_| Answer::new(404, ""));
    let url = format!("{}/x", server.url());
    let hub = hub(&server.url(), folder.path());
    let refused = hub.fetch_url(&url, &folder.path().join("x"), [1; 32], 3, &mut ignore);
    let error = refused.expect_err("missing").to_string();
    assert!(error.starts_with("there is no file") && error.contains(&url), "{error}");
}
