//! The observations of a run: its oracles, its trace, its report and an observer.

use std::time::Duration;

use shoal_protocol::ids::{ContentHash, Member, Step};
use shoal_protocol::message::{
    FromCoordinator, LogRecord, PeerMessage, Round, RoundId, StoredStage, TensorTag, ToCoordinator,
    View,
};
use shoal_protocol::units::Moment;

use super::Held;
use super::event::Event;
use super::peer_index::index_of;
use super::rare_paths::RarePaths;
use super::trace::Trace;
use crate::action::{
    CoordinatorAction, CoordinatorEvent, PeerAction, PeerEvent, PeerInput, PeerLoad, Task,
};
use crate::sim::engine::{Engine, Observed};
use crate::sim::marks::Mark;
use crate::sim::oracle::{self, Oracles, Violation};
use crate::sim::report::Report;
use crate::sim::scenario::Scenario;
use crate::sim::watch::{Seen, Watch};

/// Maximum number of events of a run, for each simulated hour, and for each peer: far more than any
/// run takes.
const EVENTS: u64 = 20_000_000;
const EVENTS_OF_A_PEER: u64 = 200_000;

/// Checks, records and counts the events of a run.
#[derive(Debug)]
pub(super) struct Observation<'a> {
    /// The time of the last event.
    now: Moment,
    /// The version that the run begins with.
    first: Step,
    /// `None` in runs that show which corruptions are caught without oracles.
    oracles: Option<Oracles>,
    trace: Trace,
    rare: RarePaths,
    /// Whether every event is printed.
    pub(super) traced: bool,
    /// Limit of events after which the run counts as endless.
    pub(super) most: u64,
    pub(super) watch: Option<&'a mut dyn Watch>,
    pub(super) report: Report,
}

