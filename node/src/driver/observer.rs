//! Everybody who watches a run from inside its process: the event stream, the progress view, the
//! report and the board.

use std::fs::File;
use std::io::{self, BufWriter, Write};

use anyhow::Context;

use crate::cli::EventSink;
use crate::events::RunEvent;
use crate::progress::Progress;
use crate::report::Report;
use crate::status::StatusWatch;

/// Takes every event of a run once and passes it on.
pub struct Observer {
    events: Option<BufWriter<Box<dyn Write + Send>>>,
    progress: Option<Progress>,
    report: Report,
    board: StatusWatch,
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer").field("report", &self.report).finish_non_exhaustive()
    }
}

impl Observer {
    /// Events go where they are wanted; where that is not stdout, a person sees the progress.
    ///
    /// # Errors
    /// When the file for the events cannot be made.
    pub fn new(events: Option<&EventSink>, name: &'static str) -> anyhow::Result<Self> {
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
        let events = sink.map(BufWriter::new);
        Ok(Self { events, progress, report: Report::new(), board: StatusWatch::default() })
    }

    /// Passes an event on. A reader of the events that went away no longer gets any.
    pub fn note(&mut self, event: &RunEvent) {
        self.report.note(event);
        self.board.note(event);
        if let Some(progress) = &mut self.progress {
            progress.note(event);
        }
        if let Some(sink) = &mut self.events {
            let line = serde_json::to_string(event).expect("an event is plain data");
            if writeln!(sink, "{line}").and_then(|()| sink.flush()).is_err() {
                tracing::warn!("nobody reads the events any more");
                self.events = None;
            }
        }
    }

    /// Where the run hangs for whoever asks over HTTP.
    #[must_use]
    pub fn board(&self) -> &StatusWatch {
        &self.board
    }

    /// The run so far, as a report.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }
}
