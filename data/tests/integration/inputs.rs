//! Bad inputs: each is an error that names its place.

use std::fs;
use std::path::Path;

use crate::common::{EOS, base, options, rows, run, texts, write};
use serde_json::json;
use shoal_data::Class;
use shoal_data::document::TrainOn;
use shoal_data::prepared::Index;
use shoal_data::source::Format;

/// The message of the error of a source.
fn refusal(folder: &Path, name: &str, content: impl AsRef<[u8]>) -> String {
    let base = base(folder);
    let source = write(folder, name, content);
    let _ = fs::remove_dir_all(folder.join("out"));
    let mut options = options(&base, &source, 4);
    options.line_bytes = 100;
    run(&options, &folder.join("out")).expect_err("it is refused").to_string()
}

#[test]
fn bad_rows_are_named_by_file_and_line() {
    let folder = tempfile::tempdir().expect("writable");
    let good = "{\"text\": \"a\"}\n";
    let cases = [
        ("no-json.jsonl", format!("{good}\n{good}{{\"text\": \n"), "no-json.jsonl, line 4:"),
        ("list.jsonl", format!("{good}[1]\n"), "list.jsonl, line 2:"),
        ("no-key.jsonl", format!("{good}{{\"body\": \"a\"}}\n"), "no-key.jsonl, row 2: no `text`"),
        ("type.jsonl", format!("{good}{{\"text\": 7}}\n"), "row 2: `text` must be a text"),
        ("null.jsonl", format!("{good}{{\"text\": null}}\n"), "row 2: no `text`"),
        (
            "keys.jsonl",
            "{\"b\": 1, \"a\": 2}\n".to_owned(),
            "keys.jsonl: its first row has the keys a, b",
        ),
        (
            "long.jsonl",
            format!("{good}{}", texts(["x".repeat(200)])),
            "line 2: more than 100 bytes",
        ),
        ("empty.jsonl", texts(["", "  \n"]), "all 2 documents are empty"),
        ("nothing.jsonl", String::new(), "all 0 documents are empty"),
        ("nothing.txt", String::new(), "all 1 documents are empty"),
        ("table.csv", good.to_owned(), "table.csv is of no known kind"),
        ("no-table.parquet", good.to_owned(), "no-table.parquet, row 0: not readable as Parquet"),
        (
            "messages.jsonl",
            "{\"messages\": [{\"content\": \"a\"}]}\n".to_owned(),
            "`messages` must be a list",
        ),
        (
            "prompt.jsonl",
            "{\"prompt\": \"a\", \"completion\": 1}\n".to_owned(),
            "`completion` must be a text",
        ),
    ];
    for (name, content, expected) in cases {
        let message = refusal(folder.path(), name, content);
        assert!(message.contains(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    let message = refusal(folder.path(), "latin.txt", b"abc\xe9");
    assert!(message.contains("byte 3 is not UTF-8"), "{message}");
    let message =
        refusal(folder.path(), "latin.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"\xe9\"}\n");
    assert!(message.contains("latin.jsonl, line 2"), "{message}");
    let message = refusal(folder.path(), "a.jsonl.gz", b"no gzip");
    assert!(message.contains("a.jsonl.gz: "), "{message}");
    let message = refusal(folder.path(), "a.jsonl.zst", b"no zstandard");
    assert!(message.contains("a.jsonl.zst: "), "{message}");
}

#[test]
fn missing_sources_and_bad_options_are_named() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let source = write(folder.path(), "a.jsonl", texts(["abc"]));
    fs::create_dir(folder.path().join("none")).expect("writable");
    let out = folder.path().join("out");
    let message = |change: &dyn Fn(&mut shoal_data::PrepareOptions)| {
        let mut options = options(&base, &source, 4);
        change(&mut options);
        run(&options, &out).expect_err("it is refused").to_string()
    };
    let place = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let message_of = |source: &str| message(&|options| options.sources = vec![place(source)]);
    assert!(message_of("absent.jsonl").contains("absent.jsonl: No such file"));
    assert!(message_of("none").contains("has no .txt"));
    assert!(message_of("*.parquet").contains("has no .txt"));
    assert!(message(&|options| options.sources.clear()).contains("no sources"));
    assert!(message(&|options| options.context = 0).contains("--context 0 is out of range"));
    assert!(message(&|options| options.held_out = 1.0).contains("--held-out 1"));
    assert!(message(&|options| options.held_out = f64::NAN).contains("--held-out NaN"));
    assert!(message(&|options| options.shard_bytes = 0).contains("--shard-bytes 0"));
    assert!(
        message(&|options| options.threads = std::num::NonZero::new(1025)).contains("--threads")
    );
    assert!(message(&|options| options.base = "/absent".into()).contains("/absent/tokenizer.json"));
    let held_out = message(&|options| options.held_out = 0.999_999_999);
    assert!(held_out.contains("no training document"), "{held_out}");
}

#[test]
fn bad_model_folders_are_named() {
    let folder = tempfile::tempdir().expect("writable");
    let source = write(folder.path(), "a.jsonl", texts(["abc"]));
    let chats = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let chats = write(folder.path(), "chats.jsonl", chats);
    let message = |source: &str, name: &str, content: &str| {
        let base = base(folder.path());
        write(&base, name, content);
        let out = folder.path().join("out");
        run(&options(&base, source, 4), &out).expect_err("it is refused").to_string()
    };
    // A token without a row of the embedding does no harm until a text has it.
    let used = write(folder.path(), "used.jsonl", texts(["abc<bos>"]));
    let vocabulary = message(&used, "config.json", "{\"vocab_size\": 258}");
    assert!(vocabulary.contains("token 258 is outside the vocabulary of 258"), "{vocabulary}");
    let small = base(folder.path());
    write(&small, "config.json", "{\"vocab_size\": 258}");
    run(&options(&small, &source, 4), &folder.path().join("small")).expect("it is not used");
    assert!(message(&source, "config.json", "{").contains("config.json is not JSON"));
    assert!(message(&source, "tokenizer.json", "{}").contains("is not a tokenizer"));
    assert!(message(&source, "tokenizer_config.json", "{}").contains("no token that ends a text"));
    let unmarked = message(&chats, "chat_template.jinja", "{{ messages[0].content }}");
    assert!(unmarked.contains("--train-on all"), "{unmarked}");
    assert!(unmarked.contains("--chat-template FILE"), "{unmarked}");
    assert!(message(&chats, "chat_template.jinja", "{% if %}").contains("template is invalid"));
    let date = "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}";
    assert!(message(&chats, "chat_template.jinja", date).contains("--date"));
    let refuses = "{% generation %}{{ raise_exception('no user') }}{% endgeneration %}";
    let refused = message(&chats, "chat_template.jinja", refuses);
    assert!(refused.contains("chats.jsonl, row 1") && refused.contains("no user"), "{refused}");
    fs::remove_file(folder.path().join("base/chat_template.jinja")).expect("it exists");
    let missing = run(&options(&folder.path().join("base"), &chats, 4), &folder.path().join("out"));
    let missing = missing.expect_err("it is refused").to_string();
    assert!(missing.contains("has no chat template"), "{missing}");
}

#[test]
fn completions_are_targets_and_prompts_are_not() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let row = json!({"prompt": "aß", "completion": "bc", "other": [1]}).to_string();
    let source = write(folder.path(), "a.jsonl", row);
    for (train_on, masked) in [(TrainOn::Responses, Class::Masked), (TrainOn::All, Class::Target)] {
        let mut options = options(&base, &source, 5);
        options.train_on = train_on;
        let out = folder.path().join(train_on.to_string());
        let index = run(&options, &out).expect("it works");
        let rows = rows(&out, &index, &index.train);
        assert_eq!(rows[0].tokens, [97, 0xc3, 0x9f, 98, 99, EOS]);
        let target = Class::Target;
        assert_eq!(rows[0].classes, [Class::First, masked, masked, target, target, target]);
    }
}

#[test]
fn chats_are_masked_by_the_template() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let chat = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]);
    let source = write(folder.path(), "a.jsonl", json!({"messages": chat}).to_string());
    let out = folder.path().join("out");
    let mut options = options(&base, &source, 21);
    options.format = Format::Chat;
    let index = run(&options, &out).expect("it works");
    let rows = rows(&out, &index, &index.train);
    let text = "<user>q<assistant>yes";
    assert!(rows[0].tokens.iter().zip(text.bytes()).all(|(token, byte)| *token == u32::from(byte)));
    assert_eq!(rows[0].tokens[text.len()], EOS);
    let targets = rows[0].classes.iter().filter(|class| **class == Class::Target).count();
    assert_eq!(targets, "yes".len() + 1);
    assert_eq!(index.train_totals.targets, 4);
}

