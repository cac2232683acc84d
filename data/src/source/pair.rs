//! Rows with a chosen and a rejected completion, in the forms that TRL documents as preference data.
//!
//! The prompt may be a column of its own. Where there is none, or where it is a text beside completions of messages, it is
//! what both completions begin with: the same messages, or the same words.

use super::json::Json;
use super::row::{Arguments, Messages, Row, Wrong, chat, text};

/// The row of the columns `prompt`, `chosen` and `rejected`.
pub(super) fn row(columns: [Option<Json>; 3], arguments: Arguments) -> Result<Row, Wrong> {
    let [mut prompt, mut chosen, mut rejected] = columns;
    let is_chat = |value: &Option<Json>| matches!(value, Some(Json::List(_) | Json::Object(_)));
    if is_chat(&chosen) || is_chat(&rejected) {
        let own = is_chat(&prompt).then(|| chat(&mut prompt, "prompt")).transpose()?;
        let both = [chat(&mut chosen, "chosen")?, chat(&mut rejected, "rejected")?];
        return of_messages(own, both, arguments);
    }
    if arguments != Arguments::default() {
        let expected = "a list of messages where a row has tools or template arguments";
        return Err(Wrong::Type("chosen", expected));
    }
    let own = prompt.is_some().then(|| text(&mut prompt, "prompt")).transpose()?;
    let both = [text(&mut chosen, "chosen")?, text(&mut rejected, "rejected")?];
    Ok(of_texts(own, both))
}

fn of_messages(
    prompt: Option<Messages>,
    [chosen, rejected]: [Messages; 2],
    arguments: Arguments,
) -> Result<Row, Wrong> {
    let (prompt, [chosen, rejected]) = match prompt {
        Some(prompt) => (prompt, [chosen, rejected]),
        None => {
            let pairs = chosen.iter().zip(&rejected);
            let common = pairs.take_while(|(one, other)| one == other).count();
            // Equal chats differ in nothing: the last message of both is their completion.
            let most = chosen.len().min(rejected.len()).saturating_sub(1);
            let common = common.min(most);
            let ends = [chosen[common..].to_vec(), rejected[common..].to_vec()];
            (chosen[..common].to_vec(), ends)
        }
    };
    for (key, completion) in [("chosen", &chosen), ("rejected", &rejected)] {
        if completion.is_empty() {
            return Err(Wrong::Type(key, "a list with at least one message"));
        }
    }
    let row = |completion| Row::PromptMessages {
        prompt: prompt.clone(),
        completion,
        arguments: arguments.clone(),
    };
    Ok(Row::Pair(Box::new([row(chosen), row(rejected)])))
}

fn of_texts(prompt: Option<String>, [chosen, rejected]: [String; 2]) -> Row {
    let (prompt, [chosen, rejected]) = match prompt {
        Some(prompt) => (prompt, [chosen, rejected]),
        None => {
            let border = common_words(&chosen, &rejected);
            let ends = [&chosen, &rejected].map(|text| text[border..].to_owned());
            (chosen[..border].to_owned(), ends)
        }
    };
    let row = |completion| Row::Prompt { prompt: prompt.clone(), completion };
    Row::Pair(Box::new([row(chosen), row(rejected)]))
}

/// Bytes of the words that two texts begin with, without the white space before the first word that differs.
fn common_words(one: &str, other: &str) -> usize {
    let pairs = one.char_indices().zip(other.chars());
    let same = pairs.take_while(|((_, a), b)| a == b).last();
    let same = same.map_or(0, |((place, last), _)| place + last.len_utf8());
    // A word that only begins alike belongs to the completions.
    let word = one[..same].rfind(char::is_whitespace).unwrap_or(0);
    one[..word].trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(prompt: Option<&str>, chosen: &str, rejected: &str) -> [(String, String); 2] {
        let both = [chosen, rejected].map(str::to_owned);
        let Row::Pair(pair) = of_texts(prompt.map(str::to_owned), both) else { unreachable!() };
        pair.map(|row| match row {
            Row::Prompt { prompt, completion } => (prompt, completion),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn the_implicit_prompt_is_what_both_texts_begin_with() {
        let [chosen, rejected] = texts(None, "The sky is blue.", "The sky is black.");
        assert_eq!((&*chosen.0, &*chosen.1), ("The sky is", " blue."));
        assert_eq!((&*rejected.0, &*rejected.1), ("The sky is", " black."));
        let [chosen, rejected] = texts(None, "é\n\nA: Ja", "é\n\nA: Nein");
        assert_eq!((&*chosen.0, &*chosen.1, &*rejected.1), ("é\n\nA:", " Ja", " Nein"));
        let [chosen, rejected] = texts(None, "yes", "no");
        assert_eq!((&*chosen.0, &*chosen.1, &*rejected.1), ("", "yes", "no"));
        // One is the beginning of the other.
        let [chosen, rejected] = texts(None, "a b", "a b c");
        assert_eq!((&*chosen.0, &*chosen.1, &*rejected.1), ("a", " b", " b c"));
        let [chosen, _] = texts(Some("The sky "), "is blue", "is black");
        assert_eq!((&*chosen.0, &*chosen.1), ("The sky ", "is blue"));
    }
}
