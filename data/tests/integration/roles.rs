//! Compares the turns found in templates without generation tags with the masks of transformers for the
//! same templates with tags.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use shoal_data::source::{Arguments, Json, Messages, Object};
use shoal_data::template::{ChatTemplate, TemplateError, assistant_mask};
use shoal_data::tokenizer::TextTokenizer;

use crate::golden::{ids, numbers, printed};

#[derive(Deserialize)]
struct Chat {
    messages: Messages,
    #[serde(default)]
    tools: Json,
    #[serde(default)]
    chat_template_kwargs: Object,
}

/// How a chat's mask compares.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Equal,
    /// The template with tags has another text.
    OtherText,
    /// Python refuses the chat, and so does this crate.
    NoChat,
    /// The template with tags marks a line end of each header too.
    HeaderEnd,
    Refused(String),
    Differs(String),
}

fn compare(tokenizer: &TextTokenizer, template: &ChatTemplate, chat: &Value) -> Found {
    let row = chat["row"].as_str().expect("a text");
    let row: Chat = serde_json::from_str(row).expect("a chat");
    let arguments = Arguments { tools: row.tools, others: row.chat_template_kwargs };
    let rendered = match template.render_masked(&row.messages, &arguments) {
        Ok(rendered) => rendered,
        Err(TemplateError::Turn { number, reason }) if chat["error"].is_null() => {
            return Found::Refused(format!("{number}: {reason}"));
        }
        Err(error) if chat["error"].is_null() => return Found::Differs(error.to_string()),
        Err(_) => return Found::NoChat,
    };
    let Some(text) = chat["text"].as_str() else { return Found::Differs(rendered.text) };
    if rendered.text != text {
        return Found::Differs(rendered.text);
    }
    if !chat["other"].is_null() {
        return Found::OtherText;
    }
    let encoded = tokenizer.encode_with_offsets(&rendered.text, false).expect("it encodes");
    assert_eq!(encoded.tokens, ids(&chat["ids"]));
    let mask = assistant_mask(&encoded, &rendered.generated);
    let expected: Vec<bool> = numbers(&chat["mask"]).iter().map(|bit| *bit == 1).collect();
    if mask == expected {
        return Found::Equal;
    }
    let more = |place: usize| expected[place] && !mask[place];
    let line_end = tokenizer.encode("\n", false).expect("it encodes");
    let is_header = |place: usize| {
        more(place) && encoded.tokens[place] == line_end[0] && (place == 0 || !expected[place - 1])
    };
    let mut differ = (0..mask.len()).filter(|place| mask[*place] != expected[*place]);
    if differ.all(is_header) {
        return Found::HeaderEnd;
    }
    let kept = |mask: &[bool]| {
        let tokens = encoded.tokens.iter().zip(mask).filter(|(_, kept)| **kept);
        let tokens: Vec<u32> = tokens.map(|(token, _)| *token).collect();
        tokenizer.decode(&tokens, false).expect("it decodes")
    };
    Found::Differs(format!("{text:?}\n  here   {:?}\n  Python {:?}", kept(&mask), kept(&expected)))
}

fn compare_family(family: &Value) -> Vec<(u64, Found)> {
    let base = PathBuf::from(family["folder"].as_str().expect("a path"));
    let tokenizer = TextTokenizer::load(&base).expect("it loads");
    let source = ChatTemplate::find(&base, None).expect("there is one");
    let template = ChatTemplate::new(&source, tokenizer.special(), None);
    let template = template.unwrap_or_else(|error| panic!("{}: {error}", base.display()));
    let chats = family["chats"].as_array().expect("a list").iter();
    let number = |chat: &Value| chat["number"].as_u64().expect("a number");
    chats.map(|chat| (number(chat), compare(&tokenizer, &template, chat))).collect()
}

/// Chats of `roles.py` in which a turn is not found: those that begin with an answer, and those whose
/// system message the template drops when an answer follows.
const REFUSED: [(&str, &[u64]); 2] = [("llama3_1", &[8, 12, 13]), ("mistral", &[1, 8, 12, 13])];

#[test]
fn turns_are_those_that_tags_mark() {
    let folder = tempfile::tempdir().expect("writable");
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut arguments = vec![folder.path().join("models")];
    let texts = ["src/template/mod.rs", "src/source/mod.rs", "../README.md"];
    arguments.extend(texts.map(|file| crate_folder.join(file)));
    let Some(families) = printed::<Value>("roles.py", &arguments) else { return };
    let mut wrong = Vec::new();
    for (name, family) in families.as_object().expect("an object") {
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        let mut refused = BTreeSet::new();
        for (number, found) in compare_family(family) {
            let kind = match found {
                Found::Equal => "equal",
                Found::OtherText => "another text with tags",
                Found::NoChat => "refused by both",
                Found::HeaderEnd => "line end of the header",
                Found::Refused(reason) => {
                    println!("{name}, chat {number}: {reason}");
                    refused.insert(number);
                    "refused here"
                }
                Found::Differs(how) => {
                    wrong.push(format!("{name}, chat {number}: {how}"));
                    "different"
                }
            };
            *counts.entry(kind).or_default() += 1;
        }
        println!("{name}: {counts:?}");
        if !name.starts_with("trl-") {
            let known = REFUSED.iter().find(|(family, _)| family == name);
            let known = known.map_or(&[][..], |(_, chats)| chats);
            assert_eq!(Vec::from_iter(refused), known, "{name}");
            let has_tags_alone = ["line end of the header", "another text with tags"];
            assert!(has_tags_alone.iter().all(|kind| !counts.contains_key(kind)), "{name}");
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
