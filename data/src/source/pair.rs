//! Rows with a chosen and a rejected completion, in the forms that TRL documents as preference data.
//!
//! The prompt may be a column of its own. Where there is none, or where it is a text beside completions of messages, it is
//! what both completions begin with: the same messages, or the same words.

use super::json::Object;

/// A prompt, and the chosen and the rejected completion.
type Split<T> = (T, [T; 2]);

/// Splits chats: by the prompt that is given, or behind the messages that both begin with.
pub(super) fn split_chats(
    prompt: Option<Vec<Object>>,
    [chosen, rejected]: [Vec<Object>; 2],
) -> Split<Vec<Object>> {
    if let Some(prompt) = prompt {
        return (prompt, [chosen, rejected]);
    }
    let common = chosen.iter().zip(&rejected).take_while(|(one, other)| one == other).count();
    // Equal chats differ in nothing: the last message of both is their completion.
    let most = chosen.len().min(rejected.len()).saturating_sub(1);
    let common = common.min(most);
    let ends = [chosen[common..].to_vec(), rejected[common..].to_vec()];
    (chosen[..common].to_vec(), ends)
}

/// Splits texts: by the prompt that is given, or behind the words that both begin with.
pub(super) fn split_texts(
    prompt: Option<String>,
    [chosen, rejected]: [String; 2],
) -> Split<String> {
    if let Some(prompt) = prompt {
        return (prompt, [chosen, rejected]);
    }
    let border = common_words(&chosen, &rejected);
    let ends = [&chosen, &rejected].map(|text| text[border..].to_owned());
    (chosen[..border].to_owned(), ends)
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

    fn texts(prompt: Option<&str>, chosen: &str, rejected: &str) -> [String; 3] {
        let both = [chosen, rejected].map(str::to_owned);
        let (prompt, [chosen, rejected]) = split_texts(prompt.map(str::to_owned), both);
        [prompt, chosen, rejected]
    }

    #[test]
    fn the_implicit_prompt_is_what_both_texts_begin_with() {
        for (chosen, rejected, expected) in [
            ("The sky is blue.", "The sky is black.", ["The sky is", " blue.", " black."]),
            ("é\n\nA: Ja", "é\n\nA: Nein", ["é\n\nA:", " Ja", " Nein"]),
            ("yes", "no", ["", "yes", "no"]),
            // One is the beginning of the other.
            ("a b", "a b c", ["a", " b", " b c"]),
        ] {
            assert_eq!(texts(None, chosen, rejected), expected);
        }
        let given = texts(Some("The sky "), "is blue", "is black");
        assert_eq!(given, ["The sky ", "is blue", "is black"]);
    }
}
