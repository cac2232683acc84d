//! What a person sees of a run as it goes: a progress bar on a terminal, plain lines otherwise.
//!
//! Everything goes to stderr, so that stdout has only what a command was asked for.

use std::io::{self, Write};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use shoal_protocol::ids::StageSpan;

use crate::events::{RunEvent, StepReport};
use crate::logging;

/// The bars on stderr. There is one stderr, so there is one of these.
static TERMINAL: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Without a terminal, about this many of a run's steps are printed.
const LINES: u64 = 20;

/// Weight of the newest step in the average of tokens per second.
const NEWEST: f64 = 0.2;

/// Writes to stderr without tearing the bars.
#[derive(Debug, Clone, Copy, Default)]
pub struct AboveBars;

impl Write for AboveBars {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        TERMINAL.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Prints a line to stderr, above the bars; where logs are JSON, as one of them. A stderr that is
/// closed is no reason to fail.
pub fn say(line: &str) {
    if logging::is_json() {
        tracing::info!(target: "shoal", "{}", line.trim());
        return;
    }
    let mut text = line.to_owned();
    text.push('\n');
    let _ = AboveBars.write_all(text.as_bytes());
}

/// The view of one run.
#[derive(Debug)]
pub struct Progress {
    name: &'static str,
    /// None where stderr is no terminal.
    bar: Option<ProgressBar>,
    pace: Pace,
    waiting: String,
}

impl Progress {
    /// A view that is headed `name`.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let bar = (!TERMINAL.is_hidden()).then(|| {
            let style = ProgressStyle::with_template("{prefix:>9} {bar:14.cyan/dim} {wide_msg}")
                .expect("the template is valid")
                .progress_chars("━╸─");
            TERMINAL.add(ProgressBar::new(0).with_style(style).with_prefix(name))
        });
        Self { name, bar, pace: Pace::default(), waiting: String::new() }
    }

    /// Shows the next event.
    pub fn note(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Started { steps, .. } => {
                self.pace.steps = *steps;
                if let Some(bar) = &self.bar {
                    bar.set_length(*steps);
                }
                self.tell(event);
            }
            // `start` says it, whoever sees the progress.
            RunEvent::Listening { .. }
            | RunEvent::Draining { .. }
            | RunEvent::ConnectionRefused { .. }
            | RunEvent::AccessList { .. } => {}
            RunEvent::Waiting { .. } => self.wait(event),
            RunEvent::Committed(step) => self.step(step),
            RunEvent::Finished { .. } => {
                self.clear();
                self.say(&self.pace.summary());
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
            Some(bar) => bar.set_message(text.clone()),
            None => self.say(&text),
        }
        self.waiting = text;
    }

    fn step(&mut self, step: &StepReport) {
        self.pace.note(step);
        let text = self.pace.describe(step);
        match &self.bar {
            Some(bar) => {
                bar.set_position(step.step + 1);
                bar.set_message(text);
            }
            None if self.pace.is_worth_a_line(step) => self.say(&format!("step {text}")),
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

/// An event in words, on one line; none where there is nothing to tell.
pub(crate) fn describe(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::Started { run, stages, steps, tokens_per_step, .. } => format!(
            "run {:.8}: {steps} steps of {tokens_per_step} tokens, {} of the model",
            run.to_string(),
            counted(u64::from(*stages), "stage"),
        ),
        RunEvent::Waiting { stages, members } => waiting(stages, *members),
        RunEvent::Admitted { peer, span } => format!("{} hosts {}", peer.short(), place(*span)),
        RunEvent::Joined { span } => format!("joined, hosting {}", place(*span)),
        RunEvent::MoveBegun { .. }
        | RunEvent::Moves { .. }
        | RunEvent::MoveCancelled { .. }
        | RunEvent::Moved { .. } => return describe_move(event),
        RunEvent::Serving { version: 0 } => return None,
        RunEvent::Serving { version } => format!("caught up at version {version} of the weights"),
        RunEvent::Checkpoint { version, directory, hash } => format!(
            "version {version} of the weights saved in {directory} ({:.8})",
            hash.to_string()
        ),
        RunEvent::Lost { peer, span, how } if span.is_empty() => {
            format!("{} is gone, which hosted nothing: {how}", peer.short())
        }
        RunEvent::Lost { peer, span, how } => {
            format!("{} is gone from {}: {how}", peer.short(), place(*span))
        }
        RunEvent::Rewound { version, steps } => format!(
            "a stage lost its last replica: the run goes back to version {version}, {} are \
             computed again",
            counted(*steps, "step")
        ),
        RunEvent::Anchors { count } => {
            format!("{} keep the run's log", counted(*count as u64, "peer"))
        }
        RunEvent::Paused { answering, anchors } => format!(
            "the run pauses: {answering} of {anchors} peers that keep its log answer, and more \
             than half must"
        ),
        // A first term is nothing to tell of.
        RunEvent::BecameCoordinator { term: 0 | 1, .. } => return None,
        RunEvent::BecameCoordinator { claims, .. } => {
            format!("keeps the run from now on: its members hold {}", counted(*claims, "claim"))
        }
        RunEvent::StageLost { stages, version } => format!(
            "no replica of stage {} is left: looks for version {version} of the weights",
            listed(stages)
        ),
        RunEvent::Draining { source } => {
            format!("{source}: leaves when the open step is committed")
        }
        RunEvent::Killed { index } => {
            format!("peer {index} was killed: another takes its place")
        }
        RunEvent::Finished { .. } => "the run is over".to_owned(),
        RunEvent::Stopped { reason } => format!("the run stopped: {reason}"),
        // A flood of strangers must not hide how the run goes.
        RunEvent::ConnectionRefused { .. } => return None,
        RunEvent::OwnPort(port) => match port.fix() {
            None => format!("this peer's UDP port is {port}"),
            Some(fix) => format!("this peer's UDP port is {port}: {fix}; {}", port.meanwhile()),
        },
        RunEvent::AccessList { banned, revoked, allowed, .. } => format!(
            "the roster is new: {banned} banned, {revoked} tickets revoked, {allowed} let in by name"
        ),
        RunEvent::Listening { .. } | RunEvent::Committed(_) => return None,
    })
}

