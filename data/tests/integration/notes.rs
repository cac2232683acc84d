//! What a preparation notes about data that is likely not meant.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::json;
use shoal_data::{Notes, prepare_noting};

use crate::common::{base, options, write};

/// The notes on chats of two messages, of which the first has a role.
fn notes(folder: &Path, (role, chats): (&str, usize), context: u32, template: &str) -> Notes {
    let base = base(folder);
    write(&base, "chat_template.jinja", template);
    let chat = |number| {
        let question = json!({"role": role, "content": format!("question {number}")});
        let answer =
            json!({"role": "assistant", "content": " <think>\nhm\n</think>\n\nan answer "});
        json!({"messages": [question, answer]})
    };
    let lines: String = (0..chats).map(|number| format!("{}\n", chat(number))).collect();
    let source = write(folder, "rows.jsonl", lines);
    let out = tempfile::tempdir().expect("writable");
    let options = options(&base, &source, context);
    let prepared = prepare_noting(&options, out.path(), |_| ControlFlow::Continue(()));
    prepared.expect("it works").1
}

/// It passes over roles that it does not know, and leaves reasoning out.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}\
<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}<eos>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn messages_that_the_template_leaves_out_are_counted_by_role() {
    let folder = tempfile::tempdir().expect("writable");
    let found = notes(folder.path(), ("user", 5), 100, TEMPLATE);
    assert_eq!(found, Notes::default());
    let found = notes(folder.path(), ("human", 5), 100, TEMPLATE);
    assert_eq!(Vec::from_iter(found.left_out), [("human".to_owned(), 5)]);
    let every = TEMPLATE.replace("['user', 'assistant']", "[m.role]");
    let found = notes(folder.path(), ("human", 5), 100, &every);
    assert!(found.left_out.is_empty(), "{found:?}");
    assert_eq!(Vec::from_iter(found.unknown), [("human".to_owned(), 5)]);
    let known = format!("{every}{{# human #}}");
    assert_eq!(notes(folder.path(), ("human", 5), 100, &known), Notes::default());
}

#[test]
fn documents_longer_than_a_row_are_counted() {
    let folder = tempfile::tempdir().expect("writable");
    assert_eq!(notes(folder.path(), ("user", 5), 16, TEMPLATE).cut, 5);
    assert_eq!(notes(folder.path(), ("user", 5), 200, TEMPLATE).cut, 0);
}