#[test]
fn an_endless_template_is_an_error() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let endless = "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}\
        {% endfor %}{% endfor %}{% endgeneration %}";
    write(&base, "chat_template.jinja", endless);
    let chat = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let source = write(folder.path(), "a.jsonl", chat);
    let error = run(&options(&base, &source, 4), &folder.path().join("out"));
    let error = error.expect_err("it is ended").to_string();
    assert!(error.contains("a.jsonl, row 1: the chat template takes more than"), "{error}");
}

#[test]
fn prompts_may_be_messages() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    // It needs no generation tags.
    let template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\
        {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    write(&base, "chat_template.jinja", template);
    let prompt = json!([{"role": "user", "content": "q"}]);
    let completion = json!([{"role": "assistant", "content": "yes<eos>"}]);
    let row = json!({"prompt": prompt, "completion": completion}).to_string();
    let source = write(folder.path(), "a.jsonl", row);
    let out = folder.path().join("out");
    let index = run(&options(&base, &source, 22), &out).expect("it works");
    let rows = rows(&out, &index, &index.train);
    let targets = rows[0].classes.iter().filter(|class| **class == Class::Target).count();
    assert_eq!(targets, "yes".len() + 1);
    assert_eq!(rows[0].classes["<user>q<assistant>".len()], Class::Target);
    // The prompt must be the beginning of the chat.
    write(&base, "chat_template.jinja", "{{ messages | length }}");
    let changes = run(&options(&base, &source, 22), &folder.path().join("changes"));
    let changes = changes.expect_err("it is refused").to_string();
    assert!(changes.contains("renders the prompt otherwise"), "{changes}");
}

