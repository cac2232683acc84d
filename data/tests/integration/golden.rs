//! Compares tokens, chats and masks with those of transformers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{self, options, rows, run, write};
use serde::de::DeserializeOwned;
use serde_json::Value;
use shoal_data::Class;
use shoal_data::document::TrainOn;
use shoal_data::pack::Packing;
use shoal_data::source::{Arguments, Messages, Object};
use shoal_data::template::{ChatTemplate, TemplateError, assistant_mask};
use shoal_data::tokenizer::TextTokenizer;

/// What a script prints; `None` without Python.
pub(crate) fn printed<T: DeserializeOwned>(script: &str, arguments: &[PathBuf]) -> Option<T> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = std::env::var_os("SHOAL_TEST_PYTHON")
        .map_or_else(|| crate_folder.join("../.venv/bin/python"), PathBuf::from);
    if !python.exists() {
        eprintln!("skipped: this test needs transformers; run scripts/setup.sh --tests");
        return None;
    }
    let output = Command::new(python)
        .arg(crate_folder.join("tests").join(script))
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("python starts");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    Some(serde_json::from_slice(&output.stdout).expect("the script prints JSON"))
}

/// Runs `golden.py`, which trains a tokenizer on this crate's own text.
fn golden(folder: &Path) -> Option<Value> {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let texts = ["src/template/mod.rs", "src/source/mod.rs", "../README.md"];
    let mut arguments = vec![folder.join("models")];
    arguments.extend(texts.map(|file| crate_folder.join(file)));
    printed("golden.py", &arguments)
}

pub(crate) fn numbers(value: &Value) -> Vec<u64> {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| number.as_u64().expect("a number")).collect()
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|id| id as u32).collect()
}

/// The messages of a chat. They are JSON within a text, so that keys keep their order.
fn messages(chat: &Value) -> Messages {
    let text = chat["messages"].as_str().expect("a text");
    let mut messages: Messages = serde_json::from_str(text).expect("JSON");
    messages.iter_mut().for_each(Object::remove_nulls);
    messages
}

fn check_tokenizer(tokenizer: &TextTokenizer, family: &Value) {
    let id = |key: &str| family[key].as_u64().map(|id| id as u32);
    assert_eq!(tokenizer.eos(), id("eos"));
    assert_eq!(tokenizer.bos(), id("bos"));
    assert_eq!(tokenizer.pad(), id("pad"));
    assert_eq!(Some(tokenizer.vocabulary()), id("vocabulary"));
    assert_eq!(tokenizer.adds_bos(), id("bos").is_some());
    for text in family["texts"].as_array().expect("a list") {
        let content = text["text"].as_str().expect("a text");
        assert_eq!(tokenizer.encode(content, true).expect("it encodes"), ids(&text["ids"]));
        let encoded = tokenizer.encode_with_offsets(content, false).expect("it encodes");
        assert_eq!(encoded.tokens, ids(&text["plain"]));
        assert_eq!(encoded.tokens, tokenizer.encode(content, false).expect("it encodes"));
        let offsets = text["offsets"].as_array().expect("a list").iter().map(|pair| {
            let pair = numbers(pair);
            (pair[0] as usize, pair[1] as usize)
        });
        assert_eq!(encoded.offsets, offsets.collect::<Vec<_>>());
        let decoded = tokenizer.decode(&ids(&text["ids"]), false).expect("it decodes");
        assert_eq!(decoded, text["decoded"].as_str().expect("a text"));
    }
}

