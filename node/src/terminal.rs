//! The terminal of this process: stderr, shared by progress bars and lines.

use std::io::{self, Write};
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

/// Shows a bar; none where stderr is no terminal.
pub(crate) fn show(bar: impl FnOnce() -> ProgressBar) -> Option<ProgressBar> {
    (!BARS.is_hidden()).then(|| BARS.add(bar()))
}
