//! Processes of a demo are killed from outside: it replaces them and ends with the reference's bits. A peer that
//! fails by itself ends the demo. A peer with little memory swaps.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::{Trained, checkpoint_hash, text};
use tempfile::TempDir;

/// A running demo of five peers in a folder of its own.
struct Demo {
    process: Process,
    _folder: TempDir,
    out: PathBuf,
}

impl Demo {
    /// Starts a demo and waits for its first steps.
    fn training(flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("room for a folder");
        let out = folder.path().join("demo");
        let mut demo = shoal(["demo"]);
        demo.args("--peers 5 --stages 2 --steps 10 --seed 5".split(' ')).args(flags);
        demo.arg("--data").arg(text()).arg("--out").arg(&out);
        let process = Process::start("demo", demo);
        let _ = process.stderr_line("  loss ");
        Self { process, _folder: folder, out }
    }

    /// Waits for the demo's end, checks its result and returns the number of peers that were killed.
    fn kills_of_success(self) -> u64 {
        let shown = self.process.end().success();
        let report = Trained::read(&self.out).report;
        let hash = report["reference_hash"].as_str().expect("a reference");
        assert_eq!(report["checkpoint_hash"], hash);
        assert_eq!(checkpoint_hash(&self.out.join("checkpoint")), hash);
        assert_eq!(report["microbatches"]["missing"], 0);
        assert!(shown.contains("killed") && shown.contains("identical"), "{shown}");
        report["kills"].as_u64().expect("a number")
    }
}

/// A demo of two peers and four stages, with so much memory for each peer.
fn demo_with_memory(memory: &str, out: &Path) -> Process {
    let mut demo = shoal(["demo"]);
    demo.args("--peers 2 --stages 4 --steps 3 --memory".split(' ')).arg(memory);
    demo.arg("--data").arg(text()).arg("--out").arg(out);
    Process::start("demo", demo)
}

fn kill(id: &str) {
    let status = Command::new("kill").args(["-9", id]).status().expect("kill is there");
    assert!(status.success(), "{id} is a process");
}

/// The process that works in a data directory.
fn process_in(data_dir: &Path) -> String {
    let argument =
        data_dir.canonicalize().expect("it is there").into_os_string().into_encoded_bytes();
    let processes = fs::read_dir("/proc").expect("there is a /proc");
    let works_there = |process: &PathBuf| {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        let mut arguments = line.split(|byte| *byte == 0);
        // The demo's own command line names another folder.
        arguments.any(|other| other == argument)
    };
    let mut paths = processes.map(|entry| entry.expect("a process").path());
    let found = paths.find(works_there).expect("a process");
    found.file_name().and_then(|name| name.to_str()).expect("a number").to_owned()
}

#[test]
fn a_demo_replaces_peers_that_somebody_kills_and_the_one_that_coordinates_it() {
    let demo = Demo::training(&[]);
    let line = demo.process.stderr_line("kill -9");
    assert!(line.contains(demo.out.to_str().expect("a plain path")), "it names the folder: {line}");
    let (_, command) = line.split_once("`kill -9 ").expect("a command");
    let (id, _) = command.split_once('`').expect("its end");
    assert_eq!(process_in(&demo.out.join("peers/4")), id);
    kill(id);
    let _ = demo.process.stderr_line("peer 4 was killed");
    // The first peer coordinates the others.
    for peer in [0, 2] {
        kill(&process_in(&demo.out.join(format!("peers/{peer}"))));
        let _ = demo.process.stderr_line(&format!("peer {peer} was killed"));
    }
    assert_eq!(demo.kills_of_success(), 3);
}

#[test]
fn a_peer_that_fails_when_it_is_replaced_ends_the_demo_with_its_error() {
    // An anchor comes back under its own number.
    let demo = Demo::training(&["--anchors", "3"]);
    let (data_dir, aside) = (demo.out.join("peers/1"), demo.out.join("aside"));
    let id = process_in(&data_dir);
    fs::rename(&data_dir, aside).expect("it can be moved");
    fs::write(&data_dir, "no folder").expect("room for a file");
    kill(&id);
    let reason = demo.process.end().failure(1);
    assert!(reason.starts_with("peer-1 failed (exit status: 2): "), "{reason}");
    assert!(reason.contains("peer-1.log"), "{reason}");
}

#[test]
fn a_peer_of_a_demo_swaps_what_its_memory_does_not_hold() {
    const MEMORY: u64 = 16 << 20;
    let folder = tempfile::tempdir().expect("room for a folder");
    let out = folder.path().join("demo");
    let shown = demo_with_memory("16MiB", &out).end().success();
    assert!(shown.contains("identical"), "{shown}");
    let trained = Trained::read(&out);
    let files = fs::read_dir(trained.checkpoint()).expect("it is there");
    let bytes: u64 = files.map(|file| file.and_then(|it| it.metadata()).expect("read").len()).sum();
    // The first peer has all stages, whose state in training is twice as large as their checkpoint.
    assert!(2 * bytes > MEMORY, "{bytes}");
    assert_eq!(trained.report["reference_hash"], trained.hash());
}

#[test]
fn a_demo_whose_peers_have_too_little_memory_says_what_they_need() {
    let folder = tempfile::tempdir().expect("room for a folder");
    let reason = demo_with_memory("1MiB", &folder.path().join("demo")).end().failure(1);
    assert!(reason.contains("hosting stage 0-3 takes"), "{reason}");
}
