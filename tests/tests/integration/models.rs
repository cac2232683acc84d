//! Runs that start from imported models: through the command line, with deaths, and out again.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::python::python;
use shoal_tests::run::{Run, Trained, local};
use shoal_tests::swarm::Swarm;

/// Makes a tiny random model of a family, and imports it as `base` in the run's folder.
fn import(run: &Run, name: &str) -> PathBuf {
    let folder = run.path("models");
    fs::create_dir(&folder).expect("room for a folder");
    let script = Path::new("engine/tests/python/families.py");
    python(script, ["make".as_ref(), folder.as_os_str(), name.as_ref()]);
    let base = run.path("base");
    let model = folder.join(name);
    let arguments = ["import".as_ref(), model.as_os_str(), "-o".as_ref()];
    let command = shoal(arguments.into_iter().chain([base.as_os_str()]));
    let printed = Process::start("import", command).end().success();
    assert!(printed.contains("in 4 layers"), "{printed}");
    base
}

/// The run in `tiny.toml` with three stages and another section for the model, on chats in the model's tokens.
fn run_from(name: &str, key: &str) -> Run {
    let steps = toml::Value::from(6);
    let run = Run::tiny(&[("training.steps", steps), ("checkpoint.every", toml::Value::from(2))]);
    import(&run, name);
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let model = format!("{key} = \"base\"\ncontext = 64");
    config.insert("model".to_owned(), model.parse::<toml::Table>().expect("valid").into());
    fs::write(run.config(), config.to_string()).expect("room for a file");
    prepare(&run);
    run
}

/// Trains a run with three peers, of which one dies after this step and another takes its place.
fn with_a_death(config: &Path, step: u64) -> Trained {
    let slow = &["--slow-down", "15"];
    let mut swarm = Swarm::start(config, &[&["--wait-for", "3"], &slow[..]].concat());
    swarm.join(slow);
    swarm.join(slow);
    while swarm.peers[0].event("committed")["step"] != step {}
    swarm.peers.remove(2).kill();
    swarm.join(slow);
    swarm.finish()
}

#[test]
fn peers_get_an_imported_model_from_each_other_and_survive_a_death() {
    let run = run_from("gemma3", "from");
    let alone = run.local("alone");
    let trained = with_a_death(&run.config(), 2);
    assert_eq!(trained.hash(), alone.hash());

    let out = run.path("export");
    let checkpoint = trained.checkpoint();
    let arguments = ["export".as_ref(), checkpoint.as_os_str(), "-o".as_ref(), out.as_os_str()];
    let _ = Process::start("export", shoal(arguments)).end().success();
    let config = fs::read_to_string(out.join("config.json")).expect("exported");
    assert!(config.contains("Gemma3ForCausalLM"), "{config}");
}

#[test]
fn a_swarm_trains_a_mixture_of_experts_through_a_death() {
    for name in ["mixtral", "deepseek-v3"] {
        let run = run_from(name, "from");
        if name == "deepseek-v3" {
            // Its biases move.
            let text = fs::read_to_string(run.config()).expect("it is there");
            let (key, more) = ("[model]", "[model]\nbalance = \"bias\"\nbalance_rate = 0.01");
            fs::write(run.config(), text.replace(key, more)).expect("room for a file");
        }
        let alone = run.local("alone");
        let trained = with_a_death(&run.config(), 2);
        assert_eq!(trained.hash(), alone.hash(), "{name}");
        let mut command = shoal(["generate", "--prompt", "a", "--tokens", "4"]);
        command.arg(trained.checkpoint());
        assert!(Process::start("generate", command).end().success().starts_with('a'));
        let (checkpoint, out) = (trained.checkpoint(), run.path("export"));
        let arguments = ["export".as_ref(), checkpoint.as_os_str(), "-o".as_ref(), out.as_os_str()];
        let _ = Process::start("export", shoal(arguments)).end().success();
        let config = fs::read_to_string(out.join("config.json")).expect("exported");
        assert!(config.contains("MixtralForCausalLM") || config.contains("DeepseekV3ForCausalLM"));
        let [out, again] = [out, run.path("again")];
        let arguments = ["import".as_ref(), out.as_os_str(), "-o".as_ref(), again.as_os_str()];
        let _ = Process::start("import", shoal(arguments)).end().success();
    }
}

