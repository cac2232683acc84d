//! Archives in an object store: a real S3 server, and a network to it that breaks.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use shoal_tests::http::page;
use shoal_tests::object_store::{BUCKET, ObjectStore, Proxy, use_store};
use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::prometheus::value;
use shoal_tests::run::{Run, checkpoint_hash};
use shoal_tests::swarm::{SLOW, Swarm, own_address, start_command};

/// `shoal start` of one peer that hosts all stages and archives in the bucket, and nothing on its disk but in `home`.
fn start(run: &Run, home: &str) -> Command {
    start_at(run, home, BUCKET)
}

/// The same with an archive at an address.
fn start_at(run: &Run, home: &str, archive: &str) -> Command {
    let home = run.path(home);
    let mut command = start_command(&run.config(), &home, &home.join("out"));
    command.args(["--stage", "all", "--listen", "127.0.0.1:0", "--no-mdns", "--archive", archive]);
    command
}

/// Runs a command about the bucket with an argument.
fn about(store: &ObjectStore, arguments: &[&str]) -> Outcome {
    let mut command = shoal(arguments);
    store.use_in(&mut command);
    Process::start(arguments[1], command).end()
}

/// Fetches the bucket's newest checkpoint, and gives its hash.
fn fetched_hash(run: &Run, store: &ObjectStore) -> String {
    let out = run.path("fetched");
    let _ = about(store, &["checkpoint", "fetch", BUCKET, "-o", text(&out)]).success();
    checkpoint_hash(&out)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

#[test]
fn a_run_archives_in_a_bucket_and_its_model_comes_back() {
    let store = ObjectStore::with_credentials();
    let run = Run::of_two_stages(4, 2);
    let mut command = start(&run, "home");
    store.use_in(&mut command);
    let mut peer = Process::start("start", command);
    assert_eq!(peer.event("uploaded")["archive"], BUCKET);
    let _ = peer.end().success();
    let hash = run.alone().hash();
    assert_eq!(fetched_hash(&run, &store), hash);
    let earlier = format!("{BUCKET}/checkpoints/version-2");
    let whole = about(&store, &["checkpoint", "verify", &earlier]).success();
    assert!(whole.starts_with("whole: version 2 "), "{whole}");
    let whole = about(&store, &["checkpoint", "verify", BUCKET]).success();
    assert!(whole.starts_with("whole: version 4 "), "{whole}");
    let mut generate = shoal(["generate", BUCKET, "--prompt", "Apache", "--tokens", "4"]);
    store.use_in(generate.env("XDG_CACHE_HOME", run.path("cache")));
    let written = Process::start("generate", generate).end().success();
    assert!(written.starts_with("Apache"), "{written}");
    let nothing = about(&store, &["checkpoint", "verify", "s3://models/elsewhere"]).failure(1);
    assert!(nothing.contains("no whole checkpoint"), "{nothing}");
}

#[test]
fn a_bucket_that_cannot_be_used_is_named_before_training_begins() {
    let store = ObjectStore::with_credentials();
    let run = Run::of_two_stages(4, 0);
    let failed = |command: Command| Process::start("start", command).end().failure(2);

    let mut command = start(&run, "stranger");
    use_store(store.address(), ("AKIAIOSFODNN7EXAMPLE", "wrong"), &mut command);
    let reason = failed(command);
    assert!(reason.contains("refuses") && reason.contains("AWS_ACCESS_KEY_ID"), "{reason}");

    let mut command = start_at(&run, "misspelt", "s3://nothing/here");
    store.use_in(&mut command);
    let reason = failed(command);
    assert!(reason.contains("s3://nothing/here") && reason.contains("no bucket"), "{reason}");

    let mut command = start(&run, "unreachable");
    store.use_at(own_address(), &mut command);
    let reason = failed(command);
    assert!(reason.contains("does not answer"), "{reason}");
}

/// A run whose optimizer file goes to the bucket in parts.
fn large_run() -> Run {
    let value = |value: i64| toml::Value::from(value);
    Run::tiny(&[
        ("model.hidden", value(384)),
        ("model.intermediate", value(1024)),
        ("training.steps", value(2)),
        ("training.stages", value(1)),
        ("training.microbatches", value(1)),
        ("checkpoint.every", value(0)),
    ])
}

#[test]
fn an_upload_that_is_cut_goes_on_where_it_was() {
    let store = ObjectStore::start();
    let proxy = Proxy::before(store.address());
    let run = large_run();
    let begun = |flags: &[&str]| {
        let mut command = start(&run, "home");
        store.use_at(proxy.address(), command.args(flags));
        Process::start("start", command)
    };
    // After the model, of 20 MB, and four of five parts of the optimizer's state, of 40 MB.
    proxy.break_after(54 << 20);
    let mut peer = begun(&[]);
    peer.event("upload_failed");
    peer.kill();
    let half = about(&store, &["checkpoint", "verify", BUCKET]).failure(1);
    assert!(half.contains("no whole checkpoint"), "{half}");
    proxy.mend();
    let before = proxy.uploaded();
    let _ = begun(&[]).end().success();
    let again = proxy.uploaded() - before;
    let file = fs::metadata(run.path("home/out/checkpoint/optimizer-00001-of-00001.safetensors"));
    let whole = file.expect("the file is there").len();
    // The fifth part began after the end of another one.
    assert!(again < whole - (7 << 20), "{again} bytes were sent again, of {whole} in the file");
    assert_eq!(fetched_hash(&run, &store), run.alone().hash());
}

#[test]
fn a_slow_bucket_does_not_slow_training_down() {
    let store = ObjectStore::start();
    let proxy = Proxy::before(store.address());
    let run = Run::of_two_stages(12, 2);
    proxy.slow_down(Duration::from_millis(100));
    let mut command = start(&run, "home");
    store.use_at(proxy.address(), &mut command);
    let mut peer = Process::start("start", command);
    // The run is over before its first checkpoints are in the bucket, and waits for the last one.
    peer.event("finished");
    while peer.event("uploaded")["version"] != 12 {}
    let _ = peer.end().success();
    assert_eq!(fetched_hash(&run, &store), run.alone().hash());
}

#[test]
fn a_bucket_that_vanishes_stops_nothing_and_keeps_its_last_whole_checkpoint() {
    let store = ObjectStore::start();
    let proxy = Proxy::before(store.address());
    let run = Run::of_two_stages(24, 4);
    let shown = own_address();
    let mut command = start(&run, "home");
    command.args(["--archive-patience", "3", "--metrics", &shown.to_string()]).args(SLOW);
    store.use_at(proxy.address(), &mut command);
    let mut peer = Process::start("start", command);
    let kept = peer.event("uploaded")["version"].as_u64().expect("a version");
    proxy.break_after(0);
    peer.event("upload_failed");
    let scraped = page(shown, "/metrics");
    assert!(value(&scraped, "shoal_checkpoint_upload_failures_total") >= 1.0);
    peer.event("committed");
    let reason = peer.end().failure(1);
    assert!(reason.contains("upload is not complete") && reason.contains(BUCKET), "{reason}");
    let whole = about(&store, &["checkpoint", "verify", BUCKET]).success();
    let version: u64 = whole.split(' ').find_map(|word| word.parse().ok()).expect("a version");
    // Another one may have arrived before the break.
    assert!((kept..24).contains(&version), "{whole}");
    // Started again, the process only completes the upload.
    proxy.mend();
    let mut command = start(&run, "home");
    store.use_at(proxy.address(), &mut command);
    let _ = Process::start("start", command).end().success();
    assert_eq!(fetched_hash(&run, &store), run.alone().hash());
}

/// A swarm of three peers in new homes, the first of which archives in the bucket.
fn swarm(run: &Run, store: &ObjectStore, homes: &Path) -> Swarm {
    let mut command = start_command(&run.config(), &homes.join("peer-0"), &homes.join("out"));
    store.use_in(&mut command);
    let flags = [&["--archive", BUCKET, "--wait-for", "3"], SLOW].concat();
    let mut swarm = Swarm::started_by(command, homes, &flags);
    for _ in 1..3 {
        swarm.join(SLOW);
    }
    swarm
}

#[test]
fn a_run_whose_disks_are_all_lost_continues_from_the_bucket() {
    let store = ObjectStore::start();
    let run = Run::of_two_stages(24, 3);
    for _ in 0..2 {
        let homes = tempfile::tempdir().expect("room for a folder");
        let mut lost = swarm(&run, &store, homes.path());
        lost.peers[0].event("uploaded");
        lost.peers[0].event("uploaded");
        for peer in &mut lost.peers {
            peer.kill();
        }
    }
    let homes = tempfile::tempdir().expect("room for a folder");
    let mut found = swarm(&run, &store, homes.path());
    let first = found.peers[0].event("committed")["step"].as_u64().expect("a number");
    assert!(first >= 12, "two runs were lost after two uploads each, and step {first} is first");
    let trained = found.finish();
    let hash = run.alone().hash();
    assert_eq!(trained.hash(), hash);
    assert_eq!(fetched_hash(&run, &store), hash);
}

#[test]
fn a_run_whose_data_directories_are_lost_continues_from_its_folder() {
    let run = Run::of_two_stages(16, 2);
    let out = run.path("out");
    let started = |home: &str| {
        let mut command = start_command(&run.config(), &run.path(home), &out);
        command.args(["--stage", "all", "--listen", "127.0.0.1:0", "--no-mdns"]).args(SLOW);
        Process::start("start", command)
    };
    let mut lost = started("lost");
    while lost.event("checkpoint")["version"] != 4 {}
    lost.kill();
    let mut found = started("found");
    assert!(found.event("continued")["version"].as_u64() >= Some(4));
    assert!(found.event("committed")["step"].as_u64() >= Some(4));
    let _ = found.end().success();
    assert_eq!(checkpoint_hash(&out.join("checkpoint")), run.alone().hash());
    // The lost process comes back with its log: the run has another history by now.
    let reason = started("lost").end().failure(1);
    assert!(reason.contains("another process"), "{reason}");
}

#[test]
fn an_anchor_of_the_lost_history_joins_the_new_one() {
    let store = ObjectStore::start();
    let run = Run::of_two_stages(40, 3);
    let homes = tempfile::tempdir().expect("room for a folder");
    let mut lost = swarm_with_anchors(&run, &store, homes.path());
    lost.peers[0].event("uploaded");
    for peer in &mut lost.peers {
        peer.kill();
    }
    // The disk of the first peer is lost; the second and the third keep their logs.
    fs::remove_dir_all(lost.data_dir(0)).expect("it is there");
    fs::remove_dir_all(homes.path().join("out")).expect("it is there");
    let mut found = swarm_with_anchors(&run, &store, homes.path());
    let first = found.peers[0].event("committed")["step"].as_u64().expect("a number");
    assert!(first >= 3, "step {first} is first");
    let trained = found.finish();
    assert_eq!(trained.hash(), run.alone().hash());
}

/// A swarm of three anchors, after their log has three copies.
fn swarm_with_anchors(run: &Run, store: &ObjectStore, homes: &Path) -> Swarm {
    let mut command = start_command(&run.config(), &homes.join("peer-0"), &homes.join("out"));
    store.use_in(&mut command);
    let flags = [&["--archive", BUCKET, "--wait-for", "3"], SLOW].concat();
    let mut swarm = Swarm::started_by(command, homes, &flags);
    for _ in 1..3 {
        swarm.join(&[&["--anchor"], SLOW].concat());
    }
    swarm
}

#[test]
fn a_peer_without_a_stage_archives_in_a_bucket() {
    let store = ObjectStore::start();
    let run = Run::of_two_stages(8, 3);
    let homes = tempfile::tempdir().expect("room for a folder");
    let mut swarm =
        Swarm::start_in(homes.path(), &run.config(), &["--wait-for", "2", "--stage", "all"]);
    let mut archivist = shoal(["join", &swarm.address, "--stage", "none", "--archive", BUCKET]);
    archivist.args(["--data-dir", text(&homes.path().join("archivist")), "--events", "-"]);
    archivist.args(["--no-mdns", "--listen", "127.0.0.1:0"]);
    store.use_in(&mut archivist);
    swarm.peers.push(Process::start("archivist", archivist));
    while swarm.peers[1].event("uploaded")["version"] != 8 {}
    let trained = swarm.finish();
    assert_eq!(fetched_hash(&run, &store), trained.hash());
}
