//! Log lines on stderr, as text or as JSON.

use anyhow::anyhow;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::cli::LogFormat;
use crate::exit::{Exit, ExitWith};
use crate::progress::AboveBars;

/// What is logged unless told otherwise: what an operator should know, and no more.
const DEFAULT_FILTER: &str = "warn,shoal=info,shoal_node=info,shoal_protocol=info";

impl MakeWriter<'_> for AboveBars {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        *self
    }
}

/// Starts logging. `filter` is what the user typed, if anything; then `SHOAL_LOG` counts.
///
/// # Errors
/// When the filter is none.
pub fn start(format: LogFormat, filter: Option<&str>) -> anyhow::Result<()> {
    let from_environment = std::env::var("SHOAL_LOG").ok();
    let filter = filter.or(from_environment.as_deref()).unwrap_or(DEFAULT_FILTER);
    let filter = EnvFilter::try_new(filter)
        .map_err(|error| anyhow!("`{filter}` says not what to log: {error}"))
        .exit_with(Exit::Usage)?;
    let colours = console_has_colours();
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(AboveBars).with_ansi(colours);
    match format {
        LogFormat::Text => lines.with_target(false).init(),
        LogFormat::Json => lines.json().init(),
    }
    Ok(())
}

fn console_has_colours() -> bool {
    use std::io::IsTerminal;
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}
