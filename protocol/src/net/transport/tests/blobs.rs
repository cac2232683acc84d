use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;

use super::*;

/// Files under any names one likes.
struct Shelf(BTreeMap<ContentHash, PathBuf>);

impl BlobSource for Shelf {
    fn open(&self, hash: &ContentHash) -> Option<Blob> {
        let file = File::open(self.0.get(hash)?).ok()?;
        let length = file.metadata().ok()?.len();
        Some(Blob { file, length })
    }
}

struct Library {
    directory: tempfile::TempDir,
    host: Node,
    guest: Node,
}

impl Library {
    fn new(files: &[(ContentHash, &[u8])]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut shelf = BTreeMap::new();
        for (hash, bytes) in files {
            let path = directory.path().join(hash.to_string());
            fs::write(&path, bytes).expect("writable");
            shelf.insert(*hash, path);
        }
        let mut config = config(1);
        config.blobs = Arc::new(Shelf(shelf));
        let host = Node::with(&Identity::ephemeral(), loopback(), config);
        let guest = Node::new();
        guest.transport.remember(host.id(), &host.addresses());
        Self { directory, host, guest }
    }

    fn destination(&self) -> PathBuf {
        self.directory.path().join("fetched").join("tokens.bin")
    }

    /// What was fetched, and how many files are left where it was to appear.
    async fn fetch(&self, hash: ContentHash, length: u64) -> (Result<Vec<u8>, FetchError>, usize) {
        let destination = self.destination();
        let folder = destination.parent().expect("has a folder");
        fs::create_dir_all(folder).expect("writable");
        let fetched = self.guest.transport.fetch_blob(self.host.id(), hash, length, &destination);
        let fetched = soon(fetched).await.map(|()| fs::read(&destination).expect("it is there"));
        (fetched, fs::read_dir(folder).expect("readable").count())
    }
}

fn text(length: usize) -> Vec<u8> {
    (0..length).map(|position| ((position * position) >> 7) as u8).collect()
}

#[tokio::test]
async fn a_file_is_fetched_by_its_hash() {
    let piece = limits::BLOB_PIECE.0 as usize;
    for length in [0, 1, piece, piece + 1, 20 * piece + 17] {
        let file = text(length);
        let library = Library::new(&[(ContentHash::of(&file), &file)]);
        let (fetched, files) = library.fetch(ContentHash::of(&file), length as u64).await;
        assert!(fetched.expect("fetched") == file);
        assert_eq!(files, 1);
        let pieces = length.div_ceil(piece).max(1);
        let received = library.guest.transport.traffic().blob.received;
        assert_eq!(received.0, (length + 8 * pieces) as u64);
    }
}

#[tokio::test]
async fn another_file_under_its_name_is_refused() {
    let file = text(3 << 20);
    let name = ContentHash([7; 32]);
    let library = Library::new(&[(name, &file)]);
    let (fetched, files) = library.fetch(name, file.len() as u64).await;
    let error = fetched.expect_err("the hash is wrong");
    assert_eq!(library.guest.transport.traffic().wrong_files, 1);
    assert!(
        matches!(error, FetchError::WrongHash { expected, found }
            if expected == name && found == ContentHash::of(&file)),
        "{error}"
    );
    assert_eq!(files, 0);
}

#[tokio::test]
async fn what_cannot_be_fetched_says_why() {
    let file = text(100);
    let hash = ContentHash::of(&file);
    let library = Library::new(&[(hash, &file)]);
    let (fetched, files) = library.fetch(ContentHash([9; 32]), 100).await;
    assert!(matches!(fetched, Err(FetchError::NotFound { .. })), "{fetched:?}");
    assert_eq!(files, 0);
    let (fetched, _) = library.fetch(hash, 99).await;
    assert!(matches!(fetched, Err(FetchError::Size { expected: 99, found: 100 })), "{fetched:?}");
    let (fetched, _) = library.fetch(hash, limits::BLOB.0 + 1).await;
    assert!(matches!(fetched, Err(FetchError::TooLarge { .. })), "{fetched:?}");
}