#[test]
fn the_template_sees_the_date_that_is_given() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let template = "{% generation %}{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}\
        {% else %}no date{% endif %}{% endgeneration %}";
    write(&base, "chat_template.jinja", template);
    let chat = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let source = write(folder.path(), "a.jsonl", chat);
    for (date, expected) in [(None, "no date"), (Some("2024-07-26"), "26 Jul 2024")] {
        let mut options = options(&base, &source, expected.len() as u32 - 1);
        options.date = date.map(|date| date.parse().expect("a date"));
        let out = folder.path().join(expected);
        let index = run(&options, &out).expect("it works");
        let rows = rows(&out, &index, &index.train);
        let tokens: Vec<u32> = expected.bytes().map(u32::from).collect();
        assert_eq!(rows[0].tokens, tokens);
    }
}

#[test]
fn another_template_may_be_given() {
    let folder = tempfile::tempdir().expect("writable");
    let base = base(folder.path());
    let file = write(folder.path(), "own.jinja", "{% generation %}own{% endgeneration %}");
    let chat = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let source = write(folder.path(), "a.jsonl", chat);
    let mut options = options(&base, &source, 2);
    options.chat_template = Some(file.into());
    let out = folder.path().join("out");
    let index = run(&options, &out).expect("it works");
    assert_eq!(rows(&out, &index, &index.train)[0].tokens, [111, 119, 110]);
    let own = "{% generation %}own{% endgeneration %}";
    assert_eq!(index.chat_template.as_deref(), Some(own), "a model that learns from it gets it");
    let read = Index::read(&out).expect("valid");
    assert_eq!((read.hash(), read.chat_template), (index.hash(), index.chat_template));
    let same = base.join("chat_template.jinja");
    fs::copy(folder.path().join("own.jinja"), &same).expect("writable");
    options.chat_template = Some(same);
    let same = run(&options, &folder.path().join("same")).expect("it works");
    assert_eq!(same.chat_template, None, "it is the model's own");
    options.chat_template = Some("/absent.jinja".into());
    let absent = run(&options, &folder.path().join("absent")).expect_err("it is refused");
    assert!(absent.to_string().contains("/absent.jinja: No such file"), "{absent}");
}
