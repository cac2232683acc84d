//! Where the assistant's turns lie in a chat whose template does not mark them.
//!
//! Two parts of the chat are rendered for each turn: the messages before it, with the prompt for an
//! answer, and the messages up to it. The first part ends where the turn begins, the second where it
//! ends, and both must be a beginning of the whole chat's text. One difference is allowed: templates
//! leave the reasoning of earlier turns out, so a part may have a block `<think>...</think>` that
//! the whole has not. A chat that does not fit is refused.

use std::ops::Range;

use super::{Renderer, TemplateError};
use crate::source::{Json, Object};

/// Begins a block of reasoning.
const THINK: &str = "<think>";
/// Ends a block of reasoning.
const END_THINK: &str = "</think>";
/// The answer by which a template without a prompt for answers shows what it puts before one.
const PROBE: &str = "x";

/// Why a turn's beginning is not certain.
const OTHER_BEGINNING: &str =
    "the template renders the messages before it otherwise when an answer follows";

/// Finds the turns in the chat's text, as ranges of bytes. Each covers all that stands between the
/// prompt for the answer and what comes behind it: reasoning, calls of tools, and the end of the turn.
pub(super) fn find(renderer: &Renderer, whole: &str) -> Result<Vec<Range<usize>>, TemplateError> {
    let messages = renderer.messages();
    let mut turns: Vec<Range<usize>> = Vec::new();
    for number in (0..messages.len()).filter(|number| is_answer(&messages[*number])) {
        let lost = |reason| lost(number, reason);
        let is_last = number + 1 == messages.len();
        let up_to = match is_last {
            true => whole.to_owned(),
            false => renderer.render(&messages[..=number], false).map_err(|e| inside(e, number))?,
        };
        let before = begin(renderer, number)?;
        let start = align(&before, whole).ok_or_else(|| lost(OTHER_BEGINNING))?;
        let end = if is_last {
            Some(whole.len())
        } else {
            let shorter = without_end(renderer, &up_to);
            align(&up_to, whole).or_else(|| shorter.and_then(|shorter| align(shorter, whole)))
        };
        let end = end.ok_or_else(|| {
            lost("the template renders it otherwise when further messages follow")
        })?;
        let previous = turns.last().map_or(0, |turn| turn.end);
        if !(previous..=end).contains(&start) {
            return Err(lost("it begins before the previous one ends"));
        }
        turns.push(start..end);
    }
    Ok(turns)
}

fn is_answer(message: &Object) -> bool {
    message.get("role").and_then(Json::as_text) == Some("assistant")
}

fn lost(number: usize, reason: &str) -> TemplateError {
    TemplateError::Turn { number: number + 1, reason: reason.to_owned() }
}

/// The text before a turn, without the reasoning that a prompt may begin.
fn begin(renderer: &Renderer, number: usize) -> Result<String, TemplateError> {
    let messages = renderer.messages();
    let lost = |reason| lost(number, reason);
    if number == 0 {
        return begin_of_chat(renderer);
    }
    let before = &messages[..number];
    let prompt = renderer.render(before, true).map_err(|error| inside(error, number))?;
    if renderer.render(before, false).map_err(|error| inside(error, number))? == prompt {
        // Without a prompt for answers, a header of the turn would pass for the answer.
        let probe = ["role", "content"].map(str::to_owned).into_iter();
        let values = ["assistant", PROBE].map(|text| Json::Text(text.to_owned()));
        let probe: Object = probe.zip(values).collect();
        let probed = renderer.render(&[before, &[probe]].concat(), false);
        let probed = probed.map_err(|error| inside(error, number))?;
        let turn = probed.strip_prefix(&prompt).ok_or_else(|| lost(OTHER_BEGINNING))?;
        if !turn.trim_start().starts_with(PROBE) {
            return Err(lost("the template has no add_generation_prompt to tell its header by"));
        }
    }
    Ok(without_reasoning(&prompt).to_owned())
}

