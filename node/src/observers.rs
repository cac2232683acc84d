//! All observers inside the process: the event stream, the progress view, the report, the status
//! and TensorBoard.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::driver::observer::Observer;
use crate::event_text::describe;
use crate::events::RunEvent;
use crate::progress::{self, Progress};
use crate::report::Report;
use crate::status::StatusWatch;
use crate::tensorboard::TensorBoard;
use crate::terminal;

/// The destination of a run's typed events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventSink {
    /// Standard output.
    Stdout,
    /// A file.
    File(PathBuf),
}

impl From<OsString> for EventSink {
    fn from(path: OsString) -> Self {
        if path == "-" { Self::Stdout } else { Self::File(path.into()) }
    }
}

/// Passes every event of a run to each observer once.
pub struct Observers {
    events: Option<BufWriter<Box<dyn Write + Send>>>,
    progress: Option<Progress>,
    report: Report,
    status_watch: StatusWatch,
    tensorboard: Option<TensorBoard>,
}

impl std::fmt::Debug for Observers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observers").field("report", &self.report).finish_non_exhaustive()
    }
}

impl Observers {
    /// Opens the destination of the events, and TensorBoard's folder. Unless the events go to stdout,
    /// the terminal shows the progress.
    ///
    /// # Errors
    /// When a file cannot be made.
    pub fn new(
        events: Option<&EventSink>,
        tensorboard: Option<&Path>,
        name: &'static str,
    ) -> anyhow::Result<Self> {
        let sink: Option<Box<dyn Write + Send>> = match events {
            None => None,
            Some(EventSink::Stdout) => Some(Box::new(io::stdout())),
            Some(EventSink::File(path)) => {
                let file = File::create(path)
                    .with_context(|| format!("events cannot be written to {}", path.display()))?;
                Some(Box::new(file))
            }
        };
        let progress = (events != Some(&EventSink::Stdout)).then(|| Progress::new(name));
        Ok(Self {
            events: sink.map(BufWriter::new),
            progress,
            report: Report::new(),
            status_watch: StatusWatch::default(),
            tensorboard: tensorboard.map(TensorBoard::open).transpose()?,
        })
    }

    /// Returns the run so far, as a report.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }
}

impl Observer for Observers {
    /// Passes an event on. A reader of the event stream that closed it gets no more events.
    fn note(&mut self, event: &RunEvent) {
        self.report.note(event);
        self.status_watch.note(event);
        if let Some(tensorboard) = &mut self.tensorboard {
            tensorboard.note(event);
        }
        if event.is_notice()
            && let Some(text) = describe(event)
        {
            progress::say(&text);
        }
        if let Some(progress) = &mut self.progress {
            progress.note(event);
        }
        if let Some(sink) = &mut self.events {
            let line = serde_json::to_string(event).expect("an event is plain data");
            // JSON allows characters that a terminal obeys.
            let line = terminal::visible(&line);
            if writeln!(sink, "{line}").and_then(|()| sink.flush()).is_err() {
                tracing::warn!("nobody reads the events any more");
                self.events = None;
            }
        }
    }

    fn status_watch(&self) -> &StatusWatch {
        &self.status_watch
    }
}
