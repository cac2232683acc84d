//! A process of this program, and how it ends.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use anyhow::{Context, bail};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};

use crate::cli::LogFormat;
use crate::events::RunEvent;

/// Bytes at the end of a log that are searched for the reason of a failure.
const LOG_TAIL: u64 = 16 << 10;

/// A running process. Dropping this kills it, and so does the death of the demo.
#[derive(Debug)]
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// How a process ended that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// Its exit code was 0.
    Finished,
    /// The demo or somebody else killed it; the text names the process and the signal.
    Killed(String),
}

impl Process {
    /// Starts this program with other arguments. Its stderr is appended to the file `log`; its stdout is a
    /// stream of events where `reports`.
    ///
    /// # Errors
    /// When the program or the file cannot be opened.
    pub(super) fn start(
        name: &str,
        arguments: &[OsString],
        log: &Path,
        format: LogFormat,
        reports: bool,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program cannot be found")?;
        // A restarted peer appends to its log.
        let stderr = File::options().create(true).append(true).open(log);
        let stderr = stderr.with_context(|| log.display().to_string())?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .args(["--log-format", if format == LogFormat::Json { "json" } else { "text" }])
            // Threads that wait by spinning would take the other peers' time.
            .env("OMP_WAIT_POLICY", "passive")
            .stdin(Stdio::null())
            .stdout(if reports { Stdio::piped() } else { Stdio::null() })
            .stderr(stderr)
            .kill_on_drop(true);
        // SAFETY: between fork and exec it makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
        }
        let child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    /// The number by which the system knows the process.
    pub(super) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Forwards the process's events and waits for its end, or kills it on request.
    ///
    /// # Errors
    /// When the process fails, or writes no event where one belongs.
    pub(super) async fn end(
        mut self,
        kill: oneshot::Receiver<()>,
        events: mpsc::Sender<RunEvent>,
    ) -> anyhow::Result<Ended> {
        let stdout = self.child.stdout.take();
        let forward = async {
            let Some(stdout) = stdout else { return Ok(()) };
            let mut lines = BufReader::new(stdout).lines();
            while let Some(line) = lines.next_line().await? {
                let event = serde_json::from_str(&line).context("no event of a run")?;
                // The receiver is closed only while the demo ends.
                let _ = events.send(event).await;
            }
            Ok::<_, anyhow::Error>(())
        };
        let (forwarded, ended) = tokio::join!(forward, self.wait(kill));
        let ended = ended?;
        // A kill may cut the last line short.
        if ended == Ended::Finished {
            forwarded?;
        }
        Ok(ended)
    }

    async fn wait(&mut self, kill: oneshot::Receiver<()>) -> anyhow::Result<Ended> {
        let status = tokio::select! {
            status = self.child.wait() => status?,
            Ok(()) = kill => {
                self.child.start_kill()?;
                self.child.wait().await?
            }
        };
        let (name, log) = (&self.name, self.log.display());
        if status.success() {
            return Ok(Ended::Finished);
        }
        if was_killed(status) {
            return Ok(Ended::Killed(format!("{name} was killed ({status}); its log is {log}")));
        }
        let reason = failure_in(&self.log).map_or_else(String::new, |reason| format!(": {reason}"));
        bail!("{name} failed ({status}){reason}; its log is {log}")
    }
}

/// Whether a signal of those that people and systems send ended a process. A fault of its own, such as
/// SIGSEGV or SIGABRT, is a failure.
fn was_killed(status: ExitStatus) -> bool {
    let signal = status.signal().and_then(|number| Signal::try_from(number).ok());
    matches!(
        signal,
        Some(Signal::SIGKILL | Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT)
    )
}

/// The reason in the last line of a log that reports a failure.
fn failure_in(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut bytes).ok()?;
    String::from_utf8_lossy(&bytes).lines().rev().find_map(failure_of)
}

/// The reason in a line that reports a failure, in either log format.
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

    #[test]
    fn a_kill_is_told_from_a_failure() {
        let by_signal = |signal: Signal| was_killed(ExitStatus::from_raw(signal as i32));
        assert!(by_signal(Signal::SIGKILL) && by_signal(Signal::SIGTERM));
        assert!(!by_signal(Signal::SIGSEGV) && !by_signal(Signal::SIGABRT));
        // An exit code is in the second byte.
        assert!(!was_killed(ExitStatus::from_raw(1 << 8)));
        assert!(!was_killed(ExitStatus::from_raw(0)));
    }
}
