//! Two processes that download the same repository.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use shoal_hub::{Hub, HubError};

use crate::repository::{answer, config, download, stored};
use crate::server::Server;

/// The file of the lock that the other process holds.
const HELD: &str = "SHOAL_HUB_TEST_HELD_LOCK";

/// The longest time that one process waits for the other.
const LONGEST: Duration = Duration::from_secs(30);

/// Waits for a file of the other process.
fn wait_for(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < LONGEST, "{} does not appear", path.display());
        thread::sleep(Duration::from_millis(5));
    }
}

/// Runs in a process of its own: takes the lock, and holds it until it is asked to release it.
#[test]
fn holder_of_a_lock() {
    let Some(path) = std::env::var_os(HELD) else { return };
    let path = Path::new(&path);
    let file = File::options().write(true).open(path).expect("a lock");
    file.try_lock().expect("free");
    File::create(path.with_extension("held")).expect("a file");
    wait_for(&path.with_extension("release"));
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
    wait_for(&lock.with_extension("held"));
    let server = Server::start(|asked| answer(&[stored("a", "aa", false)], asked));
    let mut settings = config(&server.url(), cache.path());
    settings.timeouts.lock = Duration::from_millis(20);
    let refused = download(&Hub::new(settings.clone()).expect("a client"));
    assert!(matches!(refused, Err(HubError::Locked { .. })), "{refused:?}");
    assert!(server.asked_for("/resolve/").is_empty());

    settings.timeouts.lock = LONGEST;
    let release = lock.with_extension("release");
    let first = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        File::create(release).expect("a file");
        holder.wait().expect("a process").success()
    });
    download(&Hub::new(settings).expect("a client")).expect("downloaded after the first");
    assert!(first.join().expect("no panic"), "the first process ends well");
}
