use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::*;

/// Files under arbitrary names.
struct TestFiles(BTreeMap<ContentHash, PathBuf>);

impl FileSource for TestFiles {
    fn open(&self, hash: &ContentHash) -> Option<OpenFile> {
        let file = File::open(self.0.get(hash)?).ok()?;
        let length = file.metadata().ok()?.len();
        Some(OpenFile { file, length })
    }
}

struct Transfer {
    directory: tempfile::TempDir,
    host: Node,
    guest: Node,
}

impl Transfer {
    fn new(files: &[(ContentHash, &[u8])]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut test_files = BTreeMap::new();
        for (hash, bytes) in files {
            let path = directory.path().join(hash.to_string());
            fs::write(&path, bytes).expect("writable");
            test_files.insert(*hash, path);
        }
        let mut config = config(1);
        config.files = Arc::new(TestFiles(test_files));
        let host = Node::with(&Identity::ephemeral(), loopback(), config);
        let guest = Node::new();
        guest.transport.remember(host.id(), &host.addresses());
        Self { directory, host, guest }
    }

    fn destination(&self) -> PathBuf {
        self.directory.path().join("fetched").join("tokens.bin")
    }

    /// Fetches a file; returns its content, and the number of files in the destination's folder.
    async fn fetch(&self, hash: ContentHash, length: u64) -> (Result<Vec<u8>, FetchError>, usize) {
        let destination = self.destination();
        let folder = destination.parent().expect("has a folder");
        fs::create_dir_all(folder).expect("writable");
        let holders = [self.host.id()];
        let fetched = self.guest.transport.fetch_file(&holders, hash, length, &destination);
        let fetched = soon(fetched).await.map(|()| fs::read(&destination).expect("it is there"));
        (fetched, fs::read_dir(folder).expect("readable").count())
    }
}

fn text(length: usize) -> Vec<u8> {
    (0..length).map(|position| ((position * position) >> 7) as u8).collect()
}

#[tokio::test]
async fn a_file_is_fetched_by_its_hash() {
    let piece = limits::FILE_PIECE.0 as usize;
    for length in [0, 1, piece, piece + 1, 20 * piece + 17] {
        let file = text(length);
        let transfer = Transfer::new(&[(ContentHash::of(&file), &file)]);
        let (fetched, files) = transfer.fetch(ContentHash::of(&file), length as u64).await;
        assert!(fetched.expect("fetched") == file);
        assert_eq!(files, 1);
        let pieces = length.div_ceil(piece).max(1);
        let received = transfer.guest.transport.traffic().file.received;
        let hashes = 8 + 32 * pieces;
        let heads = if length > 0 { 5 * pieces } else { 0 };
        assert_eq!(received.0, (length + 8 * pieces + heads + hashes) as u64);
    }
}

#[tokio::test]
async fn a_file_is_packed_if_the_run_configures_it() {
    for (length, packed) in [((2 << 20) + 17, true), (3, false)] {
        let file = vec![7; length];
        let transfer = Transfer::new(&[(ContentHash::of(&file), &file)]);
        transfer.host.transport.set_chunk_packing(ChunkPacking::Zstd);
        let (fetched, _) = transfer.fetch(ContentHash::of(&file), length as u64).await;
        assert!(fetched.expect("fetched") == file);
        let received = transfer.guest.transport.traffic().file.received;
        assert_eq!(received.0 < length as u64, packed, "{received} of {length} bytes");
        let Pieces { raw, zstd } = transfer.host.transport.traffic().pieces;
        // The last piece has 17 or 3 bytes, which packing does not make smaller.
        assert_eq!((raw, zstd), if packed { (1, 2) } else { (1, 0) });
    }
}

#[tokio::test]
async fn a_file_with_another_hash_is_rejected() {
    let file = text(3 << 20);
    let name = ContentHash([7; 32]);
    let transfer = Transfer::new(&[(name, &file)]);
    let (fetched, files) = transfer.fetch(name, file.len() as u64).await;
    let error = fetched.expect_err("the hash is wrong");
    assert_eq!(transfer.guest.transport.traffic().wrong_files, 1);
    assert!(matches!(error, FetchError::WrongHash { expected } if expected == name), "{error}");
    assert_eq!(files, 0);
}

