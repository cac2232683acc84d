//! The filter `tojson`, as transformers defines it: Python's `json.dumps`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::limits;

/// Deepest nesting of a value.
const MAX_DEPTH: usize = 128;

/// How values are written.
struct Style {
    ascii: bool,
    indent: Option<String>,
    between: String,
    colon: String,
    sorted: bool,
}

/// The filter.
pub(super) fn tojson(state: &State, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.filter(|indent| !indent.is_none()).map(|indent| {
        let width = indent.as_usize().unwrap_or(0).min(64);
        indent.as_str().map_or_else(|| " ".repeat(width), str::to_owned)
    });
    let separators: Option<Value> = options.get("separators")?;
    let separators = separators.filter(|separators| !separators.is_none());
    let separator = |place: usize| -> Option<String> {
        let found = separators.as_ref()?.get_item_by_index(place).ok()?;
        found.as_str().map(str::to_owned)
    };
    let style = Style {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        between: separator(0)
            .unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned()),
        colon: separator(1).unwrap_or_else(|| ": ".to_owned()),
        indent,
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(state, value, 0, &mut text)?;
    Ok(Value::from(text))
}

impl Style {
    fn write(
        &self,
        state: &State,
        value: &Value,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        // A value in a list costs its text, and the separators and indents before and behind it.
        let indent = self.indent.as_ref().map_or(0, |indent| indent.len() * (depth + 1));
        let around = self.between.len() + self.colon.len() + indent;
        limits::charge(state, around + value.as_str().map_or(0, str::len))?;
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.write_items(state, ('[', ']'), items, depth, out)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    items.push((Some(key_text(&key)), item));
                }
                if self.sorted {
                    items.sort_by(|(one, _), (other, _)| one.cmp(other));
                }
                self.write_items(state, ('{', '}'), items, depth, out)?;
            }
            kind => {
                let reason = format!("tojson: a value of type {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn write_items(
        &self,
        state: &State,
        (open, close): (char, char),
        items: Vec<(Option<String>, Value)>,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        out.push(open);
        let empty = items.is_empty();
        for (place, (key, item)) in items.into_iter().enumerate() {
            if place > 0 {
                out.push_str(&self.between);
            }
            self.new_line(depth + 1, out);
            if let Some(key) = key {
                limits::charge(state, key.len())?;
                self.write_text(&key, out);
                out.push_str(&self.colon);
            }
            self.write(state, &item, depth + 1, out)?;
        }
        if !empty {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                control if control < ' ' => out.push_str(&format!("\\u{:04x}", control as u32)),
                other if self.ascii && !(' '..='~').contains(&other) => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

/// A key as Python's `json.dumps` writes it.
fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key),
        _ => key.to_string(),
    }
}

/// A number as Python writes it.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// A number as Python's `str` writes it.
pub(super) fn printed(value: &Value) -> String {
    match number(value).as_str() {
        "NaN" => "nan".to_owned(),
        "Infinity" => "inf".to_owned(),
        "-Infinity" => "-inf".to_owned(),
        other => other.to_owned(),
    }
}

/// Refuses a list or object that the engine prints in another way than Python.
///
/// # Errors
/// If it holds a float with an exponent, a text of the filter `safe`, or nothing under a name.
pub(super) fn refuse_unlike(state: &State, value: &Value) -> Result<(), Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
        || !is_unlike(state, value, 0)?
    {
        return Ok(());
    }
    let reason = "a list or object with an undefined value, a text marked as safe, or a number below 0.0001 or from 1e16 on is printed in \
                  another way than in Python: print it with tojson";
    Err(Error::new(ErrorKind::InvalidOperation, reason))
}

/// Whether a value within a list is printed in another way.
fn is_unlike(state: &State, value: &Value, depth: usize) -> Result<bool, Error> {
    limits::charge(state, 1)?;
    match value.kind() {
        ValueKind::Undefined => Ok(true),
        ValueKind::String => Ok(value.is_safe()),
        ValueKind::Number => Ok(!value.is_integer() && printed(value).contains(['e', 'n'])),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable if depth <= MAX_DEPTH => {
            let is_map = value.kind() == ValueKind::Map;
            for item in value.try_iter()? {
                let item = if is_map { value.get_item(&item)? } else { item };
                if is_unlike(state, &item, depth + 1)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        _ => Ok(false),
    }
}

/// The `repr` of a float in Python: the shortest digits that give it back, with an exponent below
/// 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let size = value.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = value.to_string();
    if text.contains('.') { text } else { format!("{text}.0") }
}

#[cfg(test)]
mod tests {
    use super::float;

    #[test]
    fn floats_are_written_as_by_python() {
        let cases = [
            (0.1, "0.1"),
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
        ];
        for (value, text) in cases {
            assert_eq!(float(value), text);
        }
    }
}
