//! Processes of this very program, and what becomes of them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};

use crate::cli::LogFormat;
use crate::events::RunEvent;

/// A swarm that says nothing for this long has failed.
const PATIENCE: Duration = Duration::from_secs(300);

/// When the run is over every process ends within this time.
const FAREWELL: Duration = Duration::from_secs(30);

/// Who took the place of a dead peer and found the run over ends within this time, or never.
const LATECOMERS: Duration = Duration::from_secs(3);

/// Events that wait to be noted.
const EVENTS: usize = 64;

/// Anchors that can lose one of them.
const ANCHORS: usize = 3;

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
    /// Starts this program with other arguments. Its stderr goes to the file `log`; what it tells of the
    /// run on stdout, if it does, is passed on.
    ///
    /// # Errors
    /// When the program or the file cannot be opened.
    pub(super) fn start(
        name: &str,
        arguments: &[OsString],
        log: &Path,
        format: LogFormat,
        tells: bool,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program cannot be found")?;
        // A peer that comes back goes on in the same log.
        let stderr = File::options().create(true).append(true).open(log);
        let stderr = stderr.with_context(|| log.display().to_string())?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .args(["--log-format", if format == LogFormat::Json { "json" } else { "text" }])
            // Threads that wait by spinning would take the other peers' time.
            .env("OMP_WAIT_POLICY", "passive")
            .stdin(Stdio::null())
            .stdout(if tells { Stdio::piped() } else { Stdio::null() })
            .stderr(stderr)
            .kill_on_drop(true);
        // SAFETY: between fork and exec it makes one system call and allocates nothing.
        unsafe {
            command.pre_exec(|| Ok(prctl::set_pdeathsig(Signal::SIGKILL)?));
        }
        let child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    /// Passes on what it tells of the run, and waits for its end, or kills it when it is told to.
    async fn end(
        mut self,
        kill: oneshot::Receiver<()>,
        told: mpsc::Sender<RunEvent>,
    ) -> anyhow::Result<Ended> {
        let stdout = self.child.stdout.take();
        let telling = async {
            let Some(stdout) = stdout else { return Ok(()) };
            let mut lines = BufReader::new(stdout).lines();
            while let Some(line) = lines.next_line().await? {
                let event = serde_json::from_str(&line).context("no event of a run")?;
                // Who no longer listens is about to end.
                let _ = told.send(event).await;
            }
            Ok::<_, anyhow::Error>(())
        };
        let (told, ended) = tokio::join!(telling, self.wait(kill));
        let ended = ended?;
        // Of a line that was cut short by a kill there is nothing to tell.
        if ended == Ended::ByItself {
            told?;
        }
        Ok(ended)
    }

    async fn wait(&mut self, kill: oneshot::Receiver<()>) -> anyhow::Result<Ended> {
        tokio::select! {
            status = self.child.wait() => {
                let status = status?;
                if !status.success() {
                    let reason = failure_in(&self.log)
                        .map_or_else(String::new, |reason| format!(": {reason}"));
                    let (name, log) = (&self.name, self.log.display());
                    bail!("{name} failed ({status}){reason}; its log is {log}");
                }
                Ok(Ended::ByItself)
            }
            Ok(()) = kill => {
                self.child.kill().await?;
                Ok(Ended::Killed)
            }
        }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    ByItself,
    Killed,
}

/// Deaths that come from outside, and what takes the place of the dead.
pub(super) struct Chaos<'a> {
    /// From one death to the next, on average.
    pub(super) every: Duration,
    /// Who dies when.
    pub(super) rng: ChaCha8Rng,
    /// The first processes, which keep the run's log together.
    pub(super) anchors: usize,
    /// Starts the process of a number.
    pub(super) start: Box<dyn FnMut(usize) -> anyhow::Result<Process> + 'a>,
}

impl Chaos<'_> {
    fn next_pause(&mut self) -> Duration {
        self.every.mul_f64(0.5 + f64::from(self.rng.next_u32()) / f64::from(u32::MAX))
    }

    /// One of these, the first only where others can keep the run, and no anchor while another of
    /// them is not there: without a majority the run would stand still.
    fn victim(&mut self, alive: &BTreeMap<usize, oneshot::Sender<()>>) -> Option<usize> {
        let all_there = alive.keys().filter(|index| **index < self.anchors).count() == self.anchors;
        let spared = if self.anchors < ANCHORS { 1 } else { 0 };
        let may_die = |index: &usize| {
            *index >= spared && (all_there || self.anchors < ANCHORS || *index >= self.anchors)
        };
        let others: Vec<usize> = alive.keys().copied().filter(may_die).collect();
        let chosen = self.rng.next_u32() as usize;
        (!others.is_empty()).then(|| others[chosen % others.len()])
    }
}