#[tokio::test]
async fn a_failed_fetch_returns_its_reason() {
    let file = text(100);
    let hash = ContentHash::of(&file);
    let transfer = Transfer::new(&[(hash, &file)]);
    let (fetched, files) = transfer.fetch(ContentHash([9; 32]), 100).await;
    assert!(matches!(fetched, Err(FetchError::NotFound { .. })), "{fetched:?}");
    assert_eq!(files, 0);
    let (fetched, _) = transfer.fetch(hash, 99).await;
    assert!(matches!(fetched, Err(FetchError::Size { expected: 99, found: 100 })), "{fetched:?}");
    let (fetched, _) = transfer.fetch(hash, limits::FILE.0 + 1).await;
    assert!(matches!(fetched, Err(FetchError::TooLarge { .. })), "{fetched:?}");
}

/// A peer that has one file, in a folder of its own.
fn holder(folder: &Path, name: &str, hash: ContentHash, bytes: &[u8]) -> (Node, PathBuf) {
    let path = folder.join(name);
    fs::write(&path, bytes).expect("writable");
    let mut config = config(1);
    config.files = Arc::new(TestFiles(BTreeMap::from([(hash, path.clone())])));
    (Node::with(&Identity::ephemeral(), loopback(), config), path)
}

/// A peer that fetches the file, and the destination.
fn reader(folder: &Path, holders: &[&Node]) -> (Node, PathBuf, Vec<PeerId>) {
    let guest = Node::new();
    for holder in holders {
        guest.transport.remember(holder.id(), &holder.addresses());
    }
    let ids = holders.iter().map(|holder| holder.id()).collect();
    (guest, folder.join("fetched"), ids)
}

/// Closes a holder once it has sent 1 MiB.
async fn dies(holder: &Node) {
    while holder.transport.traffic().file.sent.0 < 1 << 20 {
        tokio::task::yield_now().await;
    }
    holder.transport.close().await;
}

#[tokio::test]
async fn several_holders_share_the_transfer_of_a_file() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text(40 << 20);
    let hash = ContentHash::of(&file);
    let holders: Vec<Node> =
        ["a", "b", "c"].map(|name| holder(folder.path(), name, hash, &file).0).into();
    let (guest, to, ids) = reader(folder.path(), &holders.iter().collect::<Vec<_>>());
    let fetched = guest.transport.fetch_file(&ids, hash, file.len() as u64, &to);
    soon(fetched).await.expect("fetched");
    assert!(fs::read(&to).expect("it is there") == file);
    for holder in &holders {
        let sent = holder.transport.traffic().file.sent;
        assert!(sent.0 > 1 << 20, "every holder sends some pieces: {sent}");
    }
}

#[tokio::test]
async fn a_fetch_survives_a_corrupt_and_a_dying_holder() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text(30 << 20);
    let hash = ContentHash::of(&file);
    let (corrupt, path) = holder(folder.path(), "corrupt", hash, &file);
    let (dying, _) = holder(folder.path(), "dying", hash, &file);
    let (honest, _) = holder(folder.path(), "honest", hash, &file);
    // It has sent the hashes of the pieces before its disk returns other bytes.
    let (first, to, ids) = reader(folder.path(), &[&corrupt]);
    soon(first.transport.fetch_file(&ids, hash, file.len() as u64, &to)).await.expect("fetched");
    fs::write(&path, vec![1; file.len()]).expect("writable");

    let (guest, to, ids) = reader(folder.path(), &[&corrupt, &dying, &honest]);
    fs::remove_file(&to).expect("it was there");
    let fetched = guest.transport.fetch_file(&ids, hash, file.len() as u64, &to);
    let (fetched, ()) = soon(async { tokio::join!(fetched, dies(&dying)) }).await;
    fetched.expect("one honest holder is enough");
    assert!(fs::read(&to).expect("it is there") == file);
    assert!(guest.transport.traffic().wrong_files >= 1, "the wrong file is counted");
}

#[tokio::test]
async fn a_fetch_fails_with_its_only_holder() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text(200 << 20);
    let hash = ContentHash::of(&file);
    let (dying, _) = holder(folder.path(), "dying", hash, &file);
    let (guest, to, ids) = reader(folder.path(), &[&dying]);
    let fetched = guest.transport.fetch_file(&ids, hash, file.len() as u64, &to);
    let (fetched, ()) = soon(async { tokio::join!(fetched, dies(&dying)) }).await;
    assert!(
        matches!(fetched, Err(FetchError::Interrupted(_) | FetchError::Connect(_))),
        "{fetched:?}"
    );
    assert!(!to.exists());
}