fn check_chats(name: &str, tokenizer: &TextTokenizer, template: &ChatTemplate, family: &Value) {
    let mut targets = 0;
    for chat in family["chats"].as_array().expect("a list") {
        let rendered =
            template.render_masked(&messages(chat), &shoal_data::source::Arguments::default());
        if let Some(error) = chat["error"].as_str() {
            let Err(TemplateError::Render(found)) = rendered else {
                panic!("{name}: {rendered:?} instead of {error}");
            };
            assert!(found.contains(error), "{name}: {found} instead of {error}");
            continue;
        }
        let rendered = rendered.expect("it renders");
        assert_eq!(rendered.text, chat["text"].as_str().expect("a text"), "{name}");
        let encoded = tokenizer.encode_with_offsets(&rendered.text, false).expect("it encodes");
        assert_eq!(encoded.tokens, ids(&chat["ids"]), "{name}");
        let mask = assistant_mask(&encoded, &rendered.generated);
        let mask: Vec<_> = mask.into_iter().map(u64::from).collect();
        assert_eq!(mask, numbers(&chat["mask"]), "{name}: {}", rendered.text);
        targets += mask.iter().sum::<u64>();
    }
    assert!(targets > 0);
}

/// Prepares the chats with one row for each, and compares the rows.
fn check_prepared(name: &str, folder: &Path, base: &Path, family: &Value) {
    let chats: Vec<_> = family["chats"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|chat| chat["error"].is_null())
        .collect();
    let lines = chats.iter().map(|chat| {
        let messages = chat["messages"].as_str().expect("a text");
        format!("{{\"messages\": {messages}}}\n")
    });
    let source = write(folder, &format!("{name}.jsonl"), lines.collect::<String>());
    for train_on in [TrainOn::Responses, TrainOn::All] {
        let mut options = options(base, &source, 1500);
        options.pack = Packing::BestFit;
        options.train_on = train_on;
        let out = folder.join(format!("{name}-{train_on}"));
        let index = run(&options, &out).expect("it works");
        let mut found = Vec::new();
        for row in rows(&out, &index, &index.train) {
            let tokens = row.tokens.iter().zip(&row.classes);
            for (token, class) in tokens.filter(|(_, class)| **class != Class::Padding) {
                if *class == Class::First {
                    found.push((Vec::new(), Vec::new()));
                }
                let document = found.last_mut().expect("a row begins with a document");
                document.0.push(*token);
                document.1.push(*class == Class::Target);
            }
        }
        let mut expected: Vec<_> = chats
            .iter()
            .map(|chat| {
                let mask = numbers(&chat["mask"]).into_iter();
                let all = train_on == TrainOn::All;
                let mut mask: Vec<bool> = mask.map(|bit| all || bit == 1).collect();
                mask[0] = false;
                (ids(&chat["ids"]), mask)
            })
            .collect();
        expected.sort();
        found.sort();
        assert_eq!(found, expected, "{name}");
    }
}

/// Prepares the texts, and compares the stream.
fn check_texts(name: &str, folder: &Path, base: &Path, family: &Value) {
    let texts = family["texts"].as_array().expect("a list").iter();
    let texts: Vec<_> = texts.filter(|text| text["text"] != "").collect();
    let content = texts.iter().map(|text| text["text"].as_str().expect("a text"));
    let source = write(folder, &format!("{name}-texts.jsonl"), common::texts(content));
    let out = folder.join(format!("{name}-texts"));
    let index = run(&options(base, &source, 10), &out).expect("it works");
    let mut expected = Vec::new();
    for text in texts {
        expected.extend(ids(&text["ids"]));
        // A text that has the end itself ends once.
        let eos = family["eos"].as_u64().expect("a number") as u32;
        if expected.last() != Some(&eos) {
            expected.push(eos);
        }
    }
    let rows = rows(&out, &index, &index.train);
    let labels = rows.iter().flat_map(|row| row.tokens.iter().zip(&row.classes).skip(1));
    let labels = labels.filter(|(_, class)| **class != Class::Padding).map(|(token, _)| *token);
    assert_eq!(labels.collect::<Vec<_>>(), expected[1..], "{name}");
}

