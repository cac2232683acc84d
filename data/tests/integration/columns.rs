//! No column and no key of a row is left out in silence.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use shoal_data::prepared::Index;
use shoal_data::source::Split;
use shoal_data::tokenizer::TextTokenizer;
use shoal_data::{Class, PrepareError, PrepareOptions};

use crate::common::{base, options, rows, run, write};

/// Prepares rows, in a row of tokens of 200.
fn prepared(folder: &Path, found: &[Value], template: &str) -> Result<Index, PrepareError> {
    let base = base(folder);
    write(&base, "chat_template.jinja", template);
    let lines: String = found.iter().map(|row| format!("{row}\n")).collect();
    let source = write(folder, "rows.jsonl", lines);
    let out = folder.join("out");
    let _ = fs::remove_dir_all(&out);
    run(&options(&base, &source, 200), &out)
}

/// The text of all tokens, and of the targets.
fn texts_of(folder: &Path, index: &Index) -> (String, String) {
    let tokenizer = TextTokenizer::load(&folder.join("base")).expect("it loads");
    let rows = rows(&folder.join("out"), index, &index.train);
    let tokens = || rows.iter().flat_map(|row| row.tokens.iter().zip(&row.classes));
    let text = |kept: &dyn Fn(Class) -> bool| {
        let tokens = tokens().filter(|(_, class)| kept(**class)).map(|(token, _)| *token);
        tokenizer.decode(&tokens.collect::<Vec<_>>(), false).expect("it decodes")
    };
    (text(&|class| class != Class::Padding), text(&|class| class == Class::Target))
}

const TEMPLATE: &str = "{% if tools %}{{ tools[0].name }}:{% endif %}{% if quiet is defined %}q{{ quiet }}{% endif %}\
{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\
<eos>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";

fn chat(answers: &[Value]) -> Value {
    let mut messages = Vec::new();
    for (number, answer) in answers.iter().enumerate() {
        messages.push(json!({"role": "user", "content": format!("q{number}")}));
        messages.push(answer.clone());
    }
    json!({ "messages": messages })
}

fn answer(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

#[test]
fn tools_and_arguments_reach_the_template() {
    let folder = tempfile::tempdir().expect("writable");
    for tools in [json!([{"name": "tide"}]), json!("[{\"name\": \"tide\"}]")] {
        let mut row = chat(&[answer("a")]);
        row["tools"] = tools;
        row["chat_template_kwargs"] = json!({"quiet": true});
        let index = prepared(folder.path(), &[row], TEMPLATE).expect("it works");
        let (all, targets) = texts_of(folder.path(), &index);
        assert_eq!(all, "tide:qTrue<user>q0<assistant>a<eos>");
        assert_eq!(targets, "a<eos>");
    }
    let prompt = json!([{"role": "user", "content": "q"}]);
    let row = json!({"prompt": prompt, "completion": [answer("a")], "tools": [{"name": "x"}]});
    let index = prepared(folder.path(), &[row], TEMPLATE).expect("it works");
    assert_eq!(texts_of(folder.path(), &index).0, "x:<user>q<assistant>a<eos>");
}

#[test]
fn weights_of_answers_are_used_or_refused() {
    let folder = tempfile::tempdir().expect("writable");
    let weighted = |key: &str, value: Value| {
        let mut first = answer("no");
        first[key] = value;
        let row = chat(&[first, answer("yes")]);
        prepared(folder.path(), &[row], TEMPLATE)
    };
    for (key, value) in [("weight", json!(0)), ("train", json!(false)), ("weight", json!(0.0))] {
        let index = weighted(key, value).expect("it works");
        assert_eq!(texts_of(folder.path(), &index).1, "yes<eos>");
    }
    let index = weighted("weight", json!(1)).expect("it works");
    assert_eq!(texts_of(folder.path(), &index).1, "no<eos>yes<eos>");
    let error = weighted("weight", json!(0.5)).expect_err("no such weight").to_string();
    assert!(error.contains("row 1: message 2 has weight = 0.5"), "{error}");
    let row = json!({"messages": [{"role": "user", "content": "q", "weight": 1}, answer("a")]});
    let error = prepared(folder.path(), &[row], TEMPLATE).expect_err("of a user").to_string();
    assert!(error.contains("message 1 has weight = 1"), "{error}");
}

#[test]
fn columns_that_are_not_trained_on_are_named() {
    let folder = tempfile::tempdir().expect("writable");
    let mut row = chat(&[answer("a")]);
    row["images"] = json!([]);
    prepared(folder.path(), std::slice::from_ref(&row), TEMPLATE).expect("there are none");
    row["images"] = json!(["a.png"]);
    let error = prepared(folder.path(), &[row], TEMPLATE).expect_err("refused").to_string();
    assert!(error.contains("rows.jsonl, row 1: `images` is not trained on"), "{error}");
}

#[test]
fn lists_are_read_in_every_form() {
    let folder = tempfile::tempdir().expect("writable");
    let plain = chat(&[answer("a")]);
    let text = json!({"messages": plain["messages"].to_string()});
    let columns = json!({"messages": {"role": ["user", "assistant"], "content": ["q0", "a"]}});
    for row in [plain, text, columns] {
        let index = prepared(folder.path(), &[row], TEMPLATE).expect("it works");
        assert_eq!(texts_of(folder.path(), &index).0, "<user>q0<assistant>a<eos>");
    }
    let uneven = json!({"messages": {"role": ["user", "assistant"], "content": ["q0"]}});
    assert!(prepared(folder.path(), &[uneven], TEMPLATE).is_err());
}

#[test]
fn chats_without_a_target_are_counted_and_their_roles_named() {
    let folder = tempfile::tempdir().expect("writable");
    let foreign = json!({"messages": [
        {"role": "human", "content": "q"}, {"role": "gpt", "content": "a"},
    ]});
    let both = [foreign.clone(), chat(&[answer("a")])];
    let index = prepared(folder.path(), &both, TEMPLATE).expect("one has a target");
    assert_eq!((index.documents.train, index.documents.without_target), (2, 1));
    let error = prepared(folder.path(), &[foreign], TEMPLATE).expect_err("none has").to_string();
    assert!(error.contains("the chats have the roles gpt, human"), "{error}");
}

#[test]
fn a_text_begins_and_ends_once() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    write(&base, "tokenizer.json", crate::common::tokenizer_json(true).to_string());
    for text in ["ab", "<bos>ab", "ab<eos>", "<bos>ab<eos>"] {
        for row in [json!({ "text": text }), json!({"prompt": "", "completion": text})] {
            let source = write(folder.path(), "rows.jsonl", format!("{row}\n"));
            let out = folder.path().join("out");
            let _ = fs::remove_dir_all(&out);
            let index = run(&options(&base, &source, 20), &out).expect("it works");
            assert_eq!(texts_of(folder.path(), &index).0, "<bos>ab<eos>", "{row}");
        }
    }
}