/// The processes of a demo.
struct Fleet<'a> {
    told: mpsc::Sender<RunEvent>,
    running: FuturesUnordered<BoxFuture<'a, (usize, anyhow::Result<Ended>)>>,
    alive: BTreeMap<usize, oneshot::Sender<()>>,
    /// Numbers given so far.
    count: usize,
}

impl Fleet<'_> {
    /// The machine of a process that was killed comes back, or another comes in its place.
    fn replace(&mut self, index: usize, chaos: &mut Chaos<'_>) -> anyhow::Result<()> {
        let again = chaos.rng.next_u32().is_multiple_of(2) || index < chaos.anchors;
        let next = if again { index } else { self.count };
        self.add(next, (chaos.start)(next)?);
        Ok(())
    }

    fn kill(&mut self, index: usize) {
        if let Some(kill) = self.alive.remove(&index) {
            // Who has ended meanwhile needs no killing.
            let _ = kill.send(());
        }
    }

    fn add(&mut self, index: usize, process: Process) {
        let (kill, killed) = oneshot::channel();
        self.alive.insert(index, kill);
        self.count = self.count.max(index + 1);
        let ended = process.end(killed, self.told.clone());
        self.running.push(ended.map(move |ended| (index, ended)).boxed());
    }
}

/// Passes on what the processes tell, until all have ended.
///
/// # Errors
/// When one fails, or nothing happens for a long time.
pub(super) async fn watch(
    processes: Vec<Process>,
    mut chaos: Option<Chaos<'_>>,
    mut note: impl FnMut(&RunEvent),
) -> anyhow::Result<()> {
    let (told, mut events) = mpsc::channel(EVENTS);
    let (running, alive) = (FuturesUnordered::new(), BTreeMap::new());
    let mut fleet = Fleet { told, running, alive, count: 0 };
    let mut finished = false;
    for (index, process) in processes.into_iter().enumerate() {
        fleet.add(index, process);
    }
    let first_pause = chaos.as_mut().map_or(PATIENCE, Chaos::next_pause);
    let mut death = Box::pin(tokio::time::sleep(first_pause));
    let (mut begun, mut training, mut late) = (false, false, None);
    // Deaths are no news: what keeps the demo waiting is that the run says nothing.
    let mut silence = Box::pin(tokio::time::sleep(PATIENCE));
    while !fleet.running.is_empty() {
        tokio::select! {
            biased;
            Some(event) = events.recv() => {
                let committed = matches!(event, RunEvent::Committed(_));
                finished |= matches!(event, RunEvent::Finished { .. });
                begun |= committed;
                training = begun && !finished;
                if let Some(error) = late.take_if(|_| committed) {
                    return Err(error);
                }
                silence = Box::pin(tokio::time::sleep(if finished { FAREWELL } else { PATIENCE }));
                note(&event);
            },
            Some((index, ended)) = fleet.running.next() => {
                fleet.alive.remove(&index);
                if let Some(chaos) = chaos.as_ref().filter(|_| finished)
                    && fleet.alive.keys().all(|index| *index >= chaos.anchors)
                {
                    silence = Box::pin(tokio::time::sleep(LATECOMERS));
                }
                match (ended, &mut chaos) {
                    (Ok(Ended::ByItself), _) => {}
                    (Ok(Ended::Killed), Some(_)) if finished => {}
                    (Ok(Ended::Killed), Some(chaos)) => {
                        note(&RunEvent::Killed { index });
                        fleet.replace(index, chaos)?;
                    }
                    // Who comes when the run is over finds that it is; if training goes on all the
                    // same, something is wrong.
                    (Err(error), Some(_)) if begun && (index > 0 || finished) => late = Some(error),
                    (Err(error), _) => return Err(error),
                    (Ok(Ended::Killed), None) => unreachable!("nobody kills"),
                }
            }
            () = &mut death, if chaos.is_some() => {
                let chaos = chaos.as_mut().expect("the branch is for chaos");
                if let Some(victim) = chaos.victim(&fleet.alive).filter(|_| training) {
                    fleet.kill(victim);
                }
                death = Box::pin(tokio::time::sleep(chaos.next_pause()));
            }
            () = &mut silence => {
                if finished && chaos.is_some() && !fleet.alive.is_empty() {
                    // They came when the run was over, and wait for somebody to tell them of it.
                    let late: Vec<usize> = fleet.alive.keys().copied().collect();
                    late.into_iter().for_each(|index| fleet.kill(index));
                    silence = Box::pin(tokio::time::sleep(FAREWELL));
                    continue;
                }
                let patience = if finished { FAREWELL } else { PATIENCE };
                bail!("nothing happened for {} s: the logs may tell why", patience.as_secs())
            }
        }
    }
    while let Ok(event) = events.try_recv() {
        note(&event);
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
