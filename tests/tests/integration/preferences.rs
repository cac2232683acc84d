//! Runs on pairs of completions: a base's log-probabilities, losses, deaths, and pairs that a run cannot learn from.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::python::python;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;

/// Makes a tiny random model, and imports it as `base` in the run's folder.
fn import(run: &Run) -> PathBuf {
    let folder = run.path("models");
    fs::create_dir(&folder).expect("room for a folder");
    let script = Path::new("engine/tests/python/families.py");
    python(script, ["make".as_ref(), folder.as_os_str(), "llama".as_ref()]);
    let base = run.path("base");
    let mut command = shoal(["import"]);
    command.arg(folder.join("llama")).arg("-o").arg(&base);
    let _ = Process::start("import", command).end().success();
    base
}

/// Pairs of which the chosen completion names a fish and the rejected one a plant.
fn pairs() -> String {
    let pair = |number: usize| {
        let (fish, plant) = (["cod", "tuna", "eel"][number % 3], ["fern", "moss"][number % 2]);
        let prompt = format!("Name {} of them.", number % 7);
        let message = |text: &str| json!([{ "role": "assistant", "content": text }]);
        let pair = match number % 4 {
            // Texts and chats, with and without a prompt of their own.
            0 => json!({
                "prompt": [{ "role": "user", "content": prompt }],
                "chosen": message(fish),
                "rejected": message(plant),
            }),
            _ => json!({
                "chosen": [{ "role": "user", "content": prompt }, message(fish)[0]],
                "rejected": [{ "role": "user", "content": prompt }, message(plant)[0]],
            }),
        };
        format!("{pair}\n")
    };
    (0..120).map(pair).collect()
}

fn ended(command: &[&str], paths: &[(&str, PathBuf)]) -> Outcome {
    let mut command = shoal(command);
    for (flag, path) in paths {
        if !flag.is_empty() {
            command.arg(flag);
        }
        command.arg(path);
    }
    Process::start("shoal", command).end()
}

/// Prepares the pairs as `data`.
fn prepare(run: &Run) {
    let source = run.path("pairs.jsonl");
    fs::write(&source, pairs()).expect("room for a file");
    let flags =
        ["data", "prepare", "--context", "96", "--held-out", "0.1", "--shard-bytes", "4KiB"];
    let (base, data) = (run.path("base"), run.path("data"));
    let printed = ended(&flags, &[("", source), ("--tokenizer", base), ("-o", data)]).success();
    assert!(printed.contains("rows are read as preference (chosen, rejected)"), "{printed}");
    assert!(printed.contains("shoal data reference"), "{printed}");
}

fn refer(run: &Run, out: &str) -> Outcome {
    let flags = ["data", "reference", "--dtype", "f32"];
    let paths = [("", "data"), ("--model", "base"), ("-o", out)];
    ended(&flags, &paths.map(|(flag, name)| (flag, run.path(name))))
}

/// The run in `tiny.toml` with two stages from the base, on these pairs with this loss.
fn run_on(data: &str, loss: &str, steps: i64) -> Run {
    let run = Run::tiny(&[
        ("training.steps", steps.into()),
        ("training.stages", 2.into()),
        ("checkpoint.every", 2.into()),
    ]);
    import(&run);
    prepare(&run);
    let _ = refer(&run, "referred").success();
    change(&run, |config| {
        config["data"] =
            format!("prepared = {data:?}").parse::<toml::Table>().expect("valid").into();
        let model = "from = \"base\"\ncontext = 96";
        config["model"] = model.parse::<toml::Table>().expect("valid").into();
        let training = config["training"].as_table_mut().expect("a section");
        training.insert("loss".to_owned(), loss.into());
    });
    run
}

fn change(run: &Run, change: impl FnOnce(&mut toml::Table)) {
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    change(&mut config);
    fs::write(run.config(), config.to_string()).expect("room for a file");
}

/// The last number of the steps of a report.
fn last(report: &Value, key: &str) -> f64 {
    let steps = report["steps"].as_array().expect("a list").iter().rev();
    let numbers = steps.map(|step| match key.split_once('.') {
        Some((object, key)) => step[object][key].as_f64(),
        None => step[key].as_f64(),
    });
    numbers.flatten().next().expect("a step has it")
}

#[test]
fn a_swarm_learns_preferences_beside_its_base_through_a_death() {
    let run = run_on("referred", "dpo", 12);
    let text = fs::read_to_string(run.config()).expect("it is there");
    let adapters = "\n[lora]\nrank = 4\nalpha = 16.0\n";
    fs::write(run.config(), text + adapters).expect("room for a file");
    change(&run, |config| {
        config["optimizer"]["learning_rate"] = 0.02.into();
        config["evaluation"]["every"] = 11.into();
    });
    let alone = run.local("alone");
    // Adapters begin at zero, where the policy is its reference.
    let first = alone.losses()[0];
    assert!((first - std::f64::consts::LN_2).abs() < 1e-4, "{first}");
    let report = &alone.report;
    assert!(last(report, "loss") < 0.5, "{report}");
    assert!(last(report, "preferences.accuracy") > 0.9, "{report}");
    assert!(last(report, "preferences.held_out_accuracy") > 0.9, "{report}");
    assert!(last(report, "held_out_loss") < 0.6, "{report}");

    let slow = &["--slow-down", "15"];
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "2"], &slow[..]].concat());
    swarm.join(slow);
    while swarm.peers[0].event("committed")["step"] != 3 {}
    swarm.peers.remove(1).kill();
    swarm.join(slow);
    let trained = swarm.finish();
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(last(&trained.report, "preferences.margin"), last(report, "preferences.margin"));
}

