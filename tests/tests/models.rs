//! Runs that start from imported models: through the command line, with deaths, and out again.

use std::fs;
use std::path::{Path, PathBuf};

use shoal_tests::process::Process;
use shoal_tests::program::shoal;
use shoal_tests::python::python;
use shoal_tests::run::Run;
use shoal_tests::swarm::Swarm;

/// Makes a tiny random model of a family, and imports it untied as `base` in the run's folder.
fn import(run: &Run, name: &str) -> PathBuf {
    let folder = run.path("models");
    fs::create_dir(&folder).expect("room for a folder");
    let script = Path::new("engine/tests/python/families.py");
    python(script, ["make".as_ref(), folder.as_os_str(), name.as_ref()]);
    let base = run.path("base");
    let model = folder.join(name);
    let arguments = ["import".as_ref(), model.as_os_str(), "--untie".as_ref(), "-o".as_ref()];
    let command = shoal(arguments.into_iter().chain([base.as_os_str()]));
    let printed = Process::start("import", command).end().success();
    assert!(printed.contains("in 4 layers"), "{printed}");
    base
}

/// The run in `tiny.toml` with three stages and another section for the model.
fn run_from(name: &str, key: &str) -> Run {
    let steps = toml::Value::from(6);
    let run = Run::tiny(&[("training.steps", steps), ("checkpoint.every", toml::Value::from(2))]);
    import(&run, name);
    let text = fs::read_to_string(run.config()).expect("it is there");
    let mut config: toml::Table = text.parse().expect("valid TOML");
    let model = format!("{key} = \"base\"\ncontext = 32");
    config.insert("model".to_owned(), model.parse::<toml::Table>().expect("valid").into());
    fs::write(run.config(), config.to_string()).expect("room for a file");
    run
}

#[test]
fn peers_get_an_imported_model_from_each_other_and_survive_a_death() {
    let run = run_from("gemma3", "from");
    let alone = run.local("alone");
    let slow = &["--slow-down", "15"];
    let mut swarm = Swarm::start(&run.config(), &[&["--wait-for", "3"], &slow[..]].concat());
    swarm.join(slow);
    swarm.join(slow);
    while swarm.peers[0].event("committed")["step"] != 2 {}
    let mut victim = swarm.peers.remove(2);
    victim.kill();
    swarm.join(slow);
    let trained = swarm.finish();
    assert_eq!(trained.hash(), alone.hash());

    let out = run.path("export");
    let checkpoint = trained.checkpoint();
    let arguments = ["export".as_ref(), checkpoint.as_os_str(), "-o".as_ref(), out.as_os_str()];
    let _ = Process::start("export", shoal(arguments)).end().success();
    let config = fs::read_to_string(out.join("config.json")).expect("exported");
    assert!(config.contains("Gemma3ForCausalLM"), "{config}");
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
    with("\"llama\"", "\"mixtral\"");
    assert!(refusal("one").contains("model_type = \"mixtral\", which is not supported"));
    with("\"rope_type\": \"default\"", "\"rope_type\": \"longrope\"");
    assert!(refusal("two").contains("rope_parameters.rope_type = \"longrope\""));
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