#[test]
fn experts_from_noise_are_a_section_of_the_run() {
    let keys =
        [("training.steps", toml::Value::from(4)), ("training.stages", toml::Value::from(2))];
    let run = Run::tiny(&keys);
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let experts = "count = 4\nper_token = 2\nintermediate = 16\ndense_layers = [0]\nshared_intermediate = 8\nbalance = \"bias\"";
    let section = experts.parse::<toml::Table>().expect("valid");
    config["model"].as_table_mut().expect("a section").insert("experts".to_owned(), section.into());
    fs::write(run.config(), config.to_string()).expect("room for a file");
    let alone = run.local("alone");
    let mut swarm = Swarm::start(&run.config(), &["--stage", "1"]);
    swarm.join(&["--stage", "0"]);
    let trained = swarm.finish();
    assert_eq!(trained.hash(), alone.hash());
    let config = fs::read_to_string(trained.checkpoint().join("config.json")).expect("written");
    assert!(config.contains("ShoalForCausalLM"), "transformers must not load it: {config}");
    let mut command = shoal(["generate", "--prompt", "a", "--tokens", "4"]);
    command.arg(trained.checkpoint());
    assert!(Process::start("generate", command).end().success().starts_with('a'));
    let text = fs::read_to_string(run.config()).expect("it is there");
    fs::write(run.config(), text.replace("per_token = 2", "per_token = 5")).expect("room");
    let mut command = shoal(["local"]);
    command.arg(run.config()).arg("--out").arg(run.path("refused"));
    let error = Process::start("local", command).end().failure(2);
    assert!(error.contains("model.experts.per_token = 5 is out of range"), "{error}");
}

/// Has a run train adapters beside its base.
fn add_adapters(run: &Run) {
    let mut text = fs::read_to_string(run.config()).expect("it is there");
    text += "\n[lora]\nrank = 2\nalpha = 8.0\ntargets = [\"q_proj\", \"down_proj\"]\n";
    fs::write(run.config(), text).expect("room for a file");
}

#[test]
fn adapters_go_on_in_other_stages_beside_the_same_base() {
    let run = run_from("gemma3", "from");
    add_adapters(&run);
    let first = run.local("first").checkpoint();
    let later = run.path("later.toml");
    let mut command = shoal(["checkpoint", "reshape", "--stages", "2", "--steps", "12"]);
    command.arg(&first).arg(run.config()).arg("-o").arg(&later);
    let printed = Process::start("reshape", command).end().success();
    assert!(printed.contains("steps 6 to 11"), "{printed}");
    let alone = local(&later, &run.path("alone"));
    assert_eq!(with_a_death(&later, 7).hash(), alone.hash());
}

#[test]
fn peers_train_adapters_beside_a_packed_base_through_a_death() {
    let run = run_from("llama", "from");
    add_adapters(&run);
    let whole = run.local("whole");
    let text = fs::read_to_string(run.config()).expect("it is there");
    fs::write(run.config(), text.clone() + "base = \"nf4\"\n").expect("room for a file");
    let alone = run.local("alone");
    assert_ne!(alone.hash(), whole.hash());
    let trained = with_a_death(&run.config(), 2);
    assert_eq!(trained.hash(), alone.hash());
    let (checkpoint, base) = (trained.checkpoint(), run.path("base"));
    let adapters = run.path("adapters");
    let mut command = shoal(["export", "--base-model", "a/model"]);
    command.arg(&checkpoint).arg("-o").arg(&adapters);
    let _ = Process::start("export", command).end().success();
    assert!(adapters.join("adapter_config.json").exists());
    // Whole models of the merged weights, and of adapters beside packed ones, say the same.
    let merged = run.path("merged");
    let mut command = shoal(["export", "--dtype", "f32", "--merge"]);
    command.arg(&base).arg(&checkpoint).arg("-o").arg(&merged);
    let _ = Process::start("export", command).end().success();
    let again = run.path("again");
    let mut command = shoal(["import"]);
    command.arg(&merged).arg("-o").arg(&again);
    let _ = Process::start("import", command).end().success();
    let generate = |model: &Path, base: Option<&Path>| {
        let mut command = shoal(["generate", "--prompt", "a b", "--tokens", "8"]);
        command.arg(model);
        if let Some(base) = base {
            command.arg("--base").arg(base);
        }
        Process::start("generate", command).end().success()
    };
    assert_eq!(generate(&checkpoint, Some(&base)), generate(&again, None));

    fs::write(run.config(), text + "base = \"nf5\"\n").expect("room for a file");
    let mut command = shoal(["local"]);
    command.arg(run.config()).arg("--out").arg(run.path("refused"));
    let error = Process::start("local", command).end().failure(2);
    assert!(
        error.contains("run.toml:") && error.contains("unknown variant `nf5`: did you mean `nf4`?"),
        "{error}"
    );
}

