//! The progress view of a run: a bar on a terminal, plain lines otherwise.
//!
//! Everything goes to stderr, so that stdout has only the result of a command.

use indicatif::{ProgressBar, ProgressStyle};

use crate::event_text::describe;
use crate::events::{RunEvent, StepReport};
use crate::training_rate::TrainingRate;
use crate::{logging, terminal};

/// Prints a line to stderr, above the bars; as a log line where logs are JSON.
pub fn say(line: &str) {
    if logging::is_json() {
        tracing::info!(target: "shoal", "{}", line.trim());
        return;
    }
    terminal::print_line(line);
}

/// The line of a committed step, of which `text` says how far it is.
pub(crate) fn step_line(text: &str) -> String {
    format!("step {text}")
}

/// A bar of bytes with a message, hidden where stderr is no terminal.
pub(crate) fn byte_bar(name: &'static str) -> ProgressBar {
    let bar = terminal::show(|| {
        let template = "{prefix:>9} {bar:14.cyan/dim} {bytes}/{total_bytes} {eta} {wide_msg}";
        let style = ProgressStyle::with_template(template).expect("the template is valid");
        ProgressBar::new(0).with_style(style.progress_chars("━╸─")).with_prefix(name)
    });
    bar.unwrap_or_else(ProgressBar::hidden)
}

/// A bar of the rows of data that are done; hidden where stderr is no terminal.
pub(crate) fn row_bar(name: &'static str, rows: u64) -> ProgressBar {
    let bar = terminal::show(|| {
        let template = "{prefix:>9} {bar:14.cyan/dim} {pos}/{len} rows {eta}";
        let style = ProgressStyle::with_template(template).expect("the template is valid");
        ProgressBar::new(rows).with_style(style.progress_chars("━╸─")).with_prefix(name)
    });
    bar.unwrap_or_else(ProgressBar::hidden)
}

/// The view of one run.
#[derive(Debug)]
pub struct Progress {
    name: &'static str,
    /// `None` where stderr is no terminal.
    bar: Option<ProgressBar>,
    rate: TrainingRate,
    waiting: String,
}

impl Progress {
    /// A view that is headed `name`.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let bar = terminal::show(|| {
            let style = ProgressStyle::with_template("{prefix:>9} {bar:14.cyan/dim} {wide_msg}")
                .expect("the template is valid")
                .progress_chars("━╸─");
            ProgressBar::new(0).with_style(style).with_prefix(name)
        });
        Self { name, bar, rate: TrainingRate::default(), waiting: String::new() }
    }

    /// Shows the next event.
    pub fn note(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Started { steps, .. } => {
                self.rate.steps = *steps;
                if let Some(bar) = &self.bar {
                    bar.set_length(*steps);
                }
                self.tell(event);
            }
            // `start` prints the address, with or without a progress view.
            RunEvent::Listening { .. }
            | RunEvent::ConnectionRefused { .. }
            | RunEvent::AccessList { .. } => {}
            // All observers print these once.
            notice if notice.is_notice() => {}
            RunEvent::Waiting { .. } => self.wait(event),
            RunEvent::LongStep(_) => self.long_step(event),
            RunEvent::Committed(step) => self.step(step),
            RunEvent::Finished { .. } => {
                self.clear();
                self.say(&self.rate.summary());
            }
            RunEvent::Stopped { .. } => self.clear(),
            other => self.tell(other),
        }
    }

    fn tell(&self, event: &RunEvent) {
        if let Some(text) = describe(event) {
            self.say(&text);
        }
    }

    fn wait(&mut self, event: &RunEvent) {
        let text = describe(event).filter(|text| *text != self.waiting);
        let Some(text) = text else { return };
        match &self.bar {
            Some(bar) => bar.set_message(terminal::visible(&text).into_owned()),
            None => self.say(&text),
        }
        self.waiting = text;
    }

    /// Shows how far a long step is.
    fn long_step(&self, event: &RunEvent) {
        match (&self.bar, describe(event)) {
            (Some(bar), Some(text)) => bar.set_message(text),
            _ => self.tell(event),
        }
    }

    fn step(&mut self, step: &StepReport) {
        self.rate.note(step);
        let text = self.rate.describe(step);
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.rate.done.number());
                bar.set_message(text);
            }
            None if self.rate.is_worth_a_line(step) => self.say(&step_line(&text)),
            None => {}
        }
    }

    fn say(&self, text: &str) {
        say(&format!("{:>9} {text}", self.name));
    }

    fn clear(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