#[test]
fn tokens_chats_and_masks_are_those_of_transformers() {
    let folder = tempfile::tempdir().expect("writable");
    let Some(golden) = golden(folder.path()) else { return };
    for (name, family) in golden.as_object().expect("an object") {
        let base = PathBuf::from(family["folder"].as_str().expect("a path"));
        let tokenizer = TextTokenizer::load(&base).expect("it loads");
        check_tokenizer(&tokenizer, family);
        let source = ChatTemplate::find(&base, None).expect("there is one");
        let template = ChatTemplate::new(&source, tokenizer.special(), None).expect("valid");
        check_chats(name, &tokenizer, &template, family);
        check_prepared(name, folder.path(), &base, family);
        check_texts(name, folder.path(), &base, family);
    }
}

/// A setting of a walk.
fn setting(name: &str, default: &str) -> PathBuf {
    std::env::var(name).unwrap_or_else(|_| default.to_owned()).into()
}

/// Random chat templates: `SHOAL_TEMPLATES` of them, those of `SHOAL_SEED`. Each text is Jinja2's, or the template is refused.
#[test]
fn random_templates_are_those_of_python() {
    #[derive(serde::Deserialize)]
    struct Case {
        messages: Messages,
        source: String,
        text: Option<String>,
    }
    let arguments = [setting("SHOAL_SEED", "1"), setting("SHOAL_TEMPLATES", "1000")];
    let Some(cases) = printed::<Vec<Case>>("template_walk.py", &arguments) else { return };
    let special = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let special = special.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
    let (mut differ, mut equal, mut refused) = (Vec::new(), 0, BTreeMap::<String, usize>::new());
    for (number, Case { messages, source, text }) in cases.iter().enumerate() {
        let template = ChatTemplate::new(source, &special, None);
        let found = template.and_then(|it| it.render(messages, &Arguments::default()));
        match (found, text) {
            (Ok(found), Some(text)) if found == *text => equal += 1,
            // A template that Jinja2 refuses was never in use.
            (_, None) => {}
            (Err(error), Some(_)) => {
                let reason = error.to_string();
                let reason = reason.split(" (line ").next().expect("the first part").to_owned();
                *refused.entry(reason).or_default() += 1;
            }
            (found, text) => {
                differ.push(format!("{number}: {source}\n== here   {found:?}\n== Python {text:?}"));
            }
        }
    }
    println!("{equal} of {} are equal; refused:", cases.len());
    refused.iter().for_each(|(reason, count)| println!("{count} times: {reason}"));
    assert!(differ.is_empty(), "{} differ:\n{}", differ.len(), differ.join("\n"));
    assert!(equal * 10 > cases.len() * 8, "more than a fifth is refused");
}

/// Random added tokens, flags and classes: `SHOAL_TOKENIZERS` of them, those of `SHOAL_SEED`.
#[test]
fn random_tokenizers_are_those_of_transformers() {
    let folder = tempfile::tempdir().expect("writable");
    let (seed, count) = (setting("SHOAL_SEED", "1"), setting("SHOAL_TOKENIZERS", "40"));
    let arguments = [folder.path().to_owned(), seed, count];
    let Some(found) = printed::<Vec<Value>>("tokenizer_walk.py", &arguments) else { return };
    let mut differ = Vec::new();
    for (number, one) in found.iter().enumerate() {
        let place = folder.path().join(number.to_string());
        let tokenizer = TextTokenizer::load(&place).unwrap_or_else(|e| panic!("{number}: {e}"));
        let texts = one["texts"].as_array().expect("a list").iter();
        let mut is_same = tokenizer.eos().map(u64::from) == one["eos"].as_u64();
        for (text, expected) in texts.zip(one["ids"].as_array().expect("a list")) {
            let text = text.as_str().expect("a text");
            let own = |special| tokenizer.encode(text, special).expect("it encodes");
            is_same &= own(true) == ids(&expected[0]) && own(false) == ids(&expected[1]);
        }
        if !is_same {
            differ.push(format!("{number}: {}", one["about"]));
        }
    }
    assert!(differ.is_empty(), "{} differ:\n{}", differ.len(), differ.join("\n"));
}
