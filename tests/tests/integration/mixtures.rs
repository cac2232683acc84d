//! Runs on several prepared data sets: weights, phases, deaths, and sets that do not go together.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;

/// Tokens of the tokenizer below, its end of documents included.
pub(crate) const VOCABULARY: u32 = 300;

/// GPT-2's character for a byte.
fn printable(byte: u8) -> char {
    let own = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if own(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !own(*other)).count();
    char::from_u32(0x100 + before as u32).expect("at most U+0143")
}

/// Writes a model's folder with a tokenizer whose token `b` is the byte `b`, whose end token has a name.
pub(crate) fn base(folder: &Path, end: &str) {
    fs::create_dir_all(folder).expect("room for a folder");
    let vocabulary: BTreeMap<String, u8> =
        (0..=u8::MAX).map(|byte| (printable(byte).to_string(), byte)).collect();
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let eos = json!({
        "id": 256, "content": end, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [eos],
        "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocabulary, "merges": [],
        },
    });
    let write = |name: &str, content: &Value| {
        fs::write(folder.join(name), content.to_string()).expect("room for a file");
    };
    write("tokenizer.json", &tokenizer);
    write("config.json", &json!({"vocab_size": VOCABULARY}));
    write("tokenizer_config.json", &json!({"eos_token": end}));
}

/// Prepares documents of one letter as a data set with this name.
fn prepare(run: &Run, name: &str, letter: &str, (base, context): (&str, &str)) {
    let document = |length: usize| json!({"text": letter.repeat(20 + length % 90)}).to_string();
    let lines: Vec<String> = (0..150).map(document).collect();
    let source = run.path(&format!("{name}.jsonl"));
    fs::write(&source, lines.join("\n")).expect("room for a file");
    let mut command = shoal(["data", "prepare"]);
    command.arg(&source).arg("--tokenizer").arg(run.path(base)).arg("-o").arg(run.path(name));
    // Several shards, so that peers fetch them while they train.
    command.args(["--context", context, "--held-out", "0.1", "--shard-bytes", "2KiB"]);
    let _ = Process::start("prepare", command).end().success();
}

/// The run in `tiny.toml` on two data sets, of which the one of `b` alone is read from step 4 on.
fn mixed(weights: [f64; 2]) -> Run {
    let run = Run::tiny(&[
        ("training.steps", 8.into()),
        ("training.stages", 2.into()),
        ("checkpoint.every", 2.into()),
        ("model.vocabulary", i64::from(VOCABULARY).into()),
    ]);
    base(&run.path("base"), "<eos>");
    prepare(&run, "web", "a", ("base", "32"));
    prepare(&run, "code", "b", ("base", "32"));
    let [web, code] = weights;
    set_data(
        &run,
        &format!(
            "sources = [{{ prepared = \"web\", weight = {web} }}, {{ name = \"bees\", prepared = \"code\", weight = \
             {code} }}]\nphases = [{{ from = 4, weights = {{ bees = 2 }} }}]"
        ),
    );
    run
}

pub(crate) fn set_data(run: &Run, section: &str) {
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let section: toml::Table = section.parse().expect("valid TOML");
    config.insert("data".to_owned(), section.into());
    fs::write(run.config(), config.to_string()).expect("room for a file");
}

/// The letters in the inputs of a microbatch.
fn letters(run: &Run, step: u64, microbatch: u64) -> Vec<char> {
    let mut command = shoal(["data", "show"]);
    command.arg(run.config());
    command.args(["--step", &step.to_string(), "--microbatch", &microbatch.to_string()]);
    let printed = Process::start("data show", command).end().success();
    let shown: Value = serde_json::from_str(&printed).expect("it prints JSON");
    let inputs = shown["inputs"].as_array().expect("a list");
    let letter = |row: &Value| {
        let mut tokens = row.as_array().expect("a list").iter().filter_map(Value::as_u64);
        let letter = tokens.find(|token| *token < 256).expect("a letter");
        char::from(u8::try_from(letter).expect("a byte"))
    };
    inputs.iter().map(letter).collect()
}

#[test]
fn a_swarm_draws_as_one_process_does_and_survives_a_death() {
    let run = mixed([0.6, 0.4]);
    let alone = run.local("alone");
    let slow = &["--slow-down", "15"];
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "2"], &slow[..]].concat());
    swarm.join(slow);
    while swarm.peers[0].event("committed")["step"] != 3 {}
    swarm.peers.remove(1).kill();
    swarm.join(slow);
    assert_eq!(swarm.finish().hash(), alone.hash());
}