#[test]
fn losses_without_a_reference_train_all_weights_as_one_process_does() {
    for loss in ["simpo", "orpo"] {
        let run = run_on("data", loss, 6);
        let alone = run.local("alone");
        let losses = alone.losses();
        assert!(losses[5] < losses[0], "{loss}: {losses:?}");
        let mut swarm = Swarm::start(&run.config(), &["--stage", "1"]);
        swarm.join(&["--stage", "0"]);
        assert_eq!(swarm.finish().hash(), alone.hash(), "{loss}");
    }
}

#[test]
fn pairs_that_a_run_cannot_learn_from_are_refused_in_a_line() {
    let run = run_on("referred", "dpo", 2);
    let refused = |change_config: &dyn Fn(&mut toml::Table)| {
        let before = fs::read_to_string(run.config()).expect("it is there");
        change(&run, change_config);
        let paths = [("", run.config()), ("--out", run.path("refused"))];
        let error = ended(&["local"], &paths).failure(2);
        fs::write(run.config(), before).expect("room for a file");
        error
    };
    let set = |key: &'static str, value: toml::Value| {
        move |config: &mut toml::Table| {
            let training = config["training"].as_table_mut().expect("a section");
            training.insert(key.to_owned(), value.clone());
        }
    };
    let plain = |config: &mut toml::Table| config["data"]["prepared"] = "data".into();
    let error = refused(&plain);
    assert!(error.contains("run.toml:") && error.contains("shoal data reference"), "{error}");
    let error = refused(&set("beta", 0.0.into()));
    assert!(error.contains("training.beta = 0 is out of range"), "{error}");
    let error = refused(&set("gamma", 0.5.into()));
    assert!(error.contains("training.gamma = 0.5") && error.contains("simpo"), "{error}");
    let error = refused(&set("loss", "cross_entropy".into()));
    assert!(error.contains("the data holds pairs"), "{error}");
    let error = refused(&set("loss", "dop".into()));
    assert!(error.contains("unknown variant `dop`: did you mean `dpo`?"), "{error}");
    let like = |config: &mut toml::Table| {
        let model = "like = \"base\"\ncontext = 96".parse::<toml::Table>().expect("valid");
        config["model"] = model.into();
    };
    assert!(refused(&like).contains("set model.from"));

    // A base of other weights.
    let other = Run::tiny(&[]);
    let model = run.path("models/llama");
    let files =
        fs::read_dir(&model).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut weights = files.filter(|path| path.extension() == Some("safetensors".as_ref()));
    let weights = weights.next().expect("it has weights");
    let mut bytes = fs::read(&weights).expect("it is there");
    *bytes.last_mut().expect("it has bytes") ^= 1;
    fs::write(&weights, bytes).expect("room for a file");
    let _ = ended(&["import"], &[("", model), ("-o", other.path("base"))]).success();
    let another = other.path("base").to_str().expect("a plain path").to_owned();
    let error = refused(&|config| config["model"]["from"] = another.clone().into());
    assert!(error.contains("are of the base"), "{error}");
    let error = refer(&run, "referred").failure(2);
    assert!(error.contains("holds prepared data"), "{error}");

    let init = |data: &str, more: &[&str]| {
        let paths = [("--from", "base"), ("--data", data), ("-o", "new.toml")];
        let flags = [&["init", "--force"], more].concat();
        ended(&flags, &paths.map(|(flag, name)| (flag, run.path(name))))
    };
    assert!(init("data", &[]).failure(2).contains("--loss orpo or --loss simpo"));
    assert!(init("data", &["--loss", "ipo"]).failure(2).contains("shoal data reference"));
    for (data, flags, loss) in
        [("referred", &[][..], "dpo"), ("data", &["--loss", "simpo"], "simpo")]
    {
        let _ = init(data, flags).success();
        let text = fs::read_to_string(run.path("new.toml")).expect("written");
        assert!(text.contains(&format!("loss = {loss:?}")), "{text}");
    }
    let source = run.path("pairs.jsonl");
    let flags = ["data", "prepare", "--context", "96", "--pack", "best-fit"];
    let paths = [("", source), ("--tokenizer", run.path("base")), ("-o", run.path("packed"))];
    assert!(ended(&flags, &paths).failure(2).contains("leave --pack out"));
}