#[test]
fn a_base_that_an_import_packed_is_that_which_a_run_packs() {
    let run = run_from("llama", "from");
    add_adapters(&run);
    let plain = fs::read_to_string(run.config()).expect("it is there");
    fs::write(run.config(), plain.clone() + "base = \"nf4\"\n").expect("room for a file");
    let packed_by_run = run.local("whole");
    let (source, base) = (run.path("models").join("llama"), run.path("packed"));
    let mut command = shoal(["import", "--nf4", "-o"]);
    command.arg(&base).arg(source);
    let _ = Process::start("import", command).end().success();
    let text = fs::read_to_string(run.config()).expect("it is there");
    let text = text.replace("from = \"base\"", "from = \"packed\"");
    fs::write(run.config(), &text).expect("room for a file");
    let alone = run.local("alone");
    assert_eq!(alone.losses(), packed_by_run.losses());
    assert_eq!(with_a_death(&run.config(), 2).hash(), alone.hash());
    let layer = |base: &str| {
        let file = run.path(base).join("layer-00000.safetensors");
        fs::metadata(file).expect("a layer").len()
    };
    assert!(5 * layer("packed") < layer("base"), "{} of {}", layer("packed"), layer("base"));

    // Four bits are no weights to train.
    let section = text.find("[lora]").expect("it was added");
    fs::write(run.config(), &text[..section]).expect("room for a file");
    let mut command = shoal(["local"]);
    command.arg(run.config()).arg("--out").arg(run.path("refused"));
    let error = Process::start("local", command).end().failure(2);
    assert!(error.contains("packed is packed in 4 bits") && error.contains("--lora 16"), "{error}");
    let mut command = shoal(["init", "-o", "other.toml", "--from"]);
    command.arg(&base).arg("--data").arg(run.path("data"));
    let error = Process::start("init", command).end().failure(2);
    assert!(error.contains("packed is packed in 4 bits"), "{error}");
}

#[test]
fn peers_train_adapters_and_survive_a_death_with_small_checkpoints() {
    let run = run_from("gemma3", "from");
    let alone_whole = run.local("whole");
    add_adapters(&run);
    let alone = run.local("alone");
    let trained = with_a_death(&run.config(), 2);
    assert_eq!(trained.hash(), alone.hash());
    let (small, large) =
        (weights_bytes(&trained.checkpoint()), weights_bytes(&alone_whole.checkpoint()));
    assert!(small * 5 < large, "{small} and {large} bytes");

    let checkpoint = trained.checkpoint();
    let generate = |base: Option<PathBuf>| {
        let mut command = shoal(["generate", "--prompt", "a", "--tokens", "4"]);
        command.arg(&checkpoint);
        if let Some(base) = base {
            command.arg("--base").arg(base);
        }
        Process::start("generate", command).end()
    };
    let error = generate(None).failure(2);
    assert!(error.contains("name its base with --base"), "{error}");
    assert!(generate(Some(run.path("base"))).success().starts_with('a'));
    let export = |out: &str, arguments: &[&OsStr]| {
        let out = run.path(out);
        let mut command = shoal(["export"]);
        command.arg(&checkpoint).args(arguments).arg("-o").arg(&out);
        (out, Process::start("export", command).end())
    };
    let (out, ended) = export("adapter", &["--base-model".as_ref(), "a/model".as_ref()]);
    let _ = ended.success();
    assert!(out.join("adapter_config.json").exists() && !out.join("config.json").exists());
    let base = run.path("base");
    let (out, ended) = export("merged", &["--merge".as_ref(), base.as_os_str()]);
    let _ = ended.success();
    assert!(out.join("model.safetensors").exists() && out.join("config.json").exists());
}

/// Three virtual workers, which meet after every third step and send their adapters alone.
#[test]
fn workers_train_adapters_and_survive_a_death() {
    let run = run_from("gemma3", "from");
    add_adapters(&run);
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let training = config["training"].as_table_mut().expect("a section");
    training.extend([("stages".to_owned(), 1.into()), ("steps".to_owned(), 12.into())]);
    let outer = "workers = 3\nevery = 3\ncodec = \"int8\"\nmoments = \"mean\"";
    config.insert("outer".to_owned(), outer.parse::<toml::Table>().expect("valid").into());
    fs::write(run.config(), config.to_string()).expect("room for a file");
    let alone = run.local("alone");
    let trained = with_a_death(&run.config(), 1);
    assert_eq!(trained.hash(), alone.hash());
    assert_eq!(trained.losses(), alone.losses());
}

