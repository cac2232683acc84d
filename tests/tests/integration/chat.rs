//! Conversations with imported models and checkpoints, through the command line.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::json;
use shoal_tests::process::{Outcome, Process};
use shoal_tests::program::shoal;
use shoal_tests::python::python;
use shoal_tests::run::Run;

const SYSTEM: &str = "Be brief.";
/// Of an answer.
const TOKENS: &str = "10";

/// A run's folder with the tiny random model `models/qwen3`, imported as `base`.
fn imported() -> (Run, PathBuf) {
    let run = Run::of_two_stages(2, 0);
    let folder = run.path("models");
    fs::create_dir(&folder).expect("room for a folder");
    let script = Path::new("engine/tests/python/families.py");
    python(script, ["make".as_ref(), folder.as_os_str(), "qwen3".as_ref()]);
    let (model, base) = (folder.join("qwen3"), run.path("base"));
    let arguments = ["import".as_ref(), model.as_os_str(), "-o".as_ref(), base.as_os_str()];
    let _ = Process::start("import", shoal(arguments)).end().success();
    (run, base)
}

/// Runs `shoal chat` with these lines of input.
fn chat(run: &Run, folder: &Path, flags: &[&str], lines: &str) -> Outcome {
    let path = run.path("input.txt");
    fs::write(&path, lines).expect("room for a file");
    let mut command = shoal(["chat".as_ref(), folder.as_os_str()]);
    command.args(["--system", SYSTEM, "--tokens", TOKENS]).args(flags);
    command.stdin(File::open(&path).expect("just written"));
    Process::start("chat", command).end()
}

/// What the tests' processes make of lines of output.
fn lines<'a>(answers: impl IntoIterator<Item = &'a String>) -> String {
    let text: String = answers.into_iter().map(|answer| format!("{answer}\n")).collect();
    text.lines().map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_likeliest_answers_are_those_of_transformers() {
    let (run, base) = imported();
    let messages = json!(["Hi", "More"]).to_string();
    let theirs = python(
        Path::new("engine/tests/python/chat.py"),
        [run.path("models/qwen3").as_os_str(), SYSTEM.as_ref(), messages.as_ref(), TOKENS.as_ref()],
    );
    let answers: Vec<String> = serde_json::from_value(theirs["answers"].clone()).expect("texts");
    assert_ne!(answers[0], theirs["bare"], "the template decides the answer");
    assert_ne!(answers[0], answers[1], "the conversation decides the answer");

    let likeliest = ["--temperature", "0"];
    let input = "Hi\n\nMore\n/reset\nHi\n/exit\nHi\n";
    let ours = chat(&run, &base, &likeliest, input).success();
    assert_eq!(ours, lines([&answers[0], &answers[1], &answers[0]]));

    // A message that is too long is no part of the conversation.
    let ours = chat(&run, &base, &likeliest, &format!("Hi\n{}\nMore", "long ".repeat(100)));
    assert!(ours.stderr.contains("the model reads at most 128"), "{}", ours.stderr);
    assert_eq!(ours.success(), lines(&answers));
}

#[test]
fn answers_follow_from_the_seed() {
    let (run, base) = imported();
    let answers = |seed: &str| {
        let flags = ["--temperature", "1", "--top-p", "0.9", "--seed", seed];
        chat(&run, &base, &flags, "Hi\nHi\n").success()
    };
    assert_eq!(answers("1"), answers("1"));
    assert_ne!(answers("1"), answers("2"));

    let continued = |folder: &Path, tokens: &str| {
        let mut command = shoal(["generate", "--prompt", "Hi", "--temperature", "0"]);
        command.args(["--tokens", tokens]).arg(folder);
        Process::start("generate", command).end()
    };
    let whole = continued(&base, "1000");
    assert!(whole.stderr.contains("128 positions"), "{}", whole.stderr);
    let (whole, part) = (whole.success(), continued(&base, "12").success());
    assert!(whole.starts_with("Hi") && whole.len() > part.len(), "{part:?} and {whole:?}");
}

#[test]
fn a_model_without_a_chat_template_is_refused_with_advice() {
    let (run, base) = imported();
    fs::rename(base.join("chat_template.jinja"), run.path("template.jinja")).expect("moved");
    let error = chat(&run, &base, &[], "Hi\n").failure(2);
    assert!(error.contains("has no chat template") && error.contains("--chat-template"), "{error}");
    let template = run.path("template.jinja");
    let flags = ["--chat-template", template.to_str().expect("a plain path")];
    assert!(!chat(&run, &base, &flags, "Hi\n").success().is_empty());

    let trained = run.local("bytes");
    let error = chat(&run, &trained.checkpoint(), &[], "Hi\n").failure(2);
    assert!(error.contains("trained on bytes") && error.contains("shoal generate"), "{error}");
    let error = chat(&run, &run.path("models"), &[], "Hi\n").failure(2);
    assert!(error.contains("has no model"), "{error}");
}
