//! Rows in the spelling of ShareGPT and of Alpaca.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use shoal_data::prepared::Index;
use shoal_data::source::Format;
use shoal_data::tokenizer::TextTokenizer;
use shoal_data::{Class, PrepareError};

use crate::common::{base, options, rows, run, write};

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}";

fn prepared(folder: &Path, row: &Value, format: Format) -> Result<Index, PrepareError> {
    let base = base(folder);
    write(&base, "chat_template.jinja", TEMPLATE);
    let source = write(folder, "rows.jsonl", format!("{row}\n"));
    let out = folder.join("out");
    let _ = fs::remove_dir_all(&out);
    let mut options = options(&base, &source, 300);
    options.format = format;
    run(&options, &out)
}

/// The text of all tokens, and of the targets, of one row.
fn texts(row: &Value) -> (String, String) {
    let folder = tempfile::tempdir().expect("writable");
    let index = prepared(folder.path(), row, Format::Auto).expect("it works");
    let tokenizer = TextTokenizer::load(&folder.path().join("base")).expect("it loads");
    let rows = rows(&folder.path().join("out"), &index, &index.train);
    let tokens = || rows.iter().flat_map(|row| row.tokens.iter().zip(&row.classes));
    let text = |kept: &dyn Fn(Class) -> bool| {
        let tokens = tokens().filter(|(_, class)| kept(**class)).map(|(token, _)| *token);
        tokenizer.decode(&tokens.collect::<Vec<_>>(), false).expect("it decodes")
    };
    (text(&|class| class != Class::Padding), text(&|class| class == Class::Target))
}

fn refused(row: &Value, format: Format) -> String {
    let folder = tempfile::tempdir().expect("writable");
    let error = prepared(folder.path(), row, format).expect_err("it is refused").to_string();
    assert!(error.contains("rows.jsonl"), "{error}");
    error
}

#[test]
fn conversations_of_sharegpt_are_chats() {
    let turns = json!([
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b", "weight": 0},
        {"from": "Human", "value": "c"},
        {"from": "gpt", "value": "d", "weight": null},
    ]);
    let (all, targets) = texts(&json!({"id": "x", "conversations": turns}));
    assert_eq!(all, "<system>s<eos><user>a<eos><assistant>b<eos><user>c<eos><assistant>d<eos>");
    assert_eq!(targets, "d<eos>");
    // As a text, with a system message beside it, and in the spelling of messages.
    let turns = json!([{"from": "user", "value": "a"}, {"role": "assistant", "content": "b"}]);
    let row = json!({"conversations": turns.to_string(), "system": "s", "tools": "[]"});
    let expected = "<system>s<eos><user>a<eos><assistant>b<eos>".to_owned();
    assert_eq!(texts(&row), (expected, "b<eos>".to_owned()));
    let row = json!({"conversations": [{"from": "narrator", "value": "a"}]});
    let error = refused(&row, Format::Auto);
    assert!(error.contains("row 1: `conversations` must be of known speakers"), "{error}");
    let row = json!({"conversations": [{"value": "a"}]});
    assert!(refused(&row, Format::Auto).contains("`from` and `value`"));
    let row = json!({"conversations": [{"from": "system", "value": "a"}], "system": "b"});
    assert!(refused(&row, Format::Auto).contains("`system` must be left out"));
    let row = json!({"conversations": [{"from": "human", "value": "a"}], "images": ["x.png"]});
    assert!(refused(&row, Format::Auto).contains("`images` is not trained on"));
}

#[test]
fn instructions_of_alpaca_are_chats() {
    let row = json!({"instruction": "Add.", "input": "1 and 2", "output": "3", "text": "unused"});
    let (all, targets) = texts(&row);
    assert_eq!(all, "<user>Add.\n1 and 2<eos><assistant>3<eos>");
    assert_eq!(targets, "3<eos>");
    for input in [json!(""), json!(null)] {
        let row = json!({"instruction": "Add.", "input": input, "output": "3"});
        assert_eq!(texts(&row).0, "<user>Add.<eos><assistant>3<eos>");
    }
    let row = json!({
        "instruction": "And 3.", "output": "6", "system": "Count.", "history": [["Add 1 and 2.", "3"]],
    });
    let (all, targets) = texts(&row);
    assert_eq!(
        all,
        "<system>Count.<eos><user>Add 1 and 2.<eos><assistant>3<eos><user>And 3.<eos><assistant>6<eos>"
    );
    assert_eq!(targets, "3<eos>6<eos>");
    let row = json!({"instruction": "a", "output": "b", "history": ["c"]});
    assert!(refused(&row, Format::Auto).contains("`history` must be a list of pairs"));
    let row = json!({"instruction": "a", "output": 1});
    assert!(refused(&row, Format::Auto).contains("`output` must be a text"));
    let row = json!({"instruction": "a", "output": " "});
    let folder = tempfile::tempdir().expect("writable");
    let error = prepared(folder.path(), &row, Format::Alpaca).expect_err("nothing to learn");
    assert!(error.to_string().contains("all 1 documents are empty"), "{error}");
}
