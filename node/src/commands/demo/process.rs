//! Processes of this very program, and what becomes of them.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::cli::LogFormat;
use crate::events::RunEvent;

/// A swarm that says nothing for this long has failed.
const PATIENCE: Duration = Duration::from_secs(300);

/// When the run is over every process ends within this time.
const FAREWELL: Duration = Duration::from_secs(30);

/// Of a log no more than this is read to find out what went wrong.
const TAIL: u64 = 16 << 10;

/// A running process; it is killed when this is dropped, and when the demo dies.
#[derive(Debug)]
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts this program with other arguments. Its stderr goes to the file `log`.
    ///
    /// # Errors
    /// When the program or the file cannot be opened.
    pub(super) fn start(
        name: &str,
        arguments: &[OsString],
        log: &Path,
        format: LogFormat,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program cannot be found")?;
        let stderr = File::create(log).with_context(|| log.display().to_string())?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .args(["--log-format", if format == LogFormat::Json { "json" } else { "text" }])
            // Threads that wait by spinning would take the other peers' time.
            .env("OMP_WAIT_POLICY", "passive")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .kill_on_drop(true);
        // SAFETY: between fork and exec it makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
        }
        let child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    fn lines(&mut self) -> Lines<BufReader<ChildStdout>> {
        let stdout = self.child.stdout.take().expect("it is piped and taken once");
        BufReader::new(stdout).lines()
    }

    async fn end(mut self) -> anyhow::Result<()> {
        let status = self.child.wait().await?;
        if !status.success() {
            let reason =
                failure_in(&self.log).map_or_else(String::new, |reason| format!(": {reason}"));
            bail!("{} failed ({status}){reason}; its log is {}", self.name, self.log.display());
        }
        Ok(())
    }
}

/// Passes on the events of the first process, until all have ended.
///
/// # Errors
/// When one fails, or nothing happens for a long time.
pub(super) async fn watch(
    mut processes: Vec<Process>,
    mut note: impl FnMut(&RunEvent),
) -> anyhow::Result<()> {
    let mut lines = processes[0].lines();
    let mut listening = true;
    let mut running: FuturesUnordered<_> = processes.into_iter().map(Process::end).collect();
    while listening || !running.is_empty() {
        let patience = if listening { PATIENCE } else { FAREWELL };
        tokio::select! {
            line = lines.next_line(), if listening => match line? {
                Some(line) => note(&serde_json::from_str(&line).context("no event of a run")?),
                None => listening = false,
            },
            Some(ended) = running.next(), if !running.is_empty() => ended?,
            () = tokio::time::sleep(patience) => {
                bail!("nothing happened for {} s: the logs may tell why", patience.as_secs())
            }
        }
    }
    Ok(())
}

/// The reason in the last line of a log that tells of a failure; none in that of a process that was
/// killed.
fn failure_in(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    String::from_utf8_lossy(&bytes).lines().rev().find_map(failure_of)
}

/// The reason in a line that tells of a failure, in either log format.
fn failure_of(line: &str) -> Option<String> {
    if let Some(reason) = line.strip_prefix("shoal: ") {
        return Some(reason.to_owned());
    }
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    (line["level"] == "ERROR").then(|| line["fields"]["message"].as_str().map(str::to_owned))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_tells_why_its_process_failed() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("peer.log");
        let reason = |text: &str| {
            std::fs::write(&log, text).expect("written");
            failure_in(&log)
        };
        let no_room = Some("no room".to_owned());
        assert_eq!(reason("INFO a\nshoal: no room\nlibtorch says bye\n"), no_room);
        assert_eq!(
            reason(
                "{\"level\":\"ERROR\",\"fields\":{\"message\":\"no room\"}}\n{\"level\":\"INFO\"}\n"
            ),
            no_room
        );
        assert_eq!(reason("INFO a\nINFO b\n\n"), None);
        assert_eq!(reason(""), None);
    }
}
