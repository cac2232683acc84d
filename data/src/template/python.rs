//! Filters and methods that Python's Jinja2 has, and the engine has not or computes in another way.

use minijinja::value::{ArgType, Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::{json, limits};

/// Most spaces of an indent.
const WIDEST: usize = 1 << 10;

/// Python's methods. They read their text and arguments, of which the engine counts the result alone.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    for read in arguments.iter().chain([value]) {
        let bytes = read.as_str().map_or_else(|| read.len().unwrap_or(0) * 16, str::len);
        limits::charge(state, bytes)?;
    }
    let text = match arguments {
        [argument] => argument.as_str(),
        _ => None,
    };
    match (value.as_str(), method, text) {
        (Some(own), "removeprefix", Some(prefix)) => {
            Ok(own.strip_prefix(prefix).unwrap_or(own).into())
        }
        (Some(own), "removesuffix", Some(suffix)) => {
            Ok(own.strip_suffix(suffix).unwrap_or(own).into())
        }
        (Some(own), "title", None) if arguments.is_empty() => Ok(title(own).into()),
        (Some(own), "splitlines", None) if arguments.is_empty() => {
            Ok(lines(own).into_iter().map(Value::from).collect())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// Each letter that follows none with a case in upper case, the others in lower case: `str.title`.
fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for character in text.chars() {
        if in_word {
            titled.extend(character.to_lowercase());
        } else {
            titled.extend(character.to_uppercase());
        }
        in_word = character.is_lowercase() || character.is_uppercase();
    }
    titled
}

/// The lines of a text, as `str.splitlines` finds them.
fn lines(text: &str) -> Vec<&str> {
    let is_end = |character: char| {
        matches!(
            character,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.find(is_end) {
        lines.push(&rest[..end]);
        let after = &rest[end..];
        let width = after.chars().next().map_or(0, char::len_utf8);
        rest = after.strip_prefix("\r\n").unwrap_or(&after[width..]);
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// The filter `indent`: its lines, each but the first behind spaces or a text. A line end at the end stays one.
pub(super) fn indent(
    state: &State,
    value: &Value,
    width: Option<Value>,
    first: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = given(width, &named, "width")?;
    let first = given(first, &named, "first")?;
    let blank: Option<bool> = named.get("blank")?;
    named.assert_all_used()?;
    let before = match width {
        None => " ".repeat(4),
        Some(width) if width.as_str().is_some() => width.to_string(),
        Some(width) => match width.as_usize() {
            Some(width) if width <= WIDEST => " ".repeat(width),
            _ => return Err(refused(&format!("indent: {width} is no width up to {WIDEST}"))),
        },
    };
    let text = text_of(state, value)?;
    // As in Jinja2, where a line end at the end keeps an empty last line.
    let with_end = format!("{text}\n");
    let lines = lines(&with_end);
    limits::charge(state, text.len() + before.len() * lines.len())?;
    let mut indented = String::new();
    for (number, line) in lines.into_iter().enumerate() {
        if number > 0 {
            indented.push('\n');
        }
        let skips_blank = line.is_empty() && blank != Some(true);
        if if number == 0 { first == Some(true) } else { !skips_blank } {
            indented.push_str(&before);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// The filter `float`: its default where a value is no number.
pub(super) fn float(value: &Value, default: Option<f64>, named: Kwargs) -> Result<f64, Error> {
    let default = given(default, &named, "default")?;
    named.assert_all_used()?;
    Ok(number(value).unwrap_or(default.unwrap_or(0.0)))
}

/// An argument by its place or by its name.
fn given<T>(placed: Option<T>, named: &Kwargs, name: &str) -> Result<Option<T>, Error>
where
    Option<T>: for<'a> ArgType<'a, Output = Option<T>>,
{
    match placed {
        Some(placed) => Ok(Some(placed)),
        None => named.get(name),
    }
}

/// A number as Python's `float` reads it; `None` where it would fail.
fn number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => digits(text).parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(value.is_true())),
        None => f64::try_from(value.clone()).ok(),
    }
}

/// The digits of a number in a text, as Python reads them.
fn digits(text: &str) -> String {
    text.trim().replace('_', "")
}

/// The filter `int`: its default where a value is no number. The fraction of a number is left out.
pub(super) fn int(value: &Value, default: Option<i64>, named: Kwargs) -> Result<Value, Error> {
    let default = given(default, &named, "default")?;
    named.assert_all_used()?;
    if value.is_integer() {
        return Ok(value.clone());
    }
    if let Some(whole) = value.as_str().and_then(|text| digits(text).parse::<i128>().ok()) {
        return Ok(Value::from(whole));
    }
    let whole =
        number(value).filter(|number| number.abs() < 2f64.powi(120)).map(|number| number as i128);
    Ok(whole.map_or_else(|| Value::from(default.unwrap_or(0)), Value::from))
}

/// The filter `escape`, with the references that Python's markupsafe writes.
pub(super) fn escape(state: &State, value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = text_of(state, value)?;
    limits::charge(state, 5 * text.len())?;
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            other => escaped.push(other),
        }
    }
    Ok(Value::from_safe_string(escaped))
}

/// The filter `string`: Python's `str`.
pub(super) fn string(state: &State, value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() { Ok(value.clone()) } else { Ok(text_of(state, value)?.into()) }
}

/// A value as `str` writes it.
fn text_of(state: &State, value: &Value) -> Result<String, Error> {
    if value.is_number() {
        return Ok(json::printed(value));
    }
    json::refuse_unlike(state, value)?;
    let text = value.to_string();
    limits::charge(state, text.len())?;
    Ok(text)
}

fn refused(reason: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.to_owned())
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn lines_are_those_of_python() {
        assert_eq!(lines("a\r\nb\rc\n\nd"), ["a", "b", "c", "", "d"]);
        assert_eq!(lines("a\u{2028}b\n"), ["a", "b"]);
        assert!(lines("").is_empty());
    }
}
