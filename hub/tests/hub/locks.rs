//! Two processes that download the same repository.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use shoal_hub::{Hub, HubError};

use crate::repository::{answer, config, download, stored};
use crate::server::Server;

/// The file of the lock that a helper process holds.
const HELD: &str = "SHOAL_HUB_TEST_HELD_LOCK";

/// Time for which the helper process holds it.
const HOLD: Duration = Duration::from_millis(700);

/// Runs in a process of its own: takes the lock, creates a file beside it, and ends later.
#[test]
fn holder_of_a_lock() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let file = File::options().write(true).open(&path).expect("a lock");
    file.try_lock().expect("free");
    let mut held = File::create(Path::new(&path).with_extension("held")).expect("a file");
    held.write_all(b"held").expect("written");
    std::thread::sleep(HOLD);
}

#[test]
fn a_second_process_waits_for_the_first() {
    let cache = tempfile::tempdir().expect("a folder");
    let locks = cache.path().join(".locks/models--owner--name");
    fs::create_dir_all(&locks).expect("a folder");
    let lock = locks.join("shoal.lock");
    File::create(&lock).expect("a lock");
    let mut holder = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "locks::holder_of_a_lock"])
        .env(HELD, &lock)
        .stdout(Stdio::null())
        .spawn()
        .expect("a process");
    let held = lock.with_extension("held");
    let start = Instant::now();
    while !held.exists() {
        assert!(start.elapsed() < Duration::from_secs(30), "the process takes the lock");
        std::thread::sleep(Duration::from_millis(5));
    }
    let server = Server::start(|asked| answer(&[stored("a", "aa", false)], asked));
    let mut settings = config(&server.url(), cache.path());
    settings.timeouts.lock = Duration::from_millis(20);
    let refused = download(&Hub::new(settings.clone()).expect("a client"));
    assert!(matches!(refused, Err(HubError::Locked { .. })), "{refused:?}");
    assert!(server.asked_for("/resolve/").is_empty());

    settings.timeouts.lock = Duration::from_secs(30);
    download(&Hub::new(settings).expect("a client")).expect("downloaded after the first");
    assert!(holder.try_wait().expect("a process").is_some() || holder.wait().is_ok());
}