/// Bytes of a checkpoint's tensors.
fn weights_bytes(checkpoint: &Path) -> u64 {
    let files = fs::read_dir(checkpoint).expect("a folder").map(|entry| entry.expect("an entry"));
    let tensors = files.filter(|file| file.path().extension() == Some("safetensors".as_ref()));
    tensors.map(|file| file.metadata().expect("a file").len()).sum()
}

/// Chats of different lengths, in which the assistant repeats.
fn chats() -> String {
    let chat = |number: usize| {
        let word = ["fish", "shoal", "whale", "reef"][number % 4];
        let question = format!("Say {word} {} times.", number % 5 + 1);
        let answer = vec![word; number % 5 + 1].join(" ");
        let messages = json!({ "messages": [
            { "role": "user", "content": question },
            { "role": "assistant", "content": answer },
        ] });
        format!("{messages}\n")
    };
    (0..240).map(chat).collect()
}

/// Prepares the chats as `data` in the run's folder, and lets the run train on it.
fn prepare(run: &Run) {
    let source = run.path("chats.jsonl");
    fs::write(&source, chats()).expect("room for a file");
    let (base, data) = (run.path("base"), run.path("data"));
    let mut command = shoal(["data", "prepare"]);
    command.arg(&source).arg("--tokenizer").arg(&base).arg("-o").arg(&data);
    command.args(["--context", "64", "--pack", "best-fit", "--held-out", "0.1"]);
    // Several shards, so that peers fetch them while they train.
    command.args(["--shard-bytes", "4KiB"]);
    let printed = Process::start("prepare", command).end().success();
    assert!(printed.contains("240 documents"), "{printed}");
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let section = "prepared = \"data\"".parse::<toml::Table>().expect("valid");
    config.insert("data".to_owned(), section.into());
    fs::write(run.config(), config.to_string()).expect("room for a file");
}

/// A step's microbatches, as `reference.py` wants them.
fn shown(run: &Run, step: u64, microbatches: u64) -> Vec<Value> {
    let show = |microbatch: u64| {
        let mut command = shoal(["data", "show"]);
        command.arg(run.config());
        command.args(["--step", &step.to_string(), "--microbatch", &microbatch.to_string()]);
        let printed = Process::start("data show", command).end().success();
        serde_json::from_str(&printed).expect("it prints JSON")
    };
    (0..microbatches).map(show).collect()
}

/// Microbatches of each step in the comparison with PyTorch.
const MICROBATCHES: u64 = 2;

#[test]
fn a_swarm_fine_tunes_on_packed_chats_as_pytorch_does() {
    let run = run_from("qwen3", "from");
    // Each microbatch that is shown takes a process.
    let text = fs::read_to_string(run.config()).expect("it is there");
    let microbatches = format!("microbatches = {MICROBATCHES}\n");
    let fewer = text.replacen("microbatches = 6\n", &microbatches, 1);
    assert_ne!(fewer, text);
    fs::write(run.config(), fewer).expect("room for a file");
    let alone = run.local("alone");
    let trained = with_a_death(&run.config(), 1);
    assert_eq!(trained.hash(), alone.hash());
    assert!(trained.report["steps"][2]["held_out_loss"].as_f64().is_some_and(|loss| loss > 0.0));

    let text = fs::read_to_string(run.config()).expect("it is there");
    let config: toml::Table = text.parse().expect("valid TOML");
    let optimizer = config["optimizer"].as_table().expect("a section");
    let value = |name: &str| optimizer[name].as_float().expect("a number");
    let rates = [0.5, 1.0, 1.0, 0.75, 0.25, 0.0].map(|share: f64| match share {
        0.5 => value("learning_rate") / 2.0,
        share => {
            let (high, low) = (value("learning_rate"), value("final_learning_rate"));
            low + (high - low) * share
        }
    });
    let steps: Vec<Value> = (0..6)
        .map(|step| {
            let microbatches = shown(&run, step, MICROBATCHES);
            json!({ "microbatches": microbatches, "learning_rate": rates[step as usize] })
        })
        .collect();
    let mut request = json!({
        "checkpoint": run.path("models/qwen3"),
        "trained": trained.checkpoint(),
        "staleness": 0,
        "steps": steps,
    });
    for name in ["beta1", "beta2", "epsilon", "weight_decay", "gradient_clip"] {
        request[name] = value(name).into();
    }
    let path = run.path("reference.json");
    fs::write(&path, request.to_string()).expect("room for a file");
    let theirs = python(Path::new("engine/tests/python/reference.py"), [path.as_os_str()]);
    let losses: Vec<f64> = serde_json::from_value(theirs["losses"].clone()).expect("numbers");
    for (step, (ours, theirs)) in trained.losses().into_iter().zip(losses).enumerate() {
        assert!((ours - theirs).abs() < 1e-3, "step {step}: {ours} and {theirs}");
    }
    let [off, moved] = ["off", "moved"].map(|key| theirs[key].as_f64().expect("a number"));
    assert!(off < 1e-2 * moved, "the weights moved by {moved} and differ by {off}");
}