impl Observation<'_> {
    pub(super) fn new(scenario: &Scenario, with_oracles: bool) -> Self {
        let hours = 1 + scenario.until.unwrap_or_default().as_secs() / 3600;
        Self {
            now: Moment::default(),
            first: scenario.manifest.first_version(),
            oracles: with_oracles.then(|| Oracles::new(scenario)),
            trace: Trace::default(),
            rare: RarePaths::default(),
            traced: cfg!(test) && std::env::var_os("SHOAL_SIM_TRACE").is_some(),
            most: EVENTS.max(EVENTS_OF_A_PEER * scenario.peers.len() as u64) * hours,
            watch: None,
            report: Report::default(),
        }
    }

    /// A member computes wrongly, and what comes of that may be taken back.
    pub(super) fn expect_errors(&mut self) {
        if let Some(oracles) = &mut self.oracles {
            oracles.replicas.be_lenient();
        }
    }

    /// Notes an event before it is handled.
    pub(super) fn event(&mut self, at: Moment, event: &Event) {
        self.now = at;
        self.report.events += 1;
        self.trace.note(at, event);
        if self.traced {
            eprintln!("{:?} {event:?}", at.0);
        }
    }

    /// Counts a mark.
    pub(super) fn mark(&mut self, mark: Mark) {
        self.report.marks.add(mark, 1);
    }

    /// Notes an action of the coordinator.
    pub(super) fn coordinator_action(&mut self, action: &CoordinatorAction) {
        self.rare.coordinator(action, &mut self.report.marks);
        if let CoordinatorAction::Send { message: FromCoordinator::Replay { keys }, .. } = action {
            self.report.marks.add(Mark::Replayed, keys.len() as u64);
        }
    }

    /// Notes a peer's actions in response to an input.
    pub(super) fn peer_actions(&mut self, me: Member, input: &PeerInput, actions: &[PeerAction]) {
        self.rare.peer(me, input, actions, &mut self.report.marks);
    }

    /// Notes a tensor that a peer sends.
    pub(super) fn tensor_sent(&mut self, me: Member, tag: &TensorTag) {
        self.rare.sends(me, tag, &mut self.report.marks);
    }

    /// Notes a task that a peer gives its engine.
    pub(super) fn task_begun(&mut self, me: Member, task: &Task) {
        self.rare.computes(me, task, &mut self.report.marks);
    }

    /// Passes an observation to the observer.
    pub(super) fn show(&mut self, seen: Seen<'_>) {
        if let Some(watch) = &mut self.watch {
            watch.sees(self.now, seen);
        }
    }

    /// Turns an oracle's objection into a violation.
    pub(super) fn holds<T>(
        &self,
        oracle: &'static str,
        held: Result<T, String>,
    ) -> Result<T, Violation> {
        held.map_err(|detail| Violation { at: self.now, oracle, detail })
    }

    /// Whether the run ended, successfully or not.
    pub(super) fn is_over(&self) -> bool {
        self.report.finished || self.report.stopped.is_some()
    }

    /// Whether the run stopped early and no oracle objects to that.
    pub(super) fn is_stopped(&self) -> bool {
        self.report.stopped.is_some() && self.oracles.is_none()
    }

    /// A violation by a fault that the scenario does not excuse; none without oracles.
    pub(super) fn fails(&self, reason: String) -> Held {
        let held = if self.oracles.is_some() { Err(reason) } else { Ok(()) };
        self.holds("no fault", held)
    }

    /// Notes progress. The next `excused` time without progress counts as progress too.
    pub(super) fn advanced(&mut self, excused: Duration) {
        if let Some(oracles) = &mut self.oracles {
            oracles.progress.advanced(self.now + excused);
        }
    }

    /// Checks that the run makes progress and ends. Events that remain after all peers have gone
    /// have no receiver.
    pub(super) fn check_progress(&self, all_gone: impl FnOnce() -> bool) -> Held {
        let stuck = self.oracles.as_ref().map(|oracles| oracles.progress.check(self.now));
        let stuck = stuck.filter(|held| held.is_err() && !all_gone());
        self.holds("progress", stuck.unwrap_or(Ok(())))?;
        let endless = self.report.events > self.most;
        self.holds("progress", if endless { Err("it never ends".to_owned()) } else { Ok(()) })
    }

    /// Checks a peer's resource use.
    pub(super) fn load(&mut self, index: usize, load: &PeerLoad) -> Held {
        let held = self.oracles.as_ref().map(|oracles| oracles.limits.check(index, load));
        self.holds("limits", held.unwrap_or(Ok(())))?;
        self.show(Seen::Holds { peer: index, load });
        let widest = load.window.values().max().copied().unwrap_or(0);
        self.report.widest_window = self.report.widest_window.max(widest);
        Ok(())
    }

    /// Counts a message between members.
    pub(super) fn message(&mut self, message: &PeerMessage) {
        match message {
            PeerMessage::HeldBy { .. } => self.mark(Mark::OfferRedirected),
            PeerMessage::Busy { .. } => self.mark(Mark::OfferRefused),
            _ => {}
        }
    }

    /// Counts a message to the coordinator.
    pub(super) fn reported(&mut self, message: &ToCoordinator) {
        self.rare.reported(message, &mut self.report.marks);
        match message {
            ToCoordinator::Released { .. } => self.mark(Mark::ClaimReleased),
            ToCoordinator::Stored { files, .. } if files.is_empty() => self.mark(Mark::NotStored),
            ToCoordinator::Behind(_) => self.mark(Mark::FellBehind),
            _ => {}
        }
    }

    /// Checks a peer's device after a task.
    pub(super) fn device(&self, now: Moment, engine: &Engine) -> Held {
        let tiers = engine.tiers.as_ref().filter(|_| self.oracles.is_some());
        self.holds("tiers", tiers.map_or(Ok(()), |tiers| oracle::tiers::check(now, tiers)))
    }

    /// Notes a piece of a round's result that a member received.
    pub(super) fn result_received(&mut self, to: Member, round: RoundId, piece: u32) {
        if let Some(oracles) = &mut self.oracles {
            oracles.results.received(to, round, piece);
        }
    }

    /// Checks an observation of a peer's engine.
    pub(super) fn engine(&mut self, me: Member, observed: &Observed) -> Held {
        let Some(oracles) = &mut self.oracles else { return Ok(()) };
        match observed {
            Observed::Nothing | Observed::Copied { .. } => Ok(()),
            Observed::Accumulated(key) => {
                let held = oracles.exactly_once.added(*key, me);
                self.holds("exactly once", held)
            }
            Observed::Restored(stage) => {
                oracles.exactly_once.begins_again(me, *stage);
                Ok(())
            }
            Observed::Applied { step, stage, sums, weights } => {
                let held = oracles.replicas.applied(*step, *stage, sums, *weights);
                self.holds("equal replicas", held)
            }
        }
    }

    /// Checks and counts an event of a peer.
    pub(super) fn peer_event(&mut self, me: Member, event: &PeerEvent) -> Held {
        match event {
            PeerEvent::Applied { record } => {
                let oracles = self.oracles.as_mut();
                let held = oracles.map(|oracles| oracles.monotone.applied(me, record.step));
                self.holds("never back", held.unwrap_or(Ok(())))?;
            }
            PeerEvent::Serving { version } => {
                self.report.marks.add_if(*version != self.first, Mark::CaughtUp);
            }
            PeerEvent::Rewound { .. } => {
                if let Some(oracles) = &mut self.oracles {
                    oracles.monotone.begins_again(me);
                }
            }
            PeerEvent::ResultLost { step, span } => {
                self.mark(Mark::ResultLost);
                let oracles = self.oracles.as_mut();
                let held = oracles.map(|oracles| oracles.results.given_up(me, *span, *step));
                self.holds("kept results", held.unwrap_or(Ok(())))?;
            }
            PeerEvent::Fault(fault) => self.report.faults.push(fault.clone()),
            PeerEvent::Moved { .. } => self.mark(Mark::Moved),
            PeerEvent::Counted { key } => {
                self.show(Seen::Counted { peer: index_of(me), key: *key });
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks a peer's changed view.
    pub(super) fn viewed(&self, me: Member, view: &View) -> Held {
        let held = self.oracles.as_ref().map(|oracles| oracles.views.has(me, view));
        self.holds("equal memberships", held.unwrap_or(Ok(())))
    }

    /// Notes a round that begins.
    pub(super) fn round_closed(&mut self, round: &Round) {
        if let Some(oracles) = &mut self.oracles {
            oracles.exactly_once.closed(round);
            oracles.results.closed(round);
        }
    }

    /// Checks and counts an event of a coordinator.
    pub(super) fn coordinator_event(&mut self, event: CoordinatorEvent) -> Held {
        self.show(Seen::Decided(&event));
        self.advanced(Duration::ZERO);
        match event {
            CoordinatorEvent::Committed { counts, .. } => {
                self.report.marks.add(Mark::ReportedAgain, counts.repeated);
                Ok(())
            }
            CoordinatorEvent::Stopped { reason } => {
                self.report.stopped = Some(reason.clone());
                self.fails(reason)
            }
            event => {
                self.report.note(&event);
                Ok(())
            }
        }
    }

    /// Checks a record that became durable, and the view after it.
    pub(super) fn logged(&mut self, record: &LogRecord, view: &View) -> Held {
        self.show(Seen::Logged(record));
        let held = self.oracles.as_mut().map(|oracles| oracles.monotone.logged(record));
        self.holds("never back", held.unwrap_or(Ok(())))?;
        match record {
            LogRecord::View(_) => {
                if let Some(oracles) = &mut self.oracles {
                    oracles.views.logged(view);
                }
            }
            LogRecord::Commit(record) => {
                self.report.commits += 1;
                let Some(oracles) = &mut self.oracles else { return Ok(()) };
                let once = oracles.exactly_once.committed(record);
                let same = oracles.replicas.committed(record);
                oracles.results.committed(record);
                self.holds("exactly once", once)?;
                self.holds("equal replicas", same)?;
            }
            LogRecord::Checkpoint { version, stages, .. } => self.saved(*version, stages)?,
            _ => {}
        }
        Ok(())
    }

    /// Checks a checkpoint.
    fn saved(&mut self, version: Step, stages: &[StoredStage]) -> Held {
        let files: Vec<_> = stages.iter().map(|stored| stored.files.clone()).collect();
        let saved = self.oracles.as_ref().map(|oracles| oracles.replicas.saved(version, &files));
        self.holds("equal replicas", saved.unwrap_or(Ok(())))?;
        let hashes: Vec<u8> = files.iter().flatten().flat_map(|file| file.hash.0).collect();
        self.report.checkpoint = Some(ContentHash::of(&hashes));
        Ok(())
    }

    /// The report of the run, with the total time of all engines' passes.
    pub(super) fn conclude(mut self, busy: Duration) -> Report {
        self.report.end = self.now;
        self.report.trace = self.trace.hash();
        self.report.busy = busy;
        self.report
    }
}
