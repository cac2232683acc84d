//! Runs a command of the user on each whole checkpoint, one at a time. Training never waits for it.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bytes::BufMut;
use nix::sys::prctl;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use shoal_formats::scores::{self, ScoreError, Scores};
use shoal_protocol::ids::Step;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::background_results::{Background, BackgroundResult, FilesResult};
use crate::events::RunEvent;

/// Checkpoints that wait for their turn at most; the oldest of more is left out.
const WAITING: usize = 8;

/// Bytes at the end of each output that are kept.
const OUTPUT: usize = 64 << 10;

/// Most characters of an error's output that are shown.
const SHOWN: usize = 200;

/// A command that scores checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreCommand {
    /// For the shell.
    pub command: String,
    /// The longest time for one checkpoint.
    pub limit: Duration,
}

/// Why a checkpoint has no scores.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScoringError {
    /// The shell cannot be started.
    #[error("sh cannot be started: {0}")]
    Start(std::io::Error),
    /// Its output cannot be read.
    #[error("its output cannot be read: {0}")]
    Read(std::io::Error),
    /// It took too long.
    #[error("it took longer than {} s and was killed: give it more time with --on-checkpoint-limit", .0.as_secs_f64())]
    Late(Duration),
    /// It failed.
    #[error("it ended with {status}{said}")]
    Failed {
        /// Its status.
        status: String,
        /// The end of what it wrote to stderr.
        said: String,
    },
    /// Its output has no scores.
    #[error(transparent)]
    Output(#[from] ScoreError),
    /// Newer checkpoints arrived faster than they were scored.
    #[error("it is slower than checkpoints come: {WAITING} newer ones wait")]
    LeftOut,
}

/// The checkpoint that is scored, and those that wait.
#[derive(Debug)]
pub(super) struct ScoreQueue {
    command: Option<ScoreCommand>,
    current: Option<Current>,
    waiting: VecDeque<(Step, PathBuf)>,
}

/// A checkpoint that is scored.
#[derive(Debug)]
struct Current {
    version: Step,
    began: Instant,
    /// Ends the command with this life of the peer.
    _ends: DropGuard,
}