/// Serves the files of a folder over HTTP for the rest of the test; returns the address.
fn serve(folder: PathBuf) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut lines = BufReader::new(stream.try_clone().expect("a handle")).lines();
            let request = lines.next().expect("a line").expect("text");
            let _headers: Vec<_> =
                lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let path = request.split(' ').nth(1).expect("a path").trim_start_matches('/');
            let (status, body) = match fs::read(folder.join(path)) {
                Ok(body) => ("200 OK", body),
                Err(_) => ("404 Not Found", Vec::new()),
            };
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
            );
            // The client may have gone.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
        }
    });
    format!("http://{address}")
}

#[test]
fn shards_come_from_a_mirror_when_no_peer_has_them() {
    let run = run_from("qwen3", "from");
    let text = fs::read_to_string(run.config()).expect("it is there");
    fs::write(run.config(), text.replace("stages = 3", "stages = 2")).expect("room for a file");
    let alone = run.local("alone");
    let mut swarm = Swarm::start(&run.config(), &["--stage", "1"]);
    // The first peer has the folder, and cannot give what is no longer in it.
    fs::rename(run.path("data"), run.path("mirror")).expect("moved");
    let mirror = serve(run.path("mirror"));
    swarm.join(&["--stage", "0", "--mirror", "http://127.0.0.1:9/nothing", "--mirror", &mirror]);
    assert_eq!(swarm.finish().hash(), alone.hash());
}

/// The run that `shoal init` writes, with two steps and no warm-up.
fn two_steps(config: &str) -> String {
    config.replace("epochs = 3 ", "steps = 2 ").replace("warmup_steps = ", "warmup_steps = 0 # ")
}

