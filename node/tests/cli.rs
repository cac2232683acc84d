//! The command line: commands that need no swarm, and errors, each of which is one line with the
//! right exit code.

use std::ffi::OsStr;
use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use shoal_formats::config::RunConfig;
use shoal_node::config_sources::OnDisk;
use shoal_node::report::Report;
use tempfile::TempDir;

const USAGE: i32 = 2;
const NOT_ADMITTED: i32 = 3;
const CORRUPT: i32 = 4;

/// A folder with a text and a small run that trains on it.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a folder"));
        fs::write(place.path("text.txt"), "All that glisters is not gold. ".repeat(40))
            .expect("written");
        place.configure(|_| {});
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes `run.toml`: a small run with a change.
    fn configure(&self, change: impl FnOnce(&mut RunConfig)) {
        let mut config = RunConfig::default();
        config.data.path = Some("text.txt".into());
        (config.model.hidden, config.model.intermediate) = (16, 32);
        (config.model.layers, config.model.heads, config.model.key_value_heads) = (2, 2, 1);
        config.model.context = 16;
        (config.training.steps, config.training.microbatches) = (2, 2);
        config.training.microbatch_size = 2;
        config.evaluation.microbatches = 1;
        change(&mut config);
        config.optimizer.warmup_steps = config.optimizer.warmup_steps.min(config.training.steps);
        fs::write(self.path("run.toml"), config.to_toml()).expect("written");
    }

    /// Runs `shoal` in the folder.
    fn shoal<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        command(self.0.path(), arguments).output().expect("it starts")
    }

    /// The output of `shoal`, which must succeed.
    fn shoal_prints(&self, arguments: &[&str]) -> String {
        let output = self.shoal(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Runs `shoal`, which must fail with this code and one line that contains these words.
    fn shoal_fails(&self, arguments: &[&str], code: i32, words: &[&str]) {
        let output = self.shoal(arguments);
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(
            errors.starts_with("shoal: ") && errors.trim_end().lines().count() == 1,
            "{errors}"
        );
        for word in words {
            assert!(errors.contains(word), "no {word:?} in: {errors}");
        }
    }

    /// Trains the run, and returns the folder of its checkpoint.
    fn train(&self) -> PathBuf {
        self.shoal_prints(&["local", "run.toml", "--out", "out", "--threads", "1"]);
        self.path("out/checkpoint")
    }
}

/// `shoal` without log lines, and independent of the user's environment.
fn command<S: AsRef<OsStr>>(folder: &Path, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shoal"));
    command
        .current_dir(folder)
        .args(arguments)
        .args(["--log", "off"])
        .env("XDG_DATA_HOME", folder)
        .env("RUST_BACKTRACE", "1");
    command
}

/// A first peer that waits for others. Dropping this kills it.
struct FirstPeer {
    child: Child,
    address: String,
}

impl FirstPeer {
    fn start(place: &Place) -> Self {
        let arguments = "start run.toml --data-dir first --listen 127.0.0.1:0 --no-mdns --stage 0 --open \
                         --address-file address --threads 1 --wait-for 2";
        let child = command(place.0.path(), arguments.split_whitespace())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let file = format!("@{}", place.path("address").display());
        let address: shoal_node::address::JoinAddress = file.parse().expect("a file");
        let address = loop {
            match address.read().expect("an address or nothing") {
                Some(address) => break address,
                None => std::thread::sleep(shoal_node::address::LOOK_EVERY),
            }
        };
        Self { child, address }
    }
}

impl Drop for FirstPeer {
    fn drop(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }
}

fn join(address: &str) -> Vec<&str> {
    let rest = "--data-dir other --listen 127.0.0.1:0 --no-mdns --threads 1 --wait 0";
    [vec!["join", address], rest.split(' ').collect()].concat()
}

#[test]
fn the_version_is_that_of_the_package() {
    let printed = Place::new().shoal_prints(&["--version"]);
    assert_eq!(printed.trim(), format!("shoal {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn init_writes_a_valid_run_once() {
    let place = Place::new();
    place.shoal_prints(&["init", "-o", "new.toml"]);
    let written = RunConfig::load(&place.path("new.toml"), &OnDisk).expect("valid");
    assert_eq!(written, RunConfig::default());
    let shown =
        place.shoal_prints(&["data", "show", "new.toml", "--step", "0", "--microbatch", "0"]);
    assert!(shown.starts_with("{\"step\":0,\"microbatch\":0,\"inputs\":[["), "{shown}");
    place.shoal_fails(&["init", "-o", "new.toml"], USAGE, &["new.toml exists"]);
}

#[test]
fn an_id_stays_the_same() {
    let place = Place::new();
    let first = place.shoal_prints(&["id", "--data-dir", "a"]);
    assert!(first.starts_with("12D3KooW") && first.trim().len() == 52, "{first}");
    assert_eq!(place.shoal_prints(&["id", "--data-dir", "a"]), first);
    assert_ne!(place.shoal_prints(&["id", "--data-dir", "b"]), first);
}

#[test]
fn every_command_completes() {
    let script = Place::new().shoal_prints(&["completion", "bash"]);
    for name in [
        "demo",
        "init",
        "start",
        "join",
        "local",
        "plan",
        "data",
        "checkpoint",
        "chunk",
        "generate",
        "id",
    ] {
        assert!(script.contains(name), "{name}");
    }
}

#[test]
fn every_command_has_a_man_page() {
    let place = Place::new();
    place.shoal_prints(&["man", "man1"]);
    for (page, word) in
        [("shoal.1", "simulate"), ("shoal-join.1", "drain"), ("shoal-chunk-get.1", "from")]
    {
        let text = std::fs::read_to_string(place.path("man1").join(page)).expect("a page");
        assert!(text.starts_with(".ie") && text.contains(word), "{page}: {text}");
    }
}

#[test]
fn plan_explains_a_placement_or_an_error_in_the_file() {
    let place = Place::new();
    let fleet = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/fleets/dt-fm-3.toml");
    let text = place.shoal_prints(&["plan", fleet]);
    assert!(text.contains("16.09 s of a step") && text.contains("All-reduces wait"), "{text}");
    let plans = place.shoal_prints(&["plan", fleet, "--json"]);
    let plans: Value = serde_json::from_str(&plans).expect("JSON");
    assert_eq!(plans[0]["stages"].as_array().map(Vec::len), Some(8), "{plans}");
    place.shoal_fails(&["plan", "none.toml"], USAGE, &["none.toml"]);
    place.shoal_fails(&["plan", "run.toml"], USAGE, &["run.toml is not a valid fleet"]);
}

#[test]
fn data_show_prints_tokens_and_their_successors() {
    let place = Place::new();
    let show = |step: &str, microbatch: &str| -> Value {
        let flags = ["data", "show", "run.toml", "--step", step, "--microbatch", microbatch];
        serde_json::from_str(&place.shoal_prints(&flags)).expect("JSON")
    };
    let shown = show("1", "0");
    assert_eq!((&shown["step"], &shown["microbatch"]), (&1.into(), &0.into()));
    let rows = |key: &str| -> Vec<Vec<u8>> {
        serde_json::from_value(shown[key].clone()).expect("rows of bytes")
    };
    let text = fs::read(place.path("text.txt")).expect("read");
    assert_eq!(rows("inputs").len(), 2);
    for (inputs, labels) in rows("inputs").iter().zip(rows("labels")) {
        assert_eq!(inputs.len(), 16);
        assert_eq!(inputs[1..], labels[..15]);
        assert!(text.windows(16).any(|window| window == inputs), "it is in the text");
    }
    assert_eq!(show("1", "0"), shown);
    assert_ne!(show("0", "0")["inputs"], shown["inputs"]);
    let beyond = ["data", "show", "run.toml", "--step", "1", "--microbatch", "2"];
    place.shoal_fails(&beyond, USAGE, &["no microbatch 2", "0 to 1"]);
}

#[test]
fn a_checkpoint_is_hashed_verified_and_continued() {
    let place = Place::new();
    let checkpoint = place.train();
    let folder = checkpoint.to_str().expect("text");
    let report = Report::read(&place.path("out/report.json")).expect("a report");
    assert_eq!(report.steps.len(), 2);
    let hash = place.shoal_prints(&["checkpoint", "hash", folder]);
    assert_eq!(Some(hash.trim().parse().expect("a hash")), report.checkpoint_hash);
    let verdict = place.shoal_prints(&["checkpoint", "verify", folder]);
    assert!(verdict.starts_with("whole: version 2"), "{verdict}");
    let flags = ["generate", folder, "--prompt", "All that", "--tokens", "10", "--seed", "3"];
    let text = place.shoal_prints(&flags);
    assert!(text.starts_with("All that") && text.len() > "All that\n".len(), "{text}");
    assert_eq!(place.shoal_prints(&flags), text);
}

#[test]
fn no_steps_give_the_initial_checkpoint() {
    let place = Place::new();
    place.configure(|config| config.training.steps = 0);
    let checkpoint = place.train();
    place.shoal_prints(&["checkpoint", "verify", checkpoint.to_str().expect("text")]);
    let report = Report::read(&place.path("out/report.json")).expect("a report");
    assert!(report.steps.is_empty() && report.checkpoint_hash.is_some());
}

#[test]
fn a_damaged_checkpoint_is_detected() {
    let place = Place::new();
    let checkpoint = place.train();
    let weights: Vec<PathBuf> = fs::read_dir(&checkpoint)
        .expect("a folder")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|kind| kind == "safetensors"))
        .collect();
    let file = weights.iter().min().expect("a checkpoint has weights");
    let name = file.file_name().and_then(OsStr::to_str).expect("text");
    let whole = fs::read(file).expect("read");
    let verify = ["checkpoint", "verify", "out/checkpoint"];

    fs::write(file, &whole[..whole.len() - 1]).expect("written");
    place.shoal_fails(&verify, CORRUPT, &[name]);
    let generate = ["generate", "out/checkpoint", "--prompt", "a"];
    place.shoal_fails(&generate, CORRUPT, &[name]);

    let mut flipped = whole.clone();
    *flipped.last_mut().expect("not empty") ^= 1;
    fs::write(file, flipped).expect("written");
    place.shoal_fails(&verify, CORRUPT, &[name]);

    fs::remove_file(file).expect("removed");
    place.shoal_fails(&verify, CORRUPT, &[name]);
    place.shoal_fails(&["checkpoint", "hash", "nowhere"], CORRUPT, &["nowhere"]);
}

#[test]
fn an_invalid_run_is_refused_by_every_command() {
    let place = Place::new();
    let refused = |words: &[&str]| {
        place.shoal_fails(&["local", "run.toml", "--out", "out"], USAGE, words);
        place.shoal_fails(&["start", "run.toml", "--listen", "127.0.0.1:0"], USAGE, words);
        let show = ["data", "show", "run.toml", "--step", "0", "--microbatch", "0"];
        place.shoal_fails(&show, USAGE, words);
    };
    place.configure(|config| config.training.stages = 3);
    refused(&["training.stages = 3 is more than model.layers = 2"]);
    place.configure(|config| config.optimizer.learning_rate = -1.0);
    refused(&["optimizer.learning_rate = -1 is out of range"]);
    place.configure(|_| {});
    let text = fs::read_to_string(place.path("run.toml")).expect("read");
    fs::write(place.path("run.toml"), text.replace("kind = \"adamw\"", "kind = \"lion\""))
        .expect("written");
    refused(&["run.toml:", "unknown key `epsilon`: kind = \"lion\" does not have it"]);
    place.configure(|config| config.data.path = Some("none.txt".into()));
    refused(&["none.txt", "No such file"]);
    place.configure(|_| {});
    fs::write(place.path("text.txt"), "").expect("written");
    refused(&["text.txt holds no text"]);
    fs::write(place.path("text.txt"), "too short").expect("written");
    refused(&["the text has 9 tokens"]);
    let text = fs::read_to_string(place.path("run.toml")).expect("read");
    fs::write(place.path("run.toml"), text.replace("[training]", "[training]\nstep = 1"))
        .expect("written");
    refused(&["run.toml:", "unknown key `step`"]);
    fs::remove_file(place.path("run.toml")).expect("removed");
    refused(&["run.toml", "No such file"]);
}

#[test]
fn doctor_says_what_a_machine_has_without_an_address() {
    let place = Place::new();
    let flags = ["--json", "--listen", "127.0.0.1:0", "--data-dir", "peer"];
    let printed = place.shoal_prints(&[&["doctor"], &flags[..]].concat());
    let findings: Vec<Value> = serde_json::from_str(&printed).expect("JSON");
    let says = |about: &str| {
        let finding = findings.iter().find(|finding| finding["about"] == about);
        finding.unwrap_or_else(|| panic!("nothing about {about}: {printed}"))["says"].to_string()
    };
    assert!(says("libtorch").contains("2.11.0 in /"), "{printed}");
    assert!(says("memory").contains("weights, or adapters beside"), "{printed}");
    assert!(says("disk").contains("free at peer") && says("UDP port").contains("free"));
    assert!(says("peers").contains("shoal doctor ADDRESS"), "{printed}");
}

#[test]
fn a_fine_tuning_mends_mistakes_and_keeps_its_folder() {
    let place = Place::new();
    fs::create_dir(place.path("others")).expect("room for a folder");
    fs::write(place.path("others/file"), "").expect("written");
    let finetune = ["finetune", "model", "chats.jsonl", "--out"];
    let fails = |folder, flags: &[&str], code, words: &[&str]| {
        place.shoal_fails(&[&finetune[..], &[folder], flags].concat(), code, words);
    };
    fails("run", &["--", "--nope"], USAGE, &["shoal start run/run.toml", "'--nope'"]);
    assert!(!place.path("run").exists(), "flags are read before anything is made");
    fails("others", &[], USAGE, &["has other files", "--out"]);
    fails("run", &[], USAGE, &["model"]);
    // The model was not imported, so another one may take its place.
    fails("run", &["--lora", "4"], USAGE, &["model"]);
    fs::create_dir(place.path("run/base")).expect("room for a folder");
    let other = ["finetune", "hf:a/b", "chats.jsonl", "--out", "run"];
    let before = "shoal finetune model chats.jsonl --out run --lora 4 --epochs 3";
    place.shoal_fails(&other, USAGE, &["run/base was made by", before]);
}

#[test]
fn a_port_in_use_is_named() {
    let place = Place::new();
    let udp = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    let address = udp.local_addr().expect("bound").to_string();
    place.shoal_fails(&["start", "run.toml", "--listen", &address], USAGE, &[&address]);
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = tcp.local_addr().expect("bound").to_string();
    let start = ["start", "run.toml", "--listen", "127.0.0.1:0", "--metrics", &address];
    place.shoal_fails(&start, USAGE, &[&address]);
}

#[test]
fn a_failed_join_names_its_cause() {
    let place = Place::new();
    place.shoal_fails(&join("localhost"), USAGE, &["localhost"]);

    let unused = UdpSocket::bind("127.0.0.1:0").expect("a free port").local_addr().expect("bound");
    let nobody = place.shoal_prints(&["id", "--data-dir", "nobody"]);
    let nobody = nobody.trim();
    let address = format!("/ip4/127.0.0.1/tcp/{}/p2p/{nobody}", unused.port());
    place.shoal_fails(&join(&address), NOT_ADMITTED, &[&unused.port().to_string()]);

    let first = FirstPeer::start(&place);
    let (before, _) = first.address.rsplit_once('/').expect("it ends with the peer's id");
    place.shoal_fails(&join(&format!("{before}/{nobody}")), NOT_ADMITTED, &[nobody]);
}

#[test]
fn a_data_directory_serves_one_peer() {
    let place = Place::new();
    let _first = FirstPeer::start(&place);
    let second = ["start", "run.toml", "--data-dir", "first", "--listen", "127.0.0.1:0"];
    place.shoal_fails(&second, USAGE, &["first", "in use"]);
}

#[test]
fn files_of_a_data_directory_are_listed_fetched_and_verified() {
    let place = Place::new();
    let first = FirstPeer::start(&place);
    let listed = place.shoal_prints(&["chunk", "ls", "--data-dir", "first", "--json"]);
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let text = &listed[0];
    assert_eq!((&text["kind"], &text["state"]), (&"text".into(), &"whole".into()));
    let (hash, path) = (text["hash"].as_str().expect("text"), text["path"].as_str().expect("text"));
    let path = place.path(path);
    let tokens = fs::read(&path).expect("the tokens");
    let line = place.shoal_prints(&["chunk", "ls", "--data-dir", "first"]);
    assert!(line.contains(hash) && line.contains("whole"), "{line}");
    let verify = ["chunk", "verify", "--data-dir", "first"];
    assert!(place.shoal_prints(&verify).starts_with("1 right, 0 bad"));

    let get = ["chunk", "get", hash, "--from", &first.address, "--out", "got"];
    place.shoal_prints(&get);
    assert_eq!(fs::read(place.path("got")).expect("it is there"), tokens);
    place.shoal_fails(&get, USAGE, &["got exists", "--out"]);
    let nothing = "00".repeat(32);
    let unknown = ["chunk", "get", &nothing, "--from", &first.address];
    place.shoal_fails(&unknown, 1, &["shoal chunk ls", &nothing]);

    let mut damaged = tokens;
    damaged[0] ^= 1;
    fs::write(&path, damaged).expect("written");
    place.shoal_fails(&verify, CORRUPT, &["1 of 1 files are bad", "remove"]);
    place.shoal_fails(&["chunk", "ls", "--data-dir", "none"], USAGE, &["none", "--data-dir"]);
    let nobody = first.address.clone();
    drop(first);
    let alone = ["chunk", "get", hash, "--from", &nobody, "--out", "again"];
    place.shoal_fails(&alone, NOT_ADMITTED, &["does not answer as a Shoal peer"]);
}

#[test]
fn a_killed_fetch_resumes() {
    let place = Place::new();
    fs::write(place.path("text.txt"), "All that glisters is not gold. ".repeat(2_000_000))
        .expect("written");
    let first = FirstPeer::start(&place);
    let listed = place.shoal_prints(&["chunk", "ls", "--data-dir", "first"]);
    let hash = listed.split(' ').next().expect("a hash");
    let get = ["chunk", "get", hash, "--from", &first.address, "--out", "got"];
    let mut fetching =
        command(place.0.path(), get).stdout(Stdio::null()).spawn().expect("it starts");
    while !place.path("got.part").exists() && fetching.try_wait().expect("it runs").is_none() {
        std::thread::yield_now();
    }
    fetching.kill().expect("it can be killed");
    fetching.wait().expect("it ends");
    if !place.path("got").exists() {
        place.shoal_prints(&get);
    }
    assert!(!place.path("got.part").exists());
    let text = fs::read(place.path("text.txt")).expect("read");
    assert!(fs::read(place.path("got")).expect("it is there") == text);
}

#[test]
fn an_invalid_demo_is_refused_before_it_starts() {
    let place = Place::new();
    place.shoal_fails(&["demo", "--data", "none.txt"], USAGE, &["none.txt"]);
    place.shoal_fails(&["demo", "--stages", "99"], USAGE, &["training.stages = 99"]);
    let slow = ["demo", "--peers", "2", "--slow-peer", "2=5"];
    place.shoal_fails(&slow, USAGE, &["no peer 2"]);
    place.shoal_fails(&["demo", "--out", "."], USAGE, &["not empty"]);
    fs::write(place.path("short.txt"), "too short").expect("written");
    place.shoal_fails(&["demo", "--data", "short.txt"], USAGE, &["the text has 9 tokens"]);
}

#[test]
fn a_misspelt_flag_or_key_is_told_the_one_that_is_meant() {
    let place = Place::new();
    let error = |arguments: &[&str]| {
        let output = place.shoal(arguments);
        assert_eq!(output.status.code(), Some(USAGE), "{arguments:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    assert!(error(&["start", "run.toml", "--wait-fro", "3"]).contains("'--wait-for'"));
    assert!(error(&["strat", "run.toml"]).contains("'start'"));
    let text = fs::read_to_string(place.path("run.toml")).expect("written");
    fs::write(place.path("run.toml"), text.replace("\nseed =", "\nsede =")).expect("written");
    let error = error(&["local", "run.toml", "--out", "out"]);
    assert!(error.contains("unknown key `sede`: did you mean `seed`?"), "{error}");
}

#[test]
fn a_failure_is_json_if_logs_are() {
    let place = Place::new();
    let output = Command::new(env!("CARGO_BIN_EXE_shoal"))
        .args(["--log-format", "json", "checkpoint", "hash", "nowhere"])
        .current_dir(place.0.path())
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(CORRUPT));
    let line: Value = serde_json::from_slice(&output.stderr).expect("one line of JSON");
    assert_eq!(line["level"], "ERROR");
    assert!(line["fields"]["message"].as_str().expect("text").contains("nowhere"));
}

#[test]
fn a_reader_that_leaves_early_is_no_mistake() {
    let place = Place::new();
    let arguments = ["data", "show", "run.toml", "--step", "0", "--microbatch", "0"];
    let mut child = command(place.0.path(), arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert!(!output.status.success());
}