/// How a member goes from one stage to another.
fn describe_move(event: &RunEvent) -> Option<String> {
    Some(match event {
        RunEvent::MoveBegun { peer, from, to, reason } => {
            let (peer, from) = (peer.short(), place(*from));
            format!("{peer} goes from {from} to stage {to}: {}", reason.words())
        }
        RunEvent::Moves { peer, from, to, step, .. } => {
            let (peer, from) = (peer.short(), place(*from));
            format!("{peer} hosts stage {to} instead of {from} from step {step} on")
        }
        RunEvent::MoveCancelled { peer, to, obstacle, .. } => {
            format!("{} does not go to stage {to}: {obstacle}", peer.short())
        }
        RunEvent::Moved { from, to, .. } => {
            format!("hosts stage {to} instead of {} from now on", place(*from))
        }
        _ => return None,
    })
}

fn place(span: StageSpan) -> String {
    if span.is_empty() { "nothing".to_owned() } else { format!("stage {span}") }
}

/// How fast a run goes, and how far it came.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pace {
    steps: u64,
    done: u64,
    tokens: u64,
    seconds: f64,
    first_loss: Option<f64>,
    last_loss: f64,
    /// Moving averages.
    pub(crate) tokens_per_second: f64,
    pub(crate) seconds_per_step: f64,
}

impl Pace {
    pub(crate) fn note(&mut self, step: &StepReport) {
        self.done = step.step + 1;
        self.tokens += step.tokens;
        self.seconds += step.seconds;
        let newest = if self.first_loss.is_none() { 1.0 } else { NEWEST };
        self.first_loss.get_or_insert(step.loss);
        self.last_loss = step.loss;
        let rate = step.tokens as f64 / step.seconds.max(1e-9);
        self.tokens_per_second += newest * (rate - self.tokens_per_second);
        self.seconds_per_step += newest * (step.seconds - self.seconds_per_step);
    }

    fn describe(&self, step: &StepReport) -> String {
        let left = self.steps.saturating_sub(self.done);
        let left = (left as f64 * self.seconds_per_step).round() as u64;
        format!(
            "{}/{}  loss {:.3}  {} tokens/s  {}  {}:{:02} left",
            self.done,
            self.steps,
            step.loss,
            with_prefix(self.tokens_per_second),
            counted(step.peers as u64, "peer"),
            left / 60,
            left % 60,
        )
    }

    fn is_worth_a_line(&self, step: &StepReport) -> bool {
        let every = self.steps.div_ceil(LINES).max(1);
        step.step.is_multiple_of(every) || self.done == self.steps
    }