/// The text before a turn that no message precedes: templates may not render an empty chat. The
/// prompt for a further answer is the header that the turn has once.
fn begin_of_chat(renderer: &Renderer) -> Result<String, TemplateError> {
    let lost = || lost(0, "no message precedes it, and its header is not found");
    let chat = &renderer.messages()[..1];
    let alone = renderer.render(chat, false).map_err(|error| inside(error, 0))?;
    let prompted = renderer.render(chat, true).map_err(|error| inside(error, 0))?;
    let prompt = prompted.strip_prefix(&alone).or_else(|| {
        let shorter = without_end(renderer, &alone)?;
        prompted.strip_prefix(shorter)
    });
    let header = without_reasoning(prompt.ok_or_else(lost)?);
    let mut places = alone.match_indices(header);
    let (Some((place, _)), None, false) = (places.next(), places.next(), header.is_empty()) else {
        return Err(lost());
    };
    Ok(alone[..place + header.len()].to_owned())
}

/// A text without the end token that a template puts behind the last message alone.
fn without_end<'a>(renderer: &Renderer, text: &'a str) -> Option<&'a str> {
    let end = renderer.special("eos_token").filter(|end| !end.is_empty())?;
    text.strip_suffix(end)
}

/// The prompt without the reasoning that it begins, or has as an empty block.
fn without_reasoning(prompt: &str) -> &str {
    let trimmed = prompt.trim_end();
    if let Some(before) = trimmed.strip_suffix(THINK) {
        return before;
    }
    let block = trimmed.strip_suffix(END_THINK).and_then(|before| {
        let place = before.rfind(THINK)?;
        before[place + THINK.len()..].trim().is_empty().then(|| &before[..place])
    });
    block.unwrap_or(prompt)
}

/// The place in the whole up to which it is the part, where the part may have blocks of reasoning that
/// the whole has not.
fn align(part: &str, whole: &str) -> Option<usize> {
    let (mut from, mut to) = (0, 0);
    loop {
        let (rest, other) = (&part[from..], &whole[to..]);
        if other.starts_with(rest) {
            return Some(to + rest.len());
        }
        // The whole may go on with a `<` of its own, so the block may begin before the difference.
        let same = common(rest, other);
        let first = same.saturating_sub(THINK.len() - 1);
        let block =
            (first..=same).find(|place| rest.as_bytes()[*place..].starts_with(THINK.as_bytes()))?;
        let end = block + rest[block..].find(END_THINK)? + END_THINK.len();
        from += end + spaces(&rest[end..]);
        to += block + spaces(&other[block..]);
    }
}

/// Bytes of the common beginning of two texts.
fn common(one: &str, other: &str) -> usize {
    one.bytes().zip(other.bytes()).take_while(|(one, other)| one == other).count()
}

/// Bytes of the white space that a text begins with.
fn spaces(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// The error of a part of the chat that the template refuses, unless the limits are reached.
fn inside(error: TemplateError, number: usize) -> TemplateError {
    match error {
        TemplateError::Render(reason) => TemplateError::Turn {
            number: number + 1,
            reason: format!("the template refuses the chat up to it ({reason})"),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_may_have_reasoning_that_the_whole_has_not() {
        let whole = "q?<a>A b<e>q<a>";
        assert_eq!(align("q?<a>", whole), Some(5));
        assert_eq!(align("q?<a><think>\n\n</think>\n\nA b<e>", whole), Some(11));
        assert_eq!(align("q?<a><think>x</think><think>y</think>A b<e>", whole), Some(11));
        // A block that both have is compared.
        assert_eq!(align("<think>a</think>b", "<think>a</think>bc"), Some(17));
        assert_eq!(align("<think>a</think>b", "<think>é</think>bc"), None);
        assert_eq!(align("<think>a", "b"), None);
        assert_eq!(align("a<th", "a<t"), None);
        assert_eq!(align("é<think>日</think>é", "éé"), Some(4));
        // The whole has other white space where the block was, and a `<` of its own.
        assert_eq!(align("<a><think>\n</think>\n\n<tool>", "<a>\n<tool>"), Some(10));
    }

    #[test]
    fn prompts_begin_no_reasoning() {
        assert_eq!(without_reasoning("<a>\n<think>\n\n</think>\n\n"), "<a>\n");
        assert_eq!(without_reasoning("<a><think>\n"), "<a>");
        assert_eq!(without_reasoning("<a>\n"), "<a>\n");
        assert_eq!(without_reasoning("<think>why</think>"), "<think>why</think>");
    }
}