impl ScoreQueue {
    pub(super) fn new(command: Option<ScoreCommand>) -> Self {
        Self { command, current: None, waiting: VecDeque::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    /// Whether a version's folder is read, or will be.
    pub(super) fn needs(&self, version: Step) -> bool {
        let waiting = self.waiting.iter().map(|(waiting, _)| *waiting);
        self.current.iter().map(|current| current.version).chain(waiting).any(|v| v == version)
    }

    /// Scores a checkpoint, after those that wait. Returns the event of one that is left out.
    pub(super) fn add(
        &mut self,
        background: &Background,
        version: Step,
        folder: PathBuf,
    ) -> Option<RunEvent> {
        if self.command.is_none() || self.needs(version) {
            return None;
        }
        self.waiting.push_back((version, folder));
        self.start_next(background);
        let (left_out, _) = (self.waiting.len() > WAITING).then(|| self.waiting.pop_front())??;
        Some(failed(left_out, &ScoringError::LeftOut))
    }

    /// Takes in an outcome, and begins the next.
    pub(super) fn finished(
        &mut self,
        background: &Background,
        outcome: Result<Scores, ScoringError>,
    ) -> Option<RunEvent> {
        let Current { version, began, .. } = self.current.take()?;
        self.start_next(background);
        Some(match outcome {
            Ok(scores) => {
                let seconds = began.elapsed().as_secs_f64();
                RunEvent::Scored { version: version.0, scores, seconds }
            }
            Err(error) => failed(version, &error),
        })
    }

    fn start_next(&mut self, background: &Background) {
        let Some(command) = self.command.clone().filter(|_| self.current.is_none()) else { return };
        let Some((version, folder)) = self.waiting.pop_front() else { return };
        let token = CancellationToken::new();
        let _ends = token.clone().drop_guard();
        self.current = Some(Current { version, began: Instant::now(), _ends });
        background.spawn(async move {
            let scored = token.run_until_cancelled(score(&command, version, &folder)).await;
            scored.map(|outcome| BackgroundResult::Files(FilesResult::Scored { outcome }))
        });
    }
}

fn failed(version: Step, error: &ScoringError) -> RunEvent {
    RunEvent::ScoreFailed { version: version.0, reason: error.to_string() }
}

/// A process group, which is killed when this value is dropped: a command may have started others.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended by itself.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Runs the command on a checkpoint, and reads its scores.
async fn score(
    ScoreCommand { command, limit }: &ScoreCommand,
    version: Step,
    folder: &Path,
) -> Result<Scores, ScoringError> {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", command, "sh"])
        .arg(folder)
        .env("SHOAL_CHECKPOINT", folder)
        .env("SHOAL_VERSION", version.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    // SAFETY: between fork and exec it makes one system call and allocates nothing.
    unsafe {
        shell.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
    let mut child = shell.spawn().map_err(ScoringError::Start)?;
    // The group has the number of its first process.
    let _group = Group(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw));
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let whole = async { tokio::try_join!(end_of(stdout), end_of(stderr), child.wait()) };
    let ended = tokio::time::timeout(*limit, whole).await;
    let (stdout, stderr, status) =
        ended.map_err(|_| ScoringError::Late(*limit))?.map_err(ScoringError::Read)?;
    if !status.success() {
        return Err(ScoringError::Failed { status: described(status), said: said(&stderr) });
    }
    Ok(scores::parse(&stdout)?)
}

fn described(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("signal {}", signal.unwrap_or_default()),
    }
}

/// The last line of an error's output, shortened.
fn said(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    let line = line.map(|line| line.chars().take(SHOWN).collect::<String>());
    line.map_or_else(String::new, |line| format!(": {line}"))
}

/// Reads an output to its end, and keeps the last bytes.
async fn end_of(output: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let Some(mut output) = output else { return Ok(Vec::new()) };
    let mut kept = Vec::new();
    loop {
        // A buffer grows to twice what is kept at most.
        if output.read_buf(&mut (&mut kept).limit(OUTPUT)).await? == 0 {
            return Ok(kept);
        }
        if kept.len() > OUTPUT {
            kept.drain(..kept.len() - OUTPUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn scored(command: &str, seconds: f64) -> Result<Scores, ScoringError> {
        let command = command.to_owned();
        let command = ScoreCommand { command, limit: Duration::from_secs_f64(seconds) };
        score(&command, Step(7), Path::new("/a folder")).await
    }

    #[tokio::test]
    async fn a_command_gets_the_checkpoint_and_prints_scores() {
        let command = r#"test "$1" = "$SHOAL_CHECKPOINT" && echo noise && echo "{\"x\": ${#1}$SHOAL_VERSION}""#;
        let scores = scored(command, 60.0).await.expect("scores");
        assert_eq!(scores, Scores::from([("x".to_owned(), 97.0)]));
        // Much output costs no memory, and its end counts.
        let long = r#"head -c 3000000 /dev/zero | tr '\0' x; echo; echo '{"x": 1}'"#;
        assert_eq!(scored(long, 60.0).await.expect("scores")["x"], 1.0);
    }

    #[tokio::test]
    async fn a_command_that_fails_or_takes_too_long_has_a_reason() {
        let reason =
            |outcome: Result<Scores, ScoringError>| outcome.expect_err("no scores").to_string();
        let failed = reason(scored("echo '{\"x\": 1}'; echo no model >&2; exit 3", 60.0).await);
        assert_eq!(failed, "it ended with exit code 3: no model");
        assert!(reason(scored("echo done", 60.0).await).contains("and is \"done\""));
        // A process that the shell began ends with it: it would hold the pipe open.
        let folder = tempfile::tempdir().expect("a folder");
        let pid = folder.path().join("pid");
        let slow = format!("sleep 600 & echo $! > '{}'; wait", pid.display());
        assert!(reason(scored(&slow, 0.5).await).contains("longer than 0.5 s"));
        until_ended(pid_in(&pid).expect("it began")).await;
    }

    /// The process whose number is in a file, once it is there.
    fn pid_in(path: &Path) -> Option<i32> {
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    }

    /// Waits until a process is gone, or waits for its parent.
    async fn until_ended(pid: i32) {
        let stat = format!("/proc/{pid}/stat");
        let runs = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z"));
        let until = Instant::now() + Duration::from_secs(30);
        while runs() {
            assert!(Instant::now() < until, "process {pid} goes on");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_command_ends_with_the_life_of_its_peer() {
        let folder = tempfile::tempdir().expect("a folder");
        let pid = folder.path().join("pid");
        let command = format!("sleep 600 & echo $! > '{}'; wait", pid.display());
        let limit = Duration::from_secs(600);
        let mut queue = ScoreQueue::new(Some(ScoreCommand { command, limit }));
        let background = Background::new();
        assert_eq!(queue.add(&background, Step(1), PathBuf::from("/none")), None);
        let until = Instant::now() + Duration::from_secs(30);
        while pid_in(&pid).is_none() {
            assert!(Instant::now() < until, "the command does not begin");
            tokio::task::yield_now().await;
        }
        drop(queue);
        until_ended(pid_in(&pid).expect("it began")).await;
    }

    #[tokio::test]
    async fn checkpoints_are_scored_in_turn_and_the_oldest_of_too_many_is_left_out() {
        let command = "echo \"{\\\"v\\\": $SHOAL_VERSION}\"".to_owned();
        let limit = Duration::from_secs(60);
        let mut queue = ScoreQueue::new(Some(ScoreCommand { command, limit }));
        let mut background = Background::new();
        let mut events = Vec::new();
        for version in 0..10 {
            events.extend(queue.add(&background, Step(version), PathBuf::from("/none")));
        }
        assert!(queue.needs(Step(0)) && !queue.needs(Step(1)) && queue.needs(Step(9)));
        while !queue.is_empty() {
            let BackgroundResult::Files(FilesResult::Scored { outcome }) = background.next().await
            else {
                panic!("another result");
            };
            events.extend(queue.finished(&background, outcome));
        }
        let versions: Vec<(u64, bool)> = events
            .iter()
            .map(|event| match event {
                RunEvent::Scored { version, scores, .. } => {
                    assert_eq!(scores["v"], *version as f64);
                    (*version, true)
                }
                RunEvent::ScoreFailed { version, .. } => (*version, false),
                _ => panic!("another event"),
            })
            .collect();
        let expected = [(1, false), (0, true)].into_iter().chain((2..10).map(|v| (v, true)));
        assert_eq!(versions, expected.collect::<Vec<_>>());
        assert_eq!(ScoreQueue::new(None).add(&background, Step(1), PathBuf::new()), None);
    }
}
