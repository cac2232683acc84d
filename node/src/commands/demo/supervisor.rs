//! Supervises the processes of a demo: forwards their events, kills peers where the demo is asked to,
//! and replaces every peer that is killed.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{anyhow, bail};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::RngCore;
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use super::process::{Ended, Process};
use crate::events::RunEvent;

/// A run that reports nothing for this long has failed.
const SILENCE_LIMIT: Duration = Duration::from_secs(300);

/// When the run is over every process ends within this time.
const END_LIMIT: Duration = Duration::from_secs(30);

/// A replacement that finds the run over ends within this time, or never.
const LATECOMER_LIMIT: Duration = Duration::from_secs(3);

/// Events in flight from the processes to the demo.
const EVENT_BUFFER: usize = 64;

/// The fewest anchors that still have a majority when one of them dies.
const ANCHORS_OF_A_MAJORITY: usize = 3;

/// Kills without a commit in between that end the demo: a machine without memory kills peers for as long as
/// they are replaced.
const KILLS_WITHOUT_COMMIT: usize = 100;

/// How peers are killed and replaced.
pub(super) struct Replacement<'a> {
    /// Mean time from one kill by the demo to the next; none where it kills nothing.
    pub(super) kill_every: Option<Duration>,
    /// Chooses victims, pauses and replacements.
    pub(super) rng: ChaCha8Rng,
    /// Anchors of the run: the processes with the lowest indices.
    pub(super) anchors: usize,
    /// Starts the process with an index.
    pub(super) start: Box<dyn FnMut(usize) -> anyhow::Result<Process> + 'a>,
}

impl Replacement<'_> {
    /// Time until the next kill by the demo.
    fn pause(&mut self) -> Option<Duration> {
        let spread = 0.5 + f64::from(self.rng.next_u32()) / f64::from(u32::MAX);
        Some(self.kill_every?.mul_f64(spread))
    }

    /// A peer that the demo may kill without stopping the run: no anchor while another one is missing,
    /// and with fewer than three anchors not the first peer.
    fn victim(&mut self, alive: &BTreeMap<usize, oneshot::Sender<()>>) -> Option<usize> {
        let all_there = alive.keys().filter(|index| **index < self.anchors).count() == self.anchors;
        let has_majority = self.anchors >= ANCHORS_OF_A_MAJORITY;
        let may_die = |index: &usize| {
            (has_majority || *index > 0) && (all_there || !has_majority || *index >= self.anchors)
        };
        let others: Vec<usize> = alive.keys().copied().filter(may_die).collect();
        let chosen = self.rng.next_u32() as usize;
        (!others.is_empty()).then(|| others[chosen % others.len()])
    }

    /// Starts a process in the place of a killed one: the same peer again, or a new one. An anchor always comes
    /// back, since it has the run's log on its disk.
    fn replace(&mut self, index: usize, next_index: usize) -> anyhow::Result<(usize, Process)> {
        let same = self.rng.next_u32().is_multiple_of(2) || index < self.anchors;
        let index = if same { index } else { next_index };
        Ok((index, (self.start)(index)?))
    }
}

/// The processes of a demo, from their start to their end.
pub(super) struct Supervisor<'a> {
    replacement: Option<Replacement<'a>>,
    events: mpsc::Receiver<RunEvent>,
    event_sender: mpsc::Sender<RunEvent>,
    running: FuturesUnordered<BoxFuture<'a, (usize, anyhow::Result<Ended>)>>,
    /// Where each running process is told to die.
    alive: BTreeMap<usize, oneshot::Sender<()>>,
    /// Index of the next new process.
    next_index: usize,
    /// Whether a step was committed.
    begun: bool,
    /// Whether an anchor reported that the run is over.
    finished: bool,
    /// Whether a peer was killed.
    any_killed: bool,
    kills_since_commit: usize,
    /// The failure of a replacement that may have come too late for the run.
    failure: Option<anyhow::Error>,
}

impl<'a> Supervisor<'a> {
    /// Takes over running processes. Without `replacement` a process that is killed is a failure.
    pub(super) fn new(processes: Vec<Process>, replacement: Option<Replacement<'a>>) -> Self {
        let (event_sender, events) = mpsc::channel(EVENT_BUFFER);
        let mut supervisor = Self {
            replacement,
            events,
            event_sender,
            running: FuturesUnordered::new(),
            alive: BTreeMap::new(),
            next_index: 0,
            begun: false,
            finished: false,
            any_killed: false,
            kills_since_commit: 0,
            failure: None,
        };
        for (index, process) in processes.into_iter().enumerate() {
            supervisor.add(index, process);
        }
        supervisor
    }

