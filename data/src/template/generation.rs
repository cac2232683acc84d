//! The tags `{% generation %}` and `{% endgeneration %}` around the assistant's text.
//!
//! The tags become a block with a filter, which puts a marker before and behind its content. So
//! white space around the tags is treated as around any other tag.

use std::ops::Range;

use minijinja::{Error, State, Value};

use super::Rendered;
use crate::source::{Arguments, Object};

/// Name of the filter.
pub(super) const FILTER: &str = "shoal_generation";
/// Name of the variable with the marker before.
pub(super) const OPEN: &str = "shoal_generation_open";
/// Name of the variable with the marker behind.
pub(super) const CLOSE: &str = "shoal_generation_close";

/// Replaces the tags of a template. Returns whether there were any.
pub(super) fn translate(source: &str) -> (String, bool) {
    let mut translated = String::with_capacity(source.len());
    let mut marked = false;
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        translated.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inside = &tag[..end];
        let name = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        let replacement = match name.trim() {
            "generation" => format!("filter {FILTER}"),
            "endgeneration" => "endfilter".to_owned(),
            _ => continue,
        };
        marked = true;
        translated.push_str(&inside.replacen(name.trim(), &replacement, 1));
        rest = &tag[end..];
    }
    translated.push_str(rest);
    (translated, marked)
}

/// The filter: its input between the two markers.
pub(super) fn mark(state: &State, content: &str) -> Result<String, Error> {
    let marker = |name| state.lookup(name).unwrap_or_else(|| Value::from(""));
    Ok(format!("{}{content}{}", marker(OPEN), marker(CLOSE)))
}

/// Two private-use characters that stand before and behind the assistant's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Markers {
    pub(super) open: char,
    pub(super) close: char,
}

impl Markers {
    /// Two characters that the messages do not contain.
    pub(super) fn unused_in(messages: &[Object], arguments: &Arguments) -> Self {
        let candidates = ('\u{10f000}'..='\u{10fffd}').rev();
        let has = |candidate: char| {
            let mut objects = messages.iter().chain([&arguments.others]);
            objects.any(|object| object.contains(candidate)) || arguments.tools.contains(candidate)
        };
        let mut unused = candidates.filter(|candidate| !has(*candidate));
        let open = unused.next().unwrap_or('\u{e000}');
        Self { open, close: unused.next().unwrap_or('\u{e001}') }
    }

    /// Removes the markers, and returns the ranges between them.
    pub(super) fn extract(self, rendered: &str) -> Rendered {
        let mut text = String::with_capacity(rendered.len());
        let mut generated = Vec::new();
        let (mut length, mut start) = (0, 0);
        for character in rendered.chars() {
            if character == self.open {
                start = length;
            } else if character == self.close {
                generated.push(start..length);
            } else {
                text.push(character);
                length += 1;
            }
        }
        Rendered { text, generated }
    }
}

/// Ranges of bytes, in order, as ranges of characters.
pub(super) fn in_characters(text: &str, ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let (mut bytes, mut characters) = (0, 0);
    let mut place = |to: usize| {
        characters += text[bytes..to].chars().count();
        bytes = to;
        characters
    };
    ranges.into_iter().map(|range| place(range.start)..place(range.end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Json;

    #[test]
    fn tags_become_a_filter() {
        let (translated, marked) =
            translate("{% if x %}{%- generation -%}a{% endgeneration %}{% endif %} {% open");
        let expected =
            "{% if x %}{%- filter shoal_generation -%}a{% endfilter %}{% endif %} {% open";
        assert_eq!(translated, expected);
        assert!(marked);
        assert!(!translate("{% set generation = 1 %}").1);
        assert_eq!(translate("no tag %} generation"), ("no tag %} generation".to_owned(), false));
    }

    #[test]
    fn markers_avoid_the_messages() {
        let taken = ["\u{10fffd}", "\u{10fffb}"]
            .map(|text| Object::from_iter([("content".to_owned(), Json::Text(text.to_owned()))]));
        let markers = Markers::unused_in(&taken, &Arguments::default());
        assert_eq!(markers, Markers { open: '\u{10fffc}', close: '\u{10fffa}' });
        let rendered = markers.extract("a\u{10fffc}ßb\u{10fffa}c\u{10fffc}\u{10fffa}");
        assert_eq!(rendered, Rendered { text: "aßbc".to_owned(), generated: vec![1..3, 4..4] });
    }
}
