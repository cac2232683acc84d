//! The terminal of this process: stderr, shared by progress bars and lines; stdout for results and a
//! model's text.
//!
//! Everything that this crate prints passes here (its lints refuse `println!`), and texts of peers,
//! files and models lose what a terminal would obey: see [`visible`].

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressBar};

/// The bars on stderr. A process has one stderr, and so one of these.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Writes to stderr without tearing the bars.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AboveBars;

impl Write for AboveBars {
    /// Writes whole lines: each call is one event of the log, or one line.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = visible_log(&String::from_utf8_lossy(bytes));
        BARS.suspend(|| io::stderr().write_all(text.as_bytes()))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Whether a terminal, or a reader of its text, is misled by a character: control characters, line
/// separators, and marks that change the direction of the text behind them.
fn is_obeyed(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Escapes what a terminal would obey, as JSON does, so that a text in JSON stays the same text. The
/// result is one line.
pub(crate) fn visible(text: &str) -> Cow<'_, str> {
    escape(text, |_| false)
}

/// As [`visible`], but for line ends and tabs.
pub(crate) fn visible_lines(text: &str) -> Cow<'_, str> {
    escape(text, |letter| matches!(letter, '\n' | '\t'))
}

fn escape(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_escaped = |letter| is_obeyed(letter) && !is_kept(letter);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        match letter {
            letter if !is_escaped(letter) => escaped.push(letter),
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            // All of them have four hexadecimal digits; writing to a text cannot fail.
            letter => drop(write!(escaped, "\\u{:04x}", letter as u32)),
        }
    }
    Cow::Owned(escaped)
}

/// A line of the log with its end. The logger's own colours stay; it escapes those in its fields.
fn visible_log(text: &str) -> String {
    let (line, end) = text.strip_suffix('\n').map_or((text, ""), |line| (line, "\n"));
    let mut parts = line.split("\u{1b}[");
    let mut shown = visible(parts.next().unwrap_or_default()).into_owned();
    for part in parts {
        let colour = part.find(|letter: char| !letter.is_ascii_digit() && letter != ';');
        let is_colour = colour.is_some_and(|end| part[end..].starts_with('m'));
        shown.push_str(if is_colour { "\u{1b}[" } else { "\\u001b[" });
        shown.push_str(&visible(part));
    }
    shown + end
}

/// Prints a line above the bars. A closed stderr is no reason to fail.
pub(crate) fn print_line(line: &str) {
    // Colours are the logger's alone.
    let text = format!("{}\n", visible(line));
    let _ = AboveBars.write_all(text.as_bytes());
}

/// Prints a result on stdout.
#[expect(clippy::print_stdout, reason = "the one place; it ends the process when nobody reads")]
pub(crate) fn print(text: &str) {
    print!("{}", visible_lines(text));
}

/// Prints bytes of this program's own on stdout as they are.
#[expect(clippy::print_stdout, reason = "it ends the process when nobody reads, as `print` does")]
pub(crate) fn print_whole(bytes: &[u8]) {
    print!("{}", String::from_utf8_lossy(bytes));
}

/// Prints a result on stdout, as `print!` does, without what a terminal would obey.
macro_rules! out {
    ($($text:tt)*) => { $crate::terminal::print(&format!($($text)*)) };
}

/// As [`out!`], with a line end.
macro_rules! outln {
    ($($text:tt)*) => { $crate::terminal::print(&(format!($($text)*) + "\n")) };
}

pub(crate) use {out, outln};

/// Prints a part of a model's text at once. On a terminal, characters that it would obey other than
/// line ends and tabs are replaced: a model may write any.
///
/// # Errors
/// If stdout is closed.
pub(crate) fn print_model_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if out.is_terminal() {
        let replaced = |letter: char| is_obeyed(letter) && !['\n', '\t'].contains(&letter);
        out.write_all(text.replace(replaced, "\u{fffd}").as_bytes())?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.flush()
}

/// Shows a bar; none where stderr is no terminal.
pub(crate) fn show(bar: impl FnOnce() -> ProgressBar) -> Option<ProgressBar> {
    (!BARS.is_hidden()).then(|| BARS.add(bar()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A text of a peer that clears the screen, forges a line and turns the direction of the rest.
    pub(crate) const HOSTILE: &str =
        "a\u{1b}[2J\u{1b}]0;x\u{7}\u{9b}31m\r\nshoal: b\u{202e}c\u{2066}\u{2028}d\u{7f}";

    #[test]
    fn what_a_terminal_obeys_is_escaped() {
        let expected =
            "a\\u001b[2J\\u001b]0;x\\u0007\\u009b31m\\r\\nshoal: b\\u202ec\\u2066\\u2028d\\u007f";
        assert_eq!(visible(HOSTILE), expected);
        assert_eq!(visible_lines("a\tb\nc\rd"), "a\tb\nc\\rd");
        assert_eq!(visible("größer ▁ 日本"), "größer ▁ 日本");
        // A text in JSON stays the same text.
        let json = serde_json::to_string(HOSTILE).expect("a text");
        let read: String = serde_json::from_str(&visible(&json)).expect("JSON");
        assert_eq!(read, HOSTILE);
    }

    #[test]
    fn a_log_line_has_the_colours_of_the_logger_alone() {
        assert_eq!(
            visible_log("\u{1b}[33m WARN\u{1b}[0m text\n"),
            "\u{1b}[33m WARN\u{1b}[0m text\n"
        );
        assert_eq!(visible_log("a\nb\u{1b}[2J\u{1b}c\n"), "a\\nb\\u001b[2J\\u001bc\n");
    }
}
