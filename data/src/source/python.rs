//! Lines that Python writes and JSON does not allow.

/// Most bytes behind a point or an exponent that are looked at.
const NUMBER: &[u8] = b"+-.0123456789eE";

/// What stands for half a surrogate pair: a character that no text has.
pub(super) const HALF: char = '\u{fdd0}';

/// A line with null in place of `NaN`, `Infinity` and numbers that no float holds, and with
/// [`HALF`] in place of half a surrogate pair; `None` if it has none of these. Texts are
/// not touched otherwise.
pub(super) fn to_json(line: &[u8]) -> Option<Vec<u8>> {
    let mut changed = false;
    let mut out = Vec::with_capacity(line.len() + 16);
    let mut at = 0;
    while let Some(byte) = line.get(at) {
        let rest = &line[at..];
        let word = [&b"-Infinity"[..], b"Infinity", b"NaN"]
            .into_iter()
            .find(|word| rest.starts_with(word));
        if let Some(word) = word {
            out.extend_from_slice(b"null");
            (at, changed) = (at + word.len(), true);
        } else if *byte == b'"' {
            let (length, mended) = copy_text(rest, &mut out);
            (at, changed) = (at + length, changed | mended);
        } else if byte.is_ascii_digit() || *byte == b'-' {
            let length = rest.iter().take_while(|byte| NUMBER.contains(byte)).count().max(1);
            let number =
                std::str::from_utf8(&rest[..length]).ok().and_then(|text| text.parse().ok());
            match number.is_some_and(f64::is_infinite) {
                true => (changed, _) = (true, out.extend_from_slice(b"null")),
                false => out.extend_from_slice(&rest[..length]),
            }
            at += length;
        } else {
            out.push(*byte);
            at += 1;
        }
    }
    changed.then_some(out)
}

/// Copies a text with its quotes. Returns its length, and whether half a surrogate pair was replaced.
fn copy_text(text: &[u8], out: &mut Vec<u8>) -> (usize, bool) {
    let unit = |at: usize| {
        let digits = text.get(at..at + 6).filter(|escape| escape.starts_with(b"\\u"))?;
        u16::from_str_radix(std::str::from_utf8(&digits[2..]).ok()?, 16).ok()
    };
    let mut mended = false;
    out.push(b'"');
    let mut at = 1;
    while let Some(byte) = text.get(at) {
        match (*byte, unit(at)) {
            (b'"', _) => {
                out.push(b'"');
                return (at + 1, mended);
            }
            (_, Some(0xd800..=0xdbff)) if matches!(unit(at + 6), Some(0xdc00..=0xdfff)) => {
                out.extend_from_slice(&text[at..at + 12]);
                at += 12;
            }
            (_, Some(0xd800..=0xdfff)) => {
                out.extend_from_slice(b"\\ufdd0");
                (at, mended) = (at + 6, true);
            }
            (b'\\', _) => {
                out.extend_from_slice(&text[at..(at + 2).min(text.len())]);
                at += 2;
            }
            _ => {
                out.push(*byte);
                at += 1;
            }
        }
    }
    (text.len(), mended)
}

#[cfg(test)]
mod tests {
    use super::to_json;

    #[test]
    fn what_python_writes_becomes_json() {
        let cases = [
            (
                r#"{"a": NaN, "b": [-Infinity, Infinity], "c": "NaN"}"#,
                Some(r#"{"a": null, "b": [null, null], "c": "NaN"}"#),
            ),
            (r#"{"n": 1e999, "m": -1.5e-3}"#, Some(r#"{"n": null, "m": -1.5e-3}"#)),
            (
                r#"{"t": "cut \ud83d", "u": "\ud83d\ude00"}"#,
                Some(r#"{"t": "cut \ufdd0", "u": "\ud83d\ude00"}"#),
            ),
            (r#"{"t": "a \" NaN \\", "n": 1}"#, None),
            (r#"{"t": "open"#, None),
            ("", None),
        ];
        for (line, expected) in cases {
            let found = to_json(line.as_bytes());
            assert_eq!(found.as_deref(), expected.map(str::as_bytes), "{line}");
        }
    }
}