#[test]
fn rows_come_from_the_sources_of_their_phase() {
    let run = mixed([1.0, 0.0]);
    for (step, letter) in [(0, 'a'), (3, 'a'), (4, 'b')] {
        for microbatch in [0, 5] {
            assert_eq!(letters(&run, step, microbatch), [letter; 2], "{step} {microbatch}");
        }
    }
    // Evaluations read by the weights of the first phase.
    assert_eq!(letters(&run, 4, 6), ['a'; 2]);
    let mut command = shoal(["data", "stats"]);
    command.arg(run.config());
    let printed = Process::start("stats", command).end().success();
    assert!(printed.contains("source web: 50.0 % of the samples; 48 samples of"), "{printed}");
    assert!(printed.contains("source bees: 50.0 % of the samples; 48 samples of"), "{printed}");
}

#[test]
fn init_mixes_data_sets_and_refuses_those_that_do_not_go_together() {
    let run = mixed([0.5, 0.5]);
    base(&run.path("other"), "<end>");
    prepare(&run, "foreign", "c", ("other", "32"));
    prepare(&run, "longer", "d", ("base", "40"));
    let init = |sources: &[&str]| {
        let mut command = shoal(["init", "--epochs", "2", "-o"]);
        command.arg(run.path("mixed.toml")).arg("--data");
        command.args(sources.iter().map(|source| run.path(source)));
        Process::start("init", command).end()
    };
    for (sources, words) in [
        (&["web=0.7", "code"][..], "code has no weight"),
        (&["web=0.7", "code=lots"], "\"lots\" is no weight"),
        (&["web=0.7", "code=-1"], "the weight -1 of \"code\" is out of range"),
        (&["web=0.7", "web=0.3"], "has the name \"web\" twice"),
        (&["web=0.7", "nowhere=0.3"], "nowhere/index.json: No such file"),
        (&["web=0.7", "longer=0.3"], "context = 32 in \"web\" and 40 in \"longer\""),
        (&["web=0.7", "foreign=0.3"], "do not go together: tokenizer = "),
    ] {
        let error = init(sources).failure(2);
        assert!(error.contains(words), "{sources:?}: {error}");
        assert!(!run.path("mixed.toml").exists(), "nothing is written");
    }
    let printed = init(&["web=0.75", "code=0.25"]).success();
    assert!(printed.contains("source web: 75.0 % of the samples"), "{printed}");
    let text = fs::read_to_string(run.path("mixed.toml")).expect("written");
    assert!(text.contains("{ name = \"web\", prepared = ") && text.contains("weight = 0.75"));
    let mut command = shoal(["data", "show", "--step", "0", "--microbatch", "0"]);
    command.arg(run.path("mixed.toml"));
    let _ = Process::start("data show", command).end().success();

    let sources =
        "sources = [{ prepared = \"web\", weight = 1 }, { prepared = \"code\", weight = 1 }]";
    for (section, words) in [
        (
            "prepared = \"web\"\nphases = [{ from = 2, weights = { web = 1 } }]",
            "give sources instead of prepared",
        ),
        (&format!("{sources}\nprepared = \"web\""), "data.sources excludes data.prepared"),
        (
            &format!("{sources}\nphases = [{{ from = 2, weights = {{ wbe = 1 }} }}]"),
            "a weight of \"wbe\", and the sources are web, code",
        ),
        (
            &format!("{sources}\nphases = [{{ from = 80, weights = {{ web = 1 }} }}]"),
            "from = 80, and the run ends at step 8",
        ),
        (
            &format!("{sources}\nphases = [{{ from = 2, weights = {{ web = 0 }} }}]"),
            "gives every source weight 0",
        ),
    ] {
        set_data(&run, section);
        let mut command = shoal(["local"]);
        command.arg(run.config()).arg("--out").arg(run.path("refused"));
        let error = Process::start("local", command).end().failure(2);
        assert!(error.contains("run.toml:") && error.contains(words), "{section}: {error}");
    }
    // One source is what it is without a mixture.
    let run_of = |section: &str| {
        set_data(&run, section);
        run.local("single").report["run_hash"].clone()
    };
    assert_eq!(
        run_of("sources = [{ prepared = \"web\", weight = 3 }]"),
        run_of("prepared = \"web\"")
    );
}