/// The partial file of a destination.
fn partial(to: &Path) -> PathBuf {
    let mut name = to.file_name().expect("a file").to_owned();
    name.push(PARTIAL_SUFFIX);
    to.with_file_name(name)
}

/// Fetches until some pieces have arrived, then aborts as if the process had died.
async fn begin(guest: &Node, ids: &[PeerId], hash: ContentHash, length: u64, to: &Path) {
    let some = async {
        while guest.transport.traffic().file.received.0 < 4 << 20 {
            tokio::task::yield_now().await;
        }
    };
    let fetched = guest.transport.fetch_file(ids, hash, length, to);
    tokio::select! {
        biased;
        () = some => {}
        fetched = fetched => fetched.expect("it does not fail"),
    }
}

#[tokio::test]
async fn an_interrupted_fetch_is_resumed() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text(200 << 20);
    let (hash, length) = (ContentHash::of(&file), file.len() as u64);
    let (holder, _) = holder(folder.path(), "holder", hash, &file);
    let (first, to, ids) = reader(folder.path(), &[&holder]);
    soon(begin(&first, &ids, hash, length, &to)).await;
    assert!(!to.exists(), "it is incomplete");
    first.transport.close().await;

    // Simulates a piece that was damaged by a crash of the machine.
    let torn = File::options().write(true).open(partial(&to)).expect("the partial file is kept");
    let piece = limits::FILE_PIECE.0 as usize;
    let stored = fs::read(partial(&to)).expect("readable");
    let right = |index: &usize| stored[index * piece..][..piece] == file[index * piece..][..piece];
    let intact: Vec<usize> = (0..200).filter(right).collect();
    assert!(intact.len() >= 2, "some pieces arrived");
    torn.write_all_at(&[stored[intact[0] * piece] ^ 1], (intact[0] * piece) as u64)
        .expect("writable");

    let (second, _, ids) = reader(folder.path(), &[&holder]);
    soon(second.transport.fetch_file(&ids, hash, length, &to)).await.expect("fetched");
    assert!(fs::read(&to).expect("it is there") == file);
    assert!(!partial(&to).exists(), "the partial file is gone");
    let pieces = (200 - intact.len() + 1) as u64;
    let received = second.transport.traffic().file.received.0;
    assert_eq!(received, pieces * (8 + 5 + piece as u64) + 8 + 32 * 200, "only the missing pieces");
}

#[tokio::test]
async fn any_content_of_the_partial_file_is_tolerated() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text((3 << 20) + 5);
    let (hash, length) = (ContentHash::of(&file), file.len() as u64);
    let (holder, _) = holder(folder.path(), "holder", hash, &file);
    for before in [Vec::new(), vec![7; 9 << 20], file.clone(), file[..2 << 20].to_vec()] {
        let (guest, to, ids) = reader(folder.path(), &[&holder]);
        fs::write(partial(&to), before).expect("writable");
        soon(guest.transport.fetch_file(&ids, hash, length, &to)).await.expect("fetched");
        assert!(fs::read(&to).expect("it is there") == file);
        assert!(!partial(&to).exists());
    }
}

#[tokio::test]
async fn two_fetches_of_one_file_to_one_destination_succeed() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text(9 << 20);
    let (hash, length) = (ContentHash::of(&file), file.len() as u64);
    let (holder, _) = holder(folder.path(), "holder", hash, &file);
    let (guest, to, ids) = reader(folder.path(), &[&holder]);
    let fetch = || guest.transport.fetch_file(&ids, hash, length, &to);
    let (one, other) = soon(async { tokio::join!(fetch(), fetch()) }).await;
    one.and(other).expect("fetched");
    assert!(fs::read(&to).expect("it is there") == file);
    assert_eq!(
        fs::read_dir(folder.path()).expect("readable").count(),
        2,
        "the file and the holder's copy"
    );
}

#[tokio::test]
async fn a_holder_reports_the_length_of_a_file() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let hash = ContentHash::of(b"file");
    let (holder, _) = holder(folder.path(), "holder", hash, b"file");
    let (guest, _, _) = reader(folder.path(), &[&holder]);
    let length = soon(guest.transport.file_length(holder.id(), hash)).await;
    assert_eq!(length.expect("it has it"), 4);
    let none = soon(guest.transport.file_length(holder.id(), ContentHash([1; 32]))).await;
    assert!(matches!(none, Err(FetchError::NotFound { .. })), "{none:?}");
}