    fn summary(&self) -> String {
        let Some(first) = self.first_loss else {
            return "no steps to train".to_owned();
        };
        format!(
            "{} in {:.1} s, loss {first:.3} to {:.3}, {} tokens/s",
            counted(self.done, "step"),
            self.seconds,
            self.last_loss,
            with_prefix(self.tokens as f64 / self.seconds.max(1e-9)),
        )
    }
}

fn waiting(stages: &[u16], members: usize) -> String {
    let hosts = match stages {
        [] => None,
        [one] => Some(format!("a host of stage {one}")),
        many => Some(format!("hosts of stages {}", listed(many))),
    };
    let more = (members > 0).then(|| counted(members as u64, "more peer"));
    let parts: Vec<String> = hosts.into_iter().chain(more).collect();
    format!("waits for {}", if parts.is_empty() { "nobody".into() } else { parts.join(" and ") })
}

/// `1`, `1, 2`.
fn listed(numbers: &[u16]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u16::to_string).collect();
    numbers.join(", ")
}

/// `1 peer`, `2 peers`.
pub(crate) fn counted(count: u64, thing: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {thing}{plural}")
}

/// Three digits or so, with `k`, `M` or `G`.
pub(crate) fn with_prefix(value: f64) -> String {
    match value {
        value if value >= 1e9 => format!("{:.2}G", value / 1e9),
        value if value >= 1e6 => format!("{:.2}M", value / 1e6),
        value if value >= 1e4 => format!("{:.1}k", value / 1e3),
        value if value >= 1e3 => format!("{:.2}k", value / 1e3),
        value => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f64) -> StepReport {
        StepReport {
            step,
            loss,
            held_out_loss: None,
            gradient_norm: 1.0,
            tokens: 4000,
            seconds: 0.5,
            counted: 8,
            replayed: 0,
            all_reduce_seconds: None,
            duplicated: 0,
            peers: 4,
        }
    }

    #[test]
    fn a_step_says_how_far_how_good_how_fast() {
        let mut pace = Pace { steps: 41, ..Pace::default() };
        pace.note(&step(0, 5.5));
        assert_eq!(
            pace.describe(&step(0, 5.5)),
            "1/41  loss 5.500  8.00k tokens/s  4 peers  0:20 left"
        );
        pace.note(&step(1, 2.25));
        assert_eq!(pace.summary(), "2 steps in 1.0 s, loss 5.500 to 2.250, 8.00k tokens/s");
    }

    #[test]
    fn without_a_terminal_a_long_run_has_few_lines() {
        for (steps, lines) in [(0, 0), (1, 1), (15, 15), (20, 20), (150, 20), (10_000, 21)] {
            let mut pace = Pace { steps, ..Pace::default() };
            let printed = (0..steps)
                .filter(|&index| {
                    let step = step(index, 1.0);
                    pace.note(&step);
                    pace.is_worth_a_line(&step)
                })
                .count();
            assert_eq!(printed, lines, "of {steps} steps");
        }
    }

    #[test]
    fn waiting_names_what_is_missing() {
        assert_eq!(waiting(&[1, 2], 3), "waits for hosts of stages 1, 2 and 3 more peers");
        assert_eq!(waiting(&[1], 0), "waits for a host of stage 1");
        assert_eq!(waiting(&[], 1), "waits for 1 more peer");
    }

    #[test]
    fn who_hosts_nothing_is_told_of_as_such() {
        let span = StageSpan::none();
        let text = describe(&RunEvent::Joined { span });
        assert_eq!(text.as_deref(), Some("joined, hosting nothing"));
        let text = describe(&RunEvent::Joined { span: StageSpan::all(3) });
        assert_eq!(text.as_deref(), Some("joined, hosting stage 0-2"));
    }

    #[test]
    fn a_run_of_no_steps_has_a_summary() {
        assert_eq!(Pace::default().summary(), "no steps to train");
    }

    #[test]
    fn rates_are_short() {
        assert_eq!(with_prefix(950.4), "950");
        assert_eq!(with_prefix(8_250.0), "8.25k");
        assert_eq!(with_prefix(82_500.0), "82.5k");
        assert_eq!(with_prefix(1_234_567.0), "1.23M");
        assert_eq!(with_prefix(2.05e9), "2.05G");
    }
}
