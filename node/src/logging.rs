//! Log lines on stderr, as text or as JSON, and the one line about a failure.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::anyhow;
use clap::ValueEnum;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::exit::{Exit, ExitWith};
use crate::terminal::{self, AboveBars};

/// The default filter: everything that an operator should know, and no more.
const DEFAULT_FILTER: &str = "warn,shoal=info,shoal_node=info,shoal_protocol=info";

/// Noisy targets, quiet unless a filter names them.
const QUIET: &str = "libp2p_kad=error,openraft=off";

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

static FORMAT: OnceLock<LogFormat> = OnceLock::new();

impl MakeWriter<'_> for AboveBars {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

/// Starts logging, once in a process. Without the user's `filter`, `SHOAL_LOG` counts.
///
/// # Errors
/// When the filter is malformed.
pub fn start(format: LogFormat, filter: Option<&str>) -> anyhow::Result<()> {
    FORMAT.get_or_init(|| format);
    let from_environment = std::env::var("SHOAL_LOG").ok();
    let filter = filter.or(from_environment.as_deref()).unwrap_or(DEFAULT_FILTER);
    let filter = EnvFilter::try_new(format!("{QUIET},{filter}"))
        .map_err(|error| anyhow!("`{filter}` does not say what to log: {error}"))
        .exit_with(Exit::Usage)?;
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = tracing_subscriber::fmt::layer().with_writer(AboveBars).with_ansi(colours);
    let lines = match format {
        LogFormat::Text => lines.with_target(false).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
    };
    let counts = Counts.with_filter(LevelFilter::WARN);
    tracing_subscriber::registry().with(lines).with(counts).init();
    Ok(())
}

/// Counts warnings and errors, whether they are shown or not.
struct Counts;

/// Warnings and errors of this process, which has one log.
static WARNINGS: AtomicU64 = AtomicU64::new(0);
static ERRORS: AtomicU64 = AtomicU64::new(0);

impl<S: Subscriber> Layer<S> for Counts {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let count = if *event.metadata().level() == Level::ERROR { &ERRORS } else { &WARNINGS };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the number of warnings and of errors so far.
#[must_use]
pub fn counted() -> (u64, u64) {
    (WARNINGS.load(Ordering::Relaxed), ERRORS.load(Ordering::Relaxed))
}

/// Returns whether stderr has JSON only.
#[must_use]
pub fn is_json() -> bool {
    FORMAT.get() == Some(&LogFormat::Json)
}

/// Reports the failure of the process.
pub fn report_failure(reason: &str) {
    if is_json() {
        tracing::error!(target: "shoal", "{reason}");
    } else {
        terminal::print_line(&format!("shoal: {reason}"));
    }
}

/// Reports every panic in one line and ends the process, since other threads may wait for the
/// panicked one without end.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let text = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no reason given");
        match text.strip_prefix("failed printing to stdout: ") {
            // The reader has what it wanted, as `head` does, and the rest goes nowhere.
            Some(cause) if cause.starts_with("Broken pipe") => {
                std::process::exit(Exit::Failed as i32);
            }
            Some(cause) => {
                report_failure(&format!("the result cannot be written to stdout: {cause}"));
                std::process::exit(Exit::Failed as i32);
            }
            None => {}
        }
        let reason = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let place = panic.location().map_or_else(String::new, |place| format!(" at {place}"));
        report_failure(&format!("a mistake in shoal itself{place}: {reason}"));
        std::process::exit(Exit::Failed as i32);
    }));
}