#[test]
fn of_a_folder_with_splits_train_is_taken() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    for split in ["train", "validation", "test"] {
        let name = format!("set/data/{split}-00000-of-00001.jsonl");
        write(folder.path(), &name, crate::common::texts([split]));
    }
    let source = folder.path().join("set").to_str().expect("UTF-8").to_owned();
    let out = folder.path().join("out");
    let documents = |split| {
        let _ = fs::remove_dir_all(&out);
        let options = PrepareOptions { split, ..options(&base, &source, 20) };
        let index = run(&options, &out).expect("it works");
        (index.documents.train, texts_of(folder.path(), &index).0)
    };
    assert_eq!(documents(None), (1, "train<eos>".to_owned()));
    assert_eq!(documents(Some(Split::Test)), (1, "test<eos>".to_owned()));
    assert_eq!(documents(Some(Split::All)).0, 3);
    fs::remove_file(folder.path().join("set/data/test-00000-of-00001.jsonl")).expect("there");
    let options = PrepareOptions { split: Some(Split::Test), ..options(&base, &source, 20) };
    let _ = fs::remove_dir_all(&out);
    let error = run(&options, &out).expect_err("no such split").to_string();
    assert!(error.contains("has no split test, but train, validation"), "{error}");
}

#[test]
fn what_python_writes_is_read_where_it_does_not_count() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let prepare = |lines: &str| {
        let source = write(folder.path(), "rows.jsonl", lines);
        let out = folder.path().join("out");
        let _ = fs::remove_dir_all(&out);
        run(&options(&base, &source, 20), &out).map_err(|error| error.to_string())
    };
    let index = prepare("{\"text\": \"ab\", \"score\": NaN, \"n\": 1e999}\n").expect("it is read");
    assert_eq!(texts_of(folder.path(), &index).0, "ab<eos>");
    prepare("{\"text\": \"ab\", \"id\": \"cut \\ud83d\"}\n").expect("it does not count");
    let error = prepare("{\"text\": \"cut \\ud83d\"}\n").expect_err("no text");
    assert!(error.contains("line 1: half a surrogate pair"), "{error}");
    let error = prepare("{\"text\": NaN}\n").expect_err("no text");
    assert!(error.contains("row 1: no `text`"), "{error}");
}

/// Masks of a template without tags: the turns of the assistant.
#[test]
fn answers_are_targets_without_generation_tags() {
    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}";
    let folder = tempfile::tempdir().expect("writable");
    let row = chat(&[answer("no"), answer("yes")]);
    let index = prepared(folder.path(), &[row], PLAIN).expect("it works");
    let (all, targets) = texts_of(folder.path(), &index);
    assert_eq!(all, "<user>q0<eos><assistant>no<eos><user>q1<eos><assistant>yes<eos>");
    assert_eq!(targets, "no<eos>yes<eos>");
    let mut first = answer("no");
    first["weight"] = json!(0);
    let row = chat(&[first, answer("yes")]);
    let index = prepared(folder.path(), &[row], PLAIN).expect("it works");
    assert_eq!(texts_of(folder.path(), &index).1, "yes<eos>");
    // Without the prompt for an answer, the header would be trained on.
    let no_prompt = PLAIN.split("{% if add").next().expect("a text");
    let row = chat(&[answer("yes")]);
    let error = prepared(folder.path(), &[row], no_prompt).expect_err("no header").to_string();
    assert!(error.contains("row 1") && error.contains("message 2"), "{error}");
    assert!(error.contains("no add_generation_prompt"), "{error}");
    // The answer looks otherwise as soon as another message follows.
    let changing = PLAIN.replace("{{ m.content }}", "{{ loop.length }}{{ m.content }}");
    let row = chat(&[answer("no"), answer("yes")]);
    let error = prepared(folder.path(), &[row], &changing).expect_err("it changes").to_string();
    assert!(error.contains("renders the messages before it otherwise"), "{error}");
}