    /// Passes events to `note` until all processes have ended.
    ///
    /// # Errors
    /// When a process fails, or the run reports nothing for a long time.
    pub(super) async fn run(mut self, mut note: impl FnMut(&RunEvent)) -> anyhow::Result<()> {
        let mut next_kill = Box::pin(sleep(self.pause()));
        // Only events of the run reset it: kills do not keep the demo waiting.
        let mut silence = Box::pin(sleep(SILENCE_LIMIT));
        while !self.running.is_empty() {
            tokio::select! {
                biased;
                Some(event) = self.events.recv() => {
                    self.on_event(&event)?;
                    silence = Box::pin(sleep(self.silence_limit()));
                    note(&event);
                }
                Some((index, ended)) = self.running.next() => {
                    self.alive.remove(&index);
                    if let Some(killed) = self.on_end(index, ended)? {
                        note(&killed);
                    }
                    if self.has_only_latecomers() {
                        silence = Box::pin(sleep(LATECOMER_LIMIT));
                    } else if self.failure.is_some() {
                        silence = Box::pin(sleep(self.silence_limit()));
                    }
                }
                () = &mut next_kill => {
                    self.kill_one();
                    next_kill = Box::pin(sleep(self.pause()));
                }
                () = &mut silence => {
                    self.on_silence()?;
                    silence = Box::pin(sleep(END_LIMIT));
                }
            }
        }
        while let Ok(event) = self.events.try_recv() {
            self.finished |= matches!(event, RunEvent::Finished { .. });
            note(&event);
        }
        match self.failure.take().filter(|_| !self.finished) {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    fn add(&mut self, index: usize, process: Process) {
        let (kill, killed) = oneshot::channel();
        self.alive.insert(index, kill);
        self.next_index = self.next_index.max(index + 1);
        let ended = process.end(killed, self.event_sender.clone());
        self.running.push(ended.map(move |ended| (index, ended)).boxed());
    }

    fn on_event(&mut self, event: &RunEvent) -> anyhow::Result<()> {
        self.finished |= matches!(event, RunEvent::Finished { .. });
        if matches!(event, RunEvent::Committed(_)) {
            self.begun = true;
            self.kills_since_commit = 0;
            // The run goes on, so the replacement did not fail for coming too late.
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Replaces a peer that was killed, and returns the event of its death.
    fn on_end(
        &mut self,
        index: usize,
        ended: anyhow::Result<Ended>,
    ) -> anyhow::Result<Option<RunEvent>> {
        match ended {
            Ok(Ended::Finished) => {}
            Ok(Ended::Killed(text)) => {
                let Some(replacement) = &mut self.replacement else { bail!(text) };
                self.any_killed = true;
                if self.finished {
                    return Ok(None);
                }
                self.kills_since_commit += 1;
                if self.kills_since_commit >= KILLS_WITHOUT_COMMIT {
                    bail!(
                        "{text}: {KILLS_WITHOUT_COMMIT} peers were killed and no step was committed in \
                         between: choose a longer --kill-every, or the machine lacks memory"
                    );
                }
                let (new_index, process) = replacement.replace(index, self.next_index)?;
                self.add(new_index, process);
                return Ok(Some(RunEvent::Killed { index }));
            }
            // A replacement that comes when the run is over fails, and this is no failure of the run.
            Err(error) if self.any_killed && self.begun && (index > 0 || self.finished) => {
                self.failure = Some(error);
            }
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Gives up on a silent run; where the run is over, kills replacements that wait for it.
    fn on_silence(&mut self) -> anyhow::Result<()> {
        if self.finished && self.any_killed && !self.alive.is_empty() {
            std::mem::take(&mut self.alive).into_values().for_each(kill);
            return Ok(());
        }
        let silent = self.silence_limit().as_secs();
        let failure = self.failure.take();
        Err(failure
            .unwrap_or_else(|| anyhow!("nothing happened for {silent} s: the logs may tell why")))
    }

    /// How long the run may report nothing.
    fn silence_limit(&self) -> Duration {
        if self.finished || self.failure.is_some() { END_LIMIT } else { SILENCE_LIMIT }
    }

    /// Whether the run is over and every process that is left may be one that came too late for it.
    fn has_only_latecomers(&self) -> bool {
        let anchors = self.replacement.as_ref().map_or(0, |replacement| replacement.anchors);
        self.finished && self.any_killed && self.alive.keys().all(|index| *index >= anchors)
    }

    /// Time until the next kill by the demo; long where it kills nothing.
    fn pause(&mut self) -> Duration {
        self.replacement.as_mut().and_then(Replacement::pause).unwrap_or(SILENCE_LIMIT)
    }

    /// Kills a peer while the run trains, where the demo is asked to.
    fn kill_one(&mut self) {
        let Some(replacement) = &mut self.replacement else { return };
        if replacement.kill_every.is_none() {
            return;
        }
        let victim = replacement.victim(&self.alive).filter(|_| self.begun && !self.finished);
        if let Some(sender) = victim.and_then(|index| self.alive.remove(&index)) {
            kill(sender);
        }
    }
}

/// Kills a process, unless it has ended meanwhile.
fn kill(process: oneshot::Sender<()>) {
    let _ = process.send(());
}
