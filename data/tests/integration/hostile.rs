//! Sources that somebody else chose: links out of a folder, and files that grow when they are unpacked.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common::{texts, write};
use shoal_data::source::{ReadOptions, RowKind, SourceError, find, open};

fn place(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_link_out_of_the_folder_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("writable");
    write(folder.path(), "secret.txt", "a key");
    write(folder.path(), "data/a.txt", "text");
    symlink("a.txt", folder.path().join("data/b.txt")).expect("a link");
    let found = |source: &str| find(&[place(folder.path(), source)], None).map(|found| found.files);
    assert_eq!(found("data").expect("a link inside").len(), 2);
    symlink("../secret.txt", folder.path().join("data/c.txt")).expect("a link");
    for source in ["data", "data/*.txt"] {
        let error = found(source).expect_err(source).to_string();
        let link = "data/c.txt is a link to ";
        assert!(error.contains(link) && error.contains("/secret.txt"), "{error}");
        assert!(error.contains("as a source of its own") && !error.contains('\n'), "{error}");
    }
    // The folder of this pattern holds both files.
    assert_eq!(found("*/c.txt").expect("inside").len(), 1);
    // A pattern without it, and the link as a source of its own.
    assert_eq!(found("data/[ab].txt").expect("it does not match").len(), 2);
    assert_eq!(found("data/c.txt").expect("it is named").len(), 1);
}

#[test]
fn a_snapshot_of_the_hub_is_read_through_its_links() {
    let folder = tempfile::tempdir().expect("writable");
    write(folder.path(), "repository/blobs/77", texts(["a"]));
    fs::create_dir_all(folder.path().join("repository/snapshots/0f/data")).expect("writable");
    let link = folder.path().join("repository/snapshots/0f/data/a.jsonl");
    symlink("../../../blobs/77", link).expect("a link");
    for source in ["repository/snapshots/0f", "repository/snapshots/0f/data/*.jsonl"] {
        let found = find(&[place(folder.path(), source)], None).map(|found| found.files);
        assert_eq!(found.expect("a snapshot").len(), 1, "{source}");
    }
}

/// The error at which the rows of a file end.
fn failure(path: &str) -> SourceError {
    let file = find(&[path.to_owned()], None).expect("it exists").files.remove(0);
    match open(&file, RowKind::Text, 0, &ReadOptions::default()) {
        Ok(rows) => rows.filter_map(Result::err).next().expect("an error"),
        Err(error) => error,
    }
}

#[test]
fn a_file_that_unpacks_to_far_more_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("writable");
    let lines = format!("{}\n", "x".repeat(1023)).repeat(1 << 10);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    let mut zstd = zstd::stream::write::Encoder::new(Vec::new(), 3).expect("it begins");
    for _ in 0..80 {
        gzip.write_all(lines.as_bytes()).expect("it packs");
        zstd.write_all(lines.as_bytes()).expect("it packs");
    }
    let packed = [("a.jsonl.gz", gzip.finish()), ("a.txt.zst", zstd.finish())];
    for (name, bytes) in packed {
        let bytes = bytes.expect("it packs");
        assert!(bytes.len() < 400_000, "{}", bytes.len());
        let error = failure(&write(folder.path(), name, bytes));
        assert!(matches!(error, SourceError::Ratio { most: 200, .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_zstd_window_of_gigabytes_is_refused() {
    let folder = tempfile::tempdir().expect("writable");
    let mut zstd = zstd::stream::write::Encoder::new(Vec::new(), 1).expect("it begins");
    zstd.window_log(30).expect("a window of 1 GiB");
    zstd.write_all(texts(["a"]).as_bytes()).expect("it packs");
    let error = failure(&write(folder.path(), "a.jsonl.zst", zstd.finish().expect("it packs")));
    assert!(error.to_string().contains("a.jsonl.zst: "), "{error}");
}
