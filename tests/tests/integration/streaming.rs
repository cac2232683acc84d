//! Runs on streamed data: rows are made while they are read, of files of a Hub that cuts, throttles and lies.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use shoal_tests::http::get;
use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::{prepared, root, shoal};
use shoal_tests::run::{Run, Trained, local_command, trained_by};
use shoal_tests::swarm::{Swarm, join_command, start_command};

use crate::mixtures::{VOCABULARY, base, set_data};

/// A Hub with a data set of five files.
struct Hub {
    _server: Process,
    address: String,
}

impl Hub {
    /// Serves the files in a run's folder `files`. `lies` names one that is not what the list says.
    fn start(run: &Run, lies: Option<&str>) -> Self {
        let folder = run.path("files");
        fs::create_dir_all(&folder).expect("room for a folder");
        for number in 0..5_u32 {
            let document = |line: u32| {
                let letter = char::from(b'a' + number as u8).to_string();
                json!({"text": format!("{line} {}", letter.repeat(40 + (line % 50) as usize))})
            };
            let lines: Vec<String> = (0..60).map(|line| document(line).to_string()).collect();
            let path = folder.join(format!("train-{number:05}.jsonl"));
            fs::write(path, lines.join("\n")).expect("room for a file");
        }
        let mut command = Command::new(root().join(".venv/bin/python"));
        command.arg(root().join("tests/python/hub.py")).arg(&folder);
        command.args(lies.iter().flat_map(|name| ["--lies", name]));
        let mut server = Process::start("hub", prepared(command));
        let address = server.event("listening")["address"].as_str().expect("text").to_owned();
        Self { _server: server, address }
    }

    /// Has a command use this Hub.
    fn use_in(&self, run: &Run, mut command: Command) -> Command {
        command.env("HF_ENDPOINT", format!("http://{}", self.address));
        command.env("HF_HOME", run.path("cache")).env_remove("HF_TOKEN");
        command
    }

    /// Requests so far.
    fn counts(&self) -> Value {
        let (_, body) = get(self.address.parse().expect("an address"), "/counts");
        serde_json::from_str(&body).expect("JSON")
    }

    /// Begins to stream the data set into the run's folder `data`.
    fn begin(&self, run: &Run) -> Outcome {
        let mut command = shoal(["data", "prepare", "hf:datasets/owner/name", "--stream"]);
        command.arg("--tokenizer").arg(run.path("base")).arg("-o").arg(run.path("data"));
        command.args(["--context", "32", "--held-out", "0.1"]);
        Process::start("prepare", self.use_in(run, command)).end()
    }

    fn local(&self, run: &Run) -> Trained {
        let out = run.path("alone");
        trained_by(self.use_in(run, local_command(&run.config(), &out)), &out)
    }
}

/// A run that reads about three of the five files.
fn streamed() -> Run {
    let run = Run::tiny(&[
        ("training.steps", 40.into()),
        ("training.stages", 2.into()),
        ("checkpoint.every", 10.into()),
        ("model.vocabulary", i64::from(VOCABULARY).into()),
    ]);
    base(&run.path("base"), "<eos>");
    set_data(&run, "prepared = \"data\"");
    run
}

#[test]
fn a_swarm_makes_rows_while_it_reads_them_and_survives_a_death() {
    let run = streamed();
    let hub = Hub::start(&run, None);
    let said = hub.begin(&run).success();
    assert!(said.contains("5 of 5 files"), "{said}");
    let files = |folder: &str| fs::read_dir(run.path(folder)).expect("a folder").count();
    assert_eq!(files("data/shards"), 1, "only the rows that are held out are made at first");
    let alone = hub.local(&run);

    let homes = tempfile::tempdir().expect("room for a folder");
    let start =
        start_command(&run.config(), &homes.path().join("peer-0"), &homes.path().join("out"));
    let slow = ["--slow-down", "10", "--data-cache", "1KiB"];
    let flags = [&["--wait-for", "2"], &slow[..]].concat();
    let mut swarm = Swarm::started_by(hub.use_in(&run, start), homes.path(), &flags);
    let join = |swarm: &mut Swarm| {
        let index = swarm.peers.len();
        let mut command =
            join_command(&swarm.address, &homes.path().join(format!("joined-{index}")));
        command.args(["--no-mdns", "--listen", "127.0.0.1:0"]).args(slow);
        swarm.peers.push(Process::start("joined", hub.use_in(&run, command)));
    };
    join(&mut swarm);
    swarm.reach(12);
    swarm.peers.remove(1).kill();
    join(&mut swarm);
    let trained = swarm.finish();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(hub.counts()["lists"], 1, "peers know the files from the index");
    // The first peer keeps no file, and of shards no more than those that the last steps read.
    let stream = homes.path().join("peer-0/stream");
    if stream.exists() {
        assert_eq!(fs::read_dir(stream).expect("a folder").count(), 0);
    }
    let shards = homes.path().join("peer-0/shards");
    let made = fs::read_dir(shards).into_iter().flatten().flatten();
    let made = made.filter(|entry| entry.file_name().to_string_lossy().ends_with(".shard"));
    assert!(made.count() <= 3, "a budget of three shards");
}

#[test]
fn a_file_that_is_not_the_listed_one_is_named() {
    let run = streamed();
    let hub = Hub::start(&run, Some("train-00003.jsonl"));
    let _ = hub.begin(&run).success();
    let command = hub.use_in(&run, local_command(&run.config(), &run.path("out")));
    let failure = Process::start("local", command).end().failure(1);
    assert!(failure.contains("train-00003.jsonl"), "{failure}");
    assert!(failure.contains("hash"), "{failure}");
}

#[test]
fn what_cannot_be_streamed_says_why() {
    let run = streamed();
    let hub = Hub::start(&run, None);
    let mut command = shoal(["data", "prepare", "files/train-00000.jsonl", "--stream"]);
    command.arg("--tokenizer").arg(run.path("base")).arg("-o").arg(run.path("other"));
    command.args(["--context", "32"]);
    let failure = Process::start("prepare", hub.use_in(&run, command)).end().failure(2);
    assert!(failure.contains("does not begin with `hf:`"), "{failure}");
    let _ = hub.begin(&run).success();
    let again = hub.begin(&run).failure(2);
    assert!(again.contains("holds prepared data"), "{again}");
    let mut command = shoal(["data", "show"]);
    command.arg(run.config()).args(["--step", "0", "--microbatch", "0"]);
    let failure = Process::start("show", command).end().failure(2);
    assert!(failure.contains("the data is streamed"), "{failure}");
}