#[test]
fn the_commands_of_a_fine_tuning_work_as_they_are() {
    let run = run_from("llama", "from");
    fs::write(run.path("chats.jsonl"), chats()).expect("room for a file");
    let (base, data, config) = (run.path("base"), run.path("plain"), run.path("tuned.toml"));
    let template = run.path("own.jinja");
    let of_base = fs::read_to_string(base.join("chat_template.jinja")).expect("it is there");
    let own = format!("{{# another #}}{of_base}");
    fs::write(&template, &own).expect("room for a file");
    let mut command = shoal(["data", "prepare"]);
    command.arg(run.path("chats.jsonl")).arg("--tokenizer").arg(&base).arg("-o").arg(&data);
    command.args(["--context", "48", "--chat-template"]).arg(&template);
    let printed = Process::start("prepare", command).end().success();
    assert!(printed.contains("240 documents"), "{printed}");
    let mut command = shoal(["init", "--from"]);
    command.arg(&base).arg("--data").arg(&data).arg("-o").arg(&config);
    let _ = Process::start("init", command).end().success();
    let text = fs::read_to_string(&config).expect("written");
    fs::write(&config, two_steps(&text)).expect("room for a file");
    let trained = shoal_tests::run::local(&config, &run.path("tuned"));
    let mut command = shoal(["generate", "--prompt", "<|im_start|>user", "--tokens", "8"]);
    command.arg(trained.checkpoint());
    assert!(Process::start("generate", command).end().success().starts_with("<|im_start|>user"));
    let exported = run.path("tuned-export");
    let mut command = shoal(["export"]);
    command.arg(trained.checkpoint()).arg("-o").arg(&exported);
    let _ = Process::start("export", command).end().success();
    let written = fs::read_to_string(exported.join("chat_template.jinja")).expect("exported");
    assert_eq!(written, own, "the model has the template that it learnt from");
    let adapted = run.path("adapted.toml");
    let mut command = shoal(["init", "--lora", "4", "--nf4", "--from"]);
    command.arg(&base).arg("--data").arg(&data).arg("-o").arg(&adapted);
    let _ = Process::start("init", command).end().success();
    let text = fs::read_to_string(&adapted).expect("written");
    assert!(text.contains("[lora]\nrank = 4\n") && text.contains("\nbase = \"nf4\"\n"), "{text}");
    fs::write(&adapted, two_steps(&text)).expect("room for a file");
    assert_eq!(shoal_tests::run::local(&adapted, &run.path("adapters")).losses().len(), 2);
    let mut command = shoal(["data", "stats"]);
    command.arg(&data);
    assert!(Process::start("stats", command).end().success().contains("held out"));
    // The bytes of a text are no tokens of the base.
    for data in [&[][..], &["--data".as_ref(), run.path("chats.jsonl").as_os_str()]] {
        let mut command = shoal(["init", "-o", "other.toml", "--from"]);
        command.arg(&base).args(data);
        let error = Process::start("init", command).end().failure(2);
        assert!(
            error.contains("run `shoal data prepare ") && error.contains("--tokenizer"),
            "{error}"
        );
    }
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let section = "path = \"chats.jsonl\"\ntokenizer = \"bytes\"".parse::<toml::Table>();
    config.insert("data".to_owned(), section.expect("valid").into());
    fs::write(run.path("raw.toml"), config.to_string()).expect("room for a file");
    let mut command = shoal(["local"]);
    command.arg(run.path("raw.toml")).arg("--out").arg(run.path("raw"));
    let error = Process::start("local", command).end().failure(2);
    assert!(error.contains("not the bytes of a text: run `shoal data prepare"), "{error}");
    let mut command = shoal(["init", "--from"]);
    command.arg(&base).args(["--data", "nowhere", "-o", "other.toml"]);
    let error = Process::start("init", command).end().failure(2);
    assert!(error.contains("nowhere does not exist: prepare it first"), "{error}");
}

#[test]
fn a_run_can_have_the_shape_of_a_model_without_its_weights() {
    let run = run_from("qwen3", "like");
    let alone = run.local("alone");
    let text = fs::read_to_string(run.config()).expect("it is there");
    fs::write(run.config(), text.replace("like = ", "from = ")).expect("room for a file");
    assert_ne!(alone.hash(), run.local("with-weights").hash());
}

#[test]
fn models_that_cannot_be_imported_are_refused_in_a_line() {
    let run = run_from("llama", "from");
    let model = run.path("models/llama");
    let refusal = |out: &str| {
        let out = run.path(out);
        let arguments = ["import".as_ref(), model.as_os_str(), "-o".as_ref(), out.as_os_str()];
        let printed = Process::start("import", shoal(arguments)).end().failure(2);
        assert!(!out.exists(), "nothing is left");
        assert_eq!(printed.trim().lines().count(), 1, "{printed}");
        printed
    };
    let config = fs::read_to_string(model.join("config.json")).expect("there");
    let with = |from: &str, to: &str| {
        assert!(config.contains(from), "{config}");
        fs::write(model.join("config.json"), config.replace(from, to)).expect("written");
    };
    with("\"llama\"", "\"deepseek_v4\"");
    assert!(refusal("one").contains("model_type = \"deepseek_v4\", which is not supported"));
    with("\"rope_type\": \"default\"", "\"rope_type\": \"proportional\"");
    assert!(refusal("two").contains("rope_parameters.rope_type = \"proportional\""));
    with("\"intermediate_size\": 48", "\"intermediate_size\": 56");
    let error = refusal("three");
    assert!(error.contains("gate_proj.weight") && error.contains("[48, 32]"), "{error}");
    with("\"attention_bias\": false", "\"attention_bias\": true");
    // A tensor that no file has is damage.
    let out = run.path("four");
    let arguments = ["import".as_ref(), model.as_os_str(), "-o".as_ref(), out.as_os_str()];
    let error = Process::start("import", shoal(arguments)).end().failure(4);
    assert!(error.contains("has the tensor model.layers.0.self_attn.q_proj.bias"), "{error}");
    fs::write(model.join("config.json"), &config).expect("written");
    let shard = fs::read_dir(&model)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .find(|path| path.to_string_lossy().ends_with(".safetensors"))
        .expect("a file of weights");
    fs::remove_file(&shard).expect("removed");
    assert!(refusal("five").contains("is missing: fetch the whole model"));
}
