//! The terminal of this process: stderr, shared by progress bars and lines; stdout for a model's text.

use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressBar};

/// The bars on stderr. A process has one stderr, and so one of these.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Writes to stderr without tearing the bars.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AboveBars;

impl Write for AboveBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        BARS.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Prints a line above the bars. A closed stderr is no reason to fail.
pub(crate) fn print_line(line: &str) {
    let mut text = line.to_owned();
    text.push('\n');
    let _ = AboveBars.write_all(text.as_bytes());
}

/// Prints a part of a model's text at once. On a terminal, control characters other than line ends and
/// tabs are replaced: a model may write what a terminal obeys.
///
/// # Errors
/// If stdout is closed.
pub(crate) fn print_model_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if out.is_terminal() {
        let obeyed = |letter: char| letter.is_control() && !['\n', '\t'].contains(&letter);
        out.write_all(text.replace(obeyed, "\u{fffd}").as_bytes())?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.flush()
}

/// Shows a bar; none where stderr is no terminal.
pub(crate) fn show(bar: impl FnOnce() -> ProgressBar) -> Option<ProgressBar> {
    (!BARS.is_hidden()).then(|| BARS.add(bar()))
}
