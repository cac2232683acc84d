//! Scores of a checkpoint: the numbers that a command of the user prints about it.

use std::collections::BTreeMap;

use serde_json::Value;

/// Numbers by name.
pub type Scores = BTreeMap<String, f64>;

/// Most numbers of one checkpoint.
const NUMBERS: usize = 64;

/// Longest name of a number, in bytes.
const NAME: usize = 64;

/// Most characters of a line that an error shows.
const SHOWN: usize = 120;

/// Why the output of a command has no scores.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScoreError {
    /// It printed nothing.
    #[error(
        "it printed nothing: its last line must be a JSON object of numbers, such as {{\"accuracy\": 0.5}}"
    )]
    Nothing,
    /// The last line is no JSON object.
    #[error("its last line must be a JSON object of numbers, and is {0:?}")]
    NoObject(String),
    /// A value is no number.
    #[error("{name:?} = {value} is no number: print numbers alone")]
    NoNumber {
        /// The name.
        name: String,
        /// The value, shortened.
        value: String,
    },
    /// A name that would not do as a label.
    #[error(
        "the name {0:?} is not usable: it must have 1 to 64 printable ASCII characters without spaces"
    )]
    Name(String),
    /// Too many numbers, or none.
    #[error("it printed {0} numbers: print 1 to {NUMBERS}")]
    Numbers(usize),
}

/// Reads the scores from what a command printed: a JSON object of names and numbers in the last line with text.
///
/// # Errors
/// If there is no such line, or a name or a value in it is not usable.
pub fn parse(output: &[u8]) -> Result<Scores, ScoreError> {
    let text = String::from_utf8_lossy(output);
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let line = line.ok_or(ScoreError::Nothing)?;
    let Ok(Value::Object(object)) = serde_json::from_str(line) else {
        return Err(ScoreError::NoObject(shortened(line)));
    };
    if !(1..=NUMBERS).contains(&object.len()) {
        return Err(ScoreError::Numbers(object.len()));
    }
    let score = |(name, value): (String, Value)| {
        let is_name =
            (1..=NAME).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_name {
            return Err(ScoreError::Name(shortened(&name)));
        }
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok((name, number)),
            None => Err(ScoreError::NoNumber { name, value: shortened(&value.to_string()) }),
        }
    };
    object.into_iter().map(score).collect()
}

/// The scores as text.
#[must_use]
pub fn describe(scores: &Scores) -> String {
    let scores = scores.iter().map(|(name, number)| format!("{name} {number:.4}"));
    scores.collect::<Vec<_>>().join(", ")
}

fn shortened(text: &str) -> String {
    text.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_has_the_scores() {
        let scores =
            parse(b"loading\n{\"x\": 9}\n{\"acc_norm,none\": 0.25, \"ppl\": 7}\n\n").expect("some");
        assert_eq!(
            scores,
            Scores::from([("acc_norm,none".to_owned(), 0.25), ("ppl".to_owned(), 7.0)])
        );
        assert_eq!(describe(&scores), "acc_norm,none 0.2500, ppl 7.0000");
    }

    #[test]
    fn anything_else_is_refused() {
        let refusal = |output: &[u8]| parse(output).expect_err("refused").to_string();
        assert!(refusal(b" \n").contains("printed nothing"));
        assert!(refusal(b"{\"x\": 1}\ndone\n").contains("and is \"done\""));
        assert!(refusal(b"[1]").contains("JSON object of numbers"));
        assert!(refusal(b"{\"x\": NaN}").contains("JSON object of numbers"));
        assert!(refusal(b"{}").contains("it printed 0 numbers"));
        assert!(refusal(b"{\"x\": \"1\"}").contains("\"x\" = \"1\" is no number"));
        assert!(refusal(b"{\"x y\": 1}").contains("the name \"x y\""));
        assert!(refusal(b"\xff\xfe").contains("JSON object of numbers"));
        let many: Scores = (0..65).map(|number| (format!("n{number}"), 0.0)).collect();
        assert!(refusal(&serde_json::to_vec(&many).expect("JSON")).contains("65 numbers"));
    }
}
