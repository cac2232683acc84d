//! Changes of a template's source where the engine would compute something else than Jinja2 without a word.
//!
//! A loop over a text does not know its length: no character would be the last. A macro does not see a variable
//! of the template of which its body has slices alone (`name[1:]`): it would be undefined.

use std::collections::BTreeSet;

use minijinja::{Error, ErrorKind, Value};

/// Name of the filter of [`counted`].
pub(super) const COUNTED: &str = "shoal_counted";

/// What a loop knows of its end.
const OF_THE_END: [&str; 4] = ["revindex0", "revindex", "length", "last"];

/// The source for the engine.
pub(super) fn translate(source: &str) -> String {
    let assigned = assigned(source);
    let mut translated = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%").into_iter().chain(rest.find("{{")).min() {
        let (before, tag) = rest.split_at(start + 2);
        translated.push_str(before);
        let close = if before.ends_with('%') { "%}" } else { "}}" };
        let (inside, after) = tag.split_at(tag.find(close).unwrap_or(tag.len()));
        ask_for_ends(inside, &mut translated);
        rest = after;
        if words(inside).next() == Some("macro") && rest.starts_with("%}") && !assigned.is_empty() {
            let trim = if inside.ends_with('-') { "-" } else { "" };
            let seen: String = assigned.iter().map(|name| format!("{{{{{name}}}}}")).collect();
            translated.push_str(&format!("%}}{{%if false%}}{seen}{{%endif{trim}"));
        }
    }
    translated.push_str(rest);
    translated
}

/// Variables that the template assigns, which a macro may see.
fn assigned(source: &str) -> BTreeSet<&str> {
    let tags = source.split("{%").skip(1).map(|rest| rest.split("%}").next().unwrap_or(rest));
    let names = tags.filter_map(|tag| {
        let mut words = words(tag);
        let (tag, name) = (words.next()?, words.next()?);
        let is_name = name.starts_with(|first: char| first.is_alphabetic() || first == '_');
        (matches!(tag, "set" | "for") && is_name).then_some(name)
    });
    names.collect()
}

/// The words of a tag.
fn words(tag: &str) -> impl Iterator<Item = &str> {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    tag.split(move |character| !is_word(character)).filter(|word| !word.is_empty())
}

/// Lets an expression ask whether a loop knows its length, before it asks for the end.
fn ask_for_ends(inside: &str, translated: &mut String) {
    let mut quote = None;
    let mut escaped = false;
    let mut before = ' ';
    let mut copied = 0;
    for (place, character) in inside.char_indices() {
        let is_word = before.is_alphanumeric() || matches!(before, '_' | '.');
        if quote.is_none() && !is_word && asks(&inside[place..]) {
            translated.push_str(&inside[copied..place]);
            translated.push_str(&format!("(loop|{COUNTED})"));
            copied = place + "loop".len();
        }
        quote = match (quote, character) {
            (None, '\'' | '"') => Some(character),
            (Some(open), _) if open == character && !escaped => None,
            (other, _) => other,
        };
        escaped = character == '\\' && !escaped;
        before = character;
    }
    translated.push_str(&inside[copied..]);
}

/// Whether an expression begins with something about a loop's end.
fn asks(expression: &str) -> bool {
    let name = expression.strip_prefix("loop.").and_then(|rest| words(rest).next());
    name.is_some_and(|name| OF_THE_END.contains(&name))
}

/// The filter: a loop that knows its length.
pub(super) fn counted(value: Value) -> Result<Value, Error> {
    if value.get_attr("length").is_ok_and(|length| length.is_undefined()) {
        let reason = "a loop over a text or an iterator does not know where it ends: use loop over `... | list`";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_about_the_end_are_found_in_tags_alone() {
        let source = "loop.last{% if not loop.last and loop.lastly %}{{ 'loop.last' ~ loop.length-1 }}{{ x.loop.last }}";
        let expected = "loop.last{% if not (loop|shoal_counted).last and loop.lastly %}\
                        {{ 'loop.last' ~ (loop|shoal_counted).length-1 }}{{ x.loop.last }}";
        assert_eq!(translate(source), expected);
        assert_eq!(
            translate("{{ 'it\\'s' }}{{ loop.revindex0"),
            "{{ 'it\\'s' }}{{ (loop|shoal_counted).revindex0"
        );
    }
}