/// Answers the first request with the hashes of a file's pieces.
async fn send_hashes(holder: &Raw, file: &[u8]) {
    let (mut send, mut recv) = holder.connection.accept_bi().await.expect("a request");
    recv.read_to_end(100).await.expect("short");
    let length = file.len() as u64;
    send.write_all(&length.to_le_bytes()).await.expect("open");
    for (index, piece) in file.chunks(limits::FILE_PIECE.0 as usize).enumerate() {
        let hash = crate::pieces::piece_hash(length, index as u64, piece);
        send.write_all(&hash).await.expect("open");
    }
    send.finish().expect("open");
}

/// A peer whose connection is alive, but which answers no request.
async fn silent(guest: &mut Node) -> (Raw, PeerId) {
    let raw = Raw::greeted(guest).await;
    let id = raw.identity.peer_id();
    (raw, id)
}

#[tokio::test]
async fn a_fetch_survives_silent_holders() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text((9 << 20) + 5);
    let (hash, length) = (ContentHash::of(&file), file.len() as u64);
    let (holder, _) = holder(folder.path(), "holder", hash, &file);
    let (mut guest, to, honest) = reader(folder.path(), &[&holder]);
    let (_one, first) = silent(&mut guest).await;
    let (_other, last) = silent(&mut guest).await;
    guest.connect(&holder).await.expect("they reach each other");
    tokio::time::pause();
    let ids = [first, honest[0], last];
    guest.transport.fetch_file(&ids, hash, length, &to).await.expect("one honest holder is enough");
    assert!(fs::read(&to).expect("it is there") == file);
}

#[tokio::test]
async fn a_fetch_from_silent_holders_times_out() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text((3 << 20) + 5);
    let (hash, length) = (ContentHash::of(&file), file.len() as u64);
    let (mut guest, to, _) = reader(folder.path(), &[]);
    let (raw, id) = silent(&mut guest).await;
    tokio::time::pause();
    let fetched = guest.transport.fetch_file(&[id], hash, length, &to).await;
    assert!(matches!(fetched, Err(FetchError::Silent { .. })), "{fetched:?}");
    let asked = guest.transport.file_length(id, hash).await;
    assert!(matches!(asked, Err(FetchError::Silent { .. })), "{asked:?}");
    // The two aborted requests are still queued at the peer.
    for _ in 0..2 {
        drop(raw.connection.accept_bi().await.expect("a request"));
    }
    // A holder that sends the hashes of the pieces, and nothing else.
    let ids = [id];
    let fetched = guest.transport.fetch_file(&ids, hash, length, &to);
    let (fetched, ()) = tokio::join!(fetched, send_hashes(&raw, &file));
    assert!(matches!(fetched, Err(FetchError::Silent { .. })), "{fetched:?}");
    assert!(!to.exists());
}

#[tokio::test]
async fn a_reader_that_receives_nothing_is_dropped() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = text((30 << 20) + 5);
    let (hash, length) = (ContentHash::of(&file), file.len() as u64);
    let (holder, _) = holder(folder.path(), "holder", hash, &file);
    let mut tuning = quinn::TransportConfig::default();
    tuning.stream_receive_window(quinn::VarInt::from_u32(1000));
    tuning.keep_alive_interval(Some(Duration::from_secs(1)));
    let mut hostile = Raw::dial_with(Identity::ephemeral(), &holder, tuning).await;
    hostile.greet().await.expect("an answer");
    // With the control stream, these use all its streams.
    let mut answers = Vec::new();
    for _ in 0..15 {
        let (mut send, recv) = hostile.connection.open_bi().await.expect("open");
        let request = file_transfer::Request { hash, position: 0, length: 1 << 20 }.encode();
        send.write_all(&request::Kind::File.encode(&request)).await.expect("open");
        send.finish().expect("open");
        answers.push(recv);
    }
    let (guest, to, ids) = reader(folder.path(), &[&holder]);
    guest.connect(&holder).await.expect("they reach each other");
    tokio::time::pause();
    guest.transport.fetch_file(&ids, hash, length, &to).await.expect("it gets its turns");
    for answer in &mut answers {
        let end = answer.received_reset().await.expect("its connection is alive");
        assert_eq!(end, Some(quinn::VarInt::from_u32(0)), "the answer is aborted");
    }
}
