//! Limits of the steps before and behind a tokenizer's model.

use serde_json::Value;

use super::scan::OutOfRange;

/// Most steps of a normalizer, pre-tokenizer, post-processor or decoder.
const STEPS: u64 = 64;
/// Most bytes that all steps together may make of one. A space that becomes `▁` is three.
const GROWTH: u64 = 4096;
/// Most bytes of a pattern, each counted as often as it is repeated: the matcher writes repetitions
/// out. Patterns of known models have 200 to 3,000 bytes and repeat up to three times.
const PATTERN: u64 = 1 << 20;
/// Most bytes of a text that a step inserts.
const INSERTED: u64 = 1024;
/// Most bytes of a table of SentencePiece's normalizer. Those of known models have 320,000.
const CHARACTER_MAP: u64 = 4 << 20;
/// Most parts of a post-processor's template, and tokens of each.
const PARTS: u64 = 64;

/// What the steps of a component cost so far.
struct Cost<'a> {
    component: &'a str,
    steps: u64,
    growth: u64,
}

/// Checks a normalizer, pre-tokenizer, post-processor or decoder.
///
/// # Errors
/// The first value that is out of range.
pub(super) fn check(component: &str, value: &Value) -> Result<(), OutOfRange> {
    let mut cost = Cost { component, steps: 0, growth: 1 };
    cost.add(value)
}

impl Cost<'_> {
    fn at_most(&self, key: &str, value: u64, most: u64) -> Result<(), OutOfRange> {
        match value <= most {
            true => Ok(()),
            false => Err(OutOfRange::above(&format!("{}{key}", self.component), value, most)),
        }
    }

    /// Adds a step, or the steps of a sequence. The parser limits the depth.
    fn add(&mut self, value: &Value) -> Result<(), OutOfRange> {
        match value {
            Value::Array(list) => list.iter().try_for_each(|item| self.add(item)),
            Value::Object(map) => {
                if let Some(kind) = map.get("type").and_then(Value::as_str) {
                    self.add_step(kind, value)?;
                }
                map.values().try_for_each(|inner| self.add(inner))
            }
            _ => Ok(()),
        }
    }

    fn add_step(&mut self, kind: &str, step: &Value) -> Result<(), OutOfRange> {
        self.steps += 1;
        self.at_most(" (steps)", self.steps, STEPS)?;
        let text = |key: &str| step.get(key).and_then(Value::as_str).unwrap_or_default();
        let bytes = |key: &str| text(key).len() as u64;
        let (regex, literal) = (&step["pattern"]["Regex"], &step["pattern"]["String"]);
        let pattern = regex.as_str().map_or(0, cost_of_regex);
        self.at_most(".pattern.Regex (bytes times repetitions)", pattern, PATTERN)?;
        let literal = literal.as_str().map_or(0, str::len) as u64;
        self.at_most(".pattern.String (bytes)", literal, INSERTED)?;
        for key in ["content", "prepend", "prefix", "suffix", "replacement"] {
            self.at_most(&format!(".{key} (bytes)"), bytes(key), INSERTED)?;
        }
        let growth = match kind {
            // A regular expression may match at each byte; an empty text does between them.
            "Replace" => bytes("content").div_ceil(literal.max(1)),
            "Prepend" => 1 + bytes("prepend") / 16,
            "ByteLevel" => 2,
            "Metaspace" => 3,
            "Precompiled" => {
                let table = bytes("precompiled_charsmap");
                self.at_most(".precompiled_charsmap (bytes)", table, CHARACTER_MAP)?;
                // Two of them are within the cap, three are not.
                64
            }
            "TemplateProcessing" => self.template(step)?,
            _ => 1,
        };
        self.growth = self.growth.saturating_mul(growth.max(1));
        self.at_most(" (bytes that its steps make of one)", self.growth, GROWTH)
    }

    /// How often a template repeats its text.
    fn template(&self, step: &Value) -> Result<u64, OutOfRange> {
        let length = |list: &Value| list.as_array().map_or(0, Vec::len) as u64;
        for key in ["single", "pair"] {
            self.at_most(&format!(".{key} (parts)"), length(&step[key]), PARTS)?;
        }
        for token in step["special_tokens"].as_object().into_iter().flat_map(|map| map.values()) {
            self.at_most(".special_tokens.ids", length(&token["ids"]), PARTS)?;
            self.at_most(".special_tokens.tokens", length(&token["tokens"]), PARTS)?;
        }
        let parts = step["single"].as_array().into_iter().flatten();
        Ok(parts.filter(|part| part.get("Sequence").is_some()).count() as u64)
    }
}

/// The bytes of a pattern times the numbers of its repetitions such as `{3}` or `{1,3}`. It is more
/// than the matcher's program takes, as it counts repetitions that are not nested as if they were.
fn cost_of_regex(pattern: &str) -> u64 {
    let mut cost = pattern.len() as u64;
    for (at, _) in pattern.match_indices('{') {
        // The braces of a class or a character, such as `\p{L}` and `\x{1F600}`.
        let is_name =
            ["\\p", "\\P", "\\x", "\\u", "\\U"].iter().any(|name| pattern[..at].ends_with(name));
        let Some((inside, _)) = pattern[at + 1..].split_once('}') else { continue };
        // A repetition without an end counts as one of its beginning.
        let numbers = inside.rsplit(',').map(str::trim);
        let most = numbers.clone().find(|number| !number.is_empty()).unwrap_or("1");
        if !is_name && most.bytes().all(|digit| digit.is_ascii_digit()) {
            cost = cost.saturating_mul(most.parse().unwrap_or(u64::MAX).max(1));
        }
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_known_models_are_within_the_cap() {
        let llama = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        assert_eq!(cost_of_regex(llama), 3 * llama.len() as u64);
        assert_eq!(cost_of_regex(r"\p{N}{2,}"), 18);
        assert_eq!(cost_of_regex("((?=a){1000}){1000}"), 19_000_000);
        assert_eq!(cost_of_regex("a{"), 2);
        assert_eq!(cost_of_regex("a{99999999999999999999999}"), u64::MAX);
        assert_eq!(cost_of_regex(r"[\x{1000}\p{10}]"), 16);
    }
}
