//! `shoal import --check`: bases that are equal to what transformers computes, and bases that are not.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::python::python;

/// Makes a tiny random model of a family, with a tokenizer, in a folder.
fn model(folder: &Path, name: &str) -> PathBuf {
    let script = Path::new("engine/tests/python/families.py");
    python(script, ["make".as_ref(), folder.as_os_str(), name.as_ref()]);
    folder.join(name)
}

/// The Python of the tests.
fn interpreter() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/bin/python")
}

fn check<A: AsRef<OsStr>>(model: &Path, arguments: &[A]) -> Outcome {
    let mut command = shoal(["import", "--check"]);
    command.arg(model).args(arguments).env("SHOAL_PYTHON", interpreter());
    Process::start("import --check", command).end()
}

fn check_base(model: &Path, base: &Path) -> Outcome {
    check(model, &["-o".as_ref(), base.as_os_str()])
}

fn assert_equal(printed: &str, name: &str) {
    assert!(printed.contains("equal to transformers 5."), "{name}: {printed}");
    assert!(printed.contains("9 texts have the token ids of transformers"), "{name}: {printed}");
}

#[test]
fn a_base_is_equal_until_its_weights_or_the_config_of_its_model_change() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = model(folder.path(), "llama");
    let base = folder.path().join("base");
    let printed = check_base(&model, &base).success();
    assert!(printed.contains("in 4 layers"), "it was imported: {printed}");
    assert_equal(&printed, "imported");

    let copy = folder.path().join("copy");
    fs::create_dir(&copy).expect("writable");
    for entry in fs::read_dir(&model).expect("a folder") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), copy.join(entry.file_name())).expect("room for a file");
    }
    let config = fs::read_to_string(copy.join("config.json")).expect("it is there");
    let changed = config.replace("\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0.01");
    assert_ne!(changed, config);
    fs::write(copy.join("config.json"), changed).expect("writable");
    let error = check_base(&copy, &base).failure(1);
    assert!(error.contains("is not equal to transformers 5."), "{error}");

    let layer = base.join("layer-00001.safetensors");
    let mut bytes = fs::read(&layer).expect("it is there");
    let end = bytes.len();
    // The last weights of the layer, in f32.
    bytes[end - 256..].as_chunks_mut::<4>().0.fill(2f32.to_le_bytes());
    fs::write(&layer, bytes).expect("writable");
    let error = check_base(&model, &base).failure(1);
    assert!(error.contains("is not equal to transformers 5."), "{error}");
    let error = check(&base, &[""; 0]).failure(4);
    assert!(error.contains("layer-00001.safetensors is damaged: it has changed"), "{error}");
}

#[test]
fn a_model_or_a_base_alone_is_compared_and_nothing_is_kept() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = model(folder.path(), "gemma3");
    let printed = check(&model, &[""; 0]).success();
    assert_equal(&printed, "a model");
    assert!(printed.starts_with(&format!("{}: equal", model.display())), "{printed}");
    let base = folder.path().join("base");
    let arguments = ["import".as_ref(), model.as_os_str(), "-o".as_ref(), base.as_os_str()];
    let _ = Process::start("import", shoal(arguments)).end().success();
    let files = |folder: &Path| fs::read_dir(folder).expect("a folder").count();
    let before = files(&base);
    let mut named = shoal(["import", "--check", "--python"]);
    named.arg(interpreter()).arg(&base).env("SHOAL_PYTHON", "/nonexistent/python");
    assert_equal(&Process::start("import --check", named).end().success(), "a base");
    assert_eq!((files(&base), files(folder.path())), (before, 2));
}

#[test]
fn without_transformers_the_losses_of_the_tokens_are_printed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = model(folder.path(), "llama");
    let mut command = shoal(["import", "--check"]);
    command.arg(&model).env("SHOAL_PYTHON", "/nonexistent/python");
    let printed = Process::start("import --check", command).end().success();
    assert!(printed.contains("/nonexistent/python cannot be started"), "{printed}");
    assert!(printed.contains("name a Python with --python"), "{printed}");
    let after = printed.split("(mean ").nth(1).expect("a mean");
    let (mean, table) = after.split_once("):\n").expect("a table");
    let rows = table.lines().skip(1).flat_map(|line| line.trim().split("  "));
    let losses = rows.map(|pair| pair.split_once(' ').expect("an id and a loss").1);
    let losses: Vec<f64> = losses.map(|loss| loss.parse().expect("a number")).collect();
    assert_eq!(losses.len(), 64, "{printed}");
    let expected: f64 = mean.parse().expect("a number");
    assert!((losses.iter().sum::<f64>() / 64.0 - expected).abs() < 1e-3, "{printed}");
    // A random model knows next to nothing of its 300 tokens.
    assert!((expected - 300f64.ln()).abs() < 2.0, "{printed}");
    // A Python that was named must do.
    let error = check(&model, &["--python", "/nonexistent/python"]).failure(2);
    assert!(error.contains("/nonexistent/python cannot be started"), "{error}");
}

/// The script in a real Python, whose modules are stand-ins.
#[test]
fn a_python_that_cannot_compare_says_why() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = model(folder.path(), "llama");
    let modules = folder.path().join("modules");
    fs::create_dir(&modules).expect("writable");
    let error_of = |torch: &str, transformers: &str, code| {
        fs::write(modules.join("torch.py"), torch).expect("writable");
        fs::write(modules.join("transformers.py"), transformers).expect("writable");
        let mut command = shoal(["import", "--check", "--python"]);
        command.arg(interpreter()).arg(&model);
        command.env("PYTHONPATH", &modules).env("PYTHONDONTWRITEBYTECODE", "1");
        Process::start("import --check", command).end().failure(code)
    };
    let error = error_of("raise OSError('libcudart is missing')", "", 2);
    assert!(error.contains("cannot load torch: OSError: libcudart is missing"), "{error}");
    let error = error_of("", "__version__ = '4.57.1'", 2);
    assert!(error.contains("has transformers 4.57.1, and Shoal computes"), "{error}");
    let failing = |raised: &str| {
        format!(
            "__version__ = '5.0.0'\nprint('a greeting')\nclass AutoModelForCausalLM:\n    \
             def from_pretrained(*_, **__): raise {raised}\n"
        )
    };
    let torch = "float32 = None";
    let error = error_of(torch, &failing("MemoryError()"), 1);
    assert!(error.contains("has too little memory for the model"), "{error}");
    let error = error_of(torch, &failing("RuntimeError(\"can't allocate memory\")"), 1);
    assert!(error.contains("has too little memory for the model"), "{error}");
    let error = error_of(torch, &failing("KeyError('rope_type')"), 1);
    assert!(error.contains("cannot compute the model: KeyError: 'rope_type'"), "{error}");
}
