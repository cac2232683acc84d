//! What a peer does for its run besides hosting stages: as an anchor it keeps the log with others
//! and, where they choose it, the run.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use shoal_engine::parameter_count;
use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Incarnation, Member, PeerId, Term};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{AnchorMessage, Envelope, LogRecord, Message};
use shoal_protocol::net::transport::Transport;
use shoal_protocol::wire;
use shoal_scheduler::action::CoordinatorInput;
use shoal_scheduler::coordinator::{Coordinator, CoordinatorConfig, round_patience};
use shoal_scheduler::locality::Load;
use shoal_scheduler::rebalance::Rebalance;
use shoal_scheduler::router::Routing;
use tokio::sync::mpsc;

use super::resume::is_complete;
use super::setup::{AnchorPart, Office};
use super::{Driver, Ending, Gathered, Own, probe};
use crate::anchor::{self, Anchor, AnchorConfig, AnchorEvent, Timing};
use crate::events::RunEvent;
use crate::fault_point::FaultPoint;
use crate::progress;

/// After how long the coordinator says again what shows no effect.
const RETRY: Duration = Duration::from_secs(1);

/// How long a run that lost a stage waits for those who have its newest checkpoint.
const HOMECOMING: Duration = Duration::from_secs(120);

/// How long too few anchors answer before people are told.
const PAUSE: Duration = Duration::from_secs(4);

/// Anchors that bear the loss of one of them.
const ENOUGH: usize = 3;

/// The office that a peer holds.
pub(super) struct Post {
    pub(super) anchor: Option<Anchor>,
    happened: Option<mpsc::Receiver<AnchorEvent>>,
    /// The coordinator, where this anchor leads.
    pub(super) seat: Option<Seat>,
    /// Who is to keep the log, by the coordinator's word.
    wanted: BTreeSet<PeerId>,
    wait_for: usize,
    rebalance: Rebalance,
    /// Where checkpoints go, if it archives.
    pub(super) archive: Option<PathBuf>,
    /// People were told that there are too few anchors, or that they have no majority.
    warned: bool,
    paused: bool,
    /// Since when too few anchors answer, how many do and how many there are.
    too_few: Option<(Instant, usize, usize)>,
    /// Of how many they were told.
    told: usize,
}

/// A coordinator and the term in which its anchor leads.
pub(super) struct Seat {
    pub(super) coordinator: Coordinator,
    term: Term,
}

/// The way to other anchors.
struct AnchorLinks {
    me: Incarnation,
    transport: Option<Transport>,
}

impl anchor::Links for AnchorLinks {
    fn send(&self, to: PeerId, message: AnchorMessage) {
        let Some(transport) = &self.transport else { return };
        // Anchors are who they are whichever life they are in, and the log has its own terms.
        let (to_life, era, term) = (Incarnation(0), Era(0), Term(0));
        let message = Message::Anchor(message);
        let envelope = Envelope { from: self.me, to: to_life, era, term, message };
        let bytes = wire::encode(&envelope).expect("anchors' messages are under their cap");
        if let Err(error) = transport.send_control(to, bytes) {
            tracing::debug!(peer = %to.short(), %error, "an anchor's message was not sent");
        }
    }
}

impl Post {
    /// Takes the office up.
    pub(super) async fn take_up(
        office: Office,
        me: Member,
        folder: PathBuf,
        transport: Option<Transport>,
    ) -> anyhow::Result<Self> {
        let Office { anchor: part, wait_for, rebalance, archive, .. } = office;
        let (mut anchor, mut happened, alone) = (None, None, transport.is_none());
        if let Some(part) = part {
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("{} cannot be made", folder.display()))?;
            let config = AnchorConfig { folder, me: me.peer, timing: Timing::default() };
            let links = Arc::new(AnchorLinks { me: me.incarnation, transport });
            let founds = matches!(part, AnchorPart::Founds);
            let (opened, events) = Anchor::open(config, founds, links).await?;
            (anchor, happened) = (Some(opened), Some(events));
        }
        Ok(Self {
            anchor,
            happened,
            seat: None,
            wanted: BTreeSet::new(),
            wait_for,
            rebalance,
            archive,
            warned: alone,
            paused: false,
            too_few: None,
            told: 0,
        })
    }

    /// What the log says of the run, as far as it is known here.
    pub(super) fn history(&self) -> Option<History> {
        self.anchor.as_ref().map(Anchor::history)
    }

    /// Who keeps the log, as far as it is known here.
    pub(super) fn voters(&self) -> BTreeSet<PeerId> {
        self.anchor.as_ref().map(Anchor::voters).unwrap_or_default()
    }

    /// Whether nobody else keeps the log.
    pub(super) fn is_alone(&self) -> bool {
        self.anchor.is_some() && self.voters().len() < 2
    }

    /// Whether the run ended before, and its model is where it is to be. What the log is known to
    /// have is agreed on, whoever else is there.
    pub(super) fn has_completed(&self, manifest: &Manifest) -> bool {
        let archive = self.archive.as_deref();
        let complete = |history: History| is_complete(&history, manifest, archive);
        (archive.is_some() || !self.is_alone()) && self.history().is_some_and(complete)
    }

    pub(super) fn coordinator(&self) -> Option<&Coordinator> {
        self.seat.as_ref().map(|seat| &seat.coordinator)
    }

    /// What happens to the anchor next.
    pub(super) async fn next(&mut self) -> Option<AnchorEvent> {
        match &mut self.happened {
            Some(happened) => happened.recv().await,
            None => std::future::pending().await,
        }
    }

    /// Writes a record down for good.
    pub(super) fn append(&self, record: LogRecord) {
        let (Some(anchor), Some(seat)) = (&self.anchor, &self.seat) else { return };
        anchor.append(seat.term, record);
    }

    /// Has these keep the log, once more where that came to nothing.
    pub(super) fn want_voters(&mut self, voters: Option<BTreeSet<PeerId>>) {
        self.wanted = voters.unwrap_or_else(|| std::mem::take(&mut self.wanted));
        let Some(anchor) = self.anchor.as_ref().filter(|_| self.seat.is_some()) else { return };
        if !self.wanted.is_empty() && anchor.voters() != self.wanted {
            anchor.set_voters(self.wanted.clone());
        }
        if self.wanted.len() >= ENOUGH {
            self.warned = false;
        } else if !std::mem::replace(&mut self.warned, true) {
            progress::say(
                "fewer than three peers keep the run's log (start or join with --anchor): \
                 the death of one pauses the run until it is back",
            );
        }
    }

    /// Ends the anchor and its writing.
    pub(super) async fn close(&mut self) {
        self.seat = None;
        if let Some(anchor) = self.anchor.take() {
            anchor.close().await;
        }
    }
}

impl Driver<'_> {
    /// Sees to it that those keep the log who are to.
    pub(super) fn tend_anchors(&mut self) {
        self.post.want_voters(None);
        let voters = self.post.anchor.as_ref().filter(|_| self.post.seat.is_some());
        let count = voters.map_or(0, |anchor| anchor.voters().len());
        if count > 1 && count != std::mem::replace(&mut self.post.told, count) {
            self.note(&RunEvent::Anchors { count });
        }
        // An election goes by without a leader, and who has just started knows nobody yet.
        if let Some((_, answering, anchors)) =
            self.post.too_few.filter(|(since, ..)| since.elapsed() >= PAUSE)
            && !std::mem::replace(&mut self.post.paused, true)
        {
            self.note(&RunEvent::Paused { answering, anchors });
        }
        self.meters.office(self.post.seat.is_some(), self.post.voters().len(), self.post.paused);
    }

    /// Something happened to this process's anchor. Who leads when the run is over is of no matter.
    pub(super) fn anchor_event(&mut self, event: Option<AnchorEvent>) {
        if self.farewell.is_some() {
            if matches!(event, None | Some(AnchorEvent::Failed(_))) {
                self.farewell = None;
            }
            return;
        }
        match event {
            Some(AnchorEvent::Leads { term, history }) => self.take_seat(term, history),
            Some(AnchorEvent::Appended(record)) => {
                if matches!(record, LogRecord::Commit(_)) {
                    FaultPoint::Committed.pass();
                }
                let begins = matches!(record, LogRecord::Term(_));
                self.own.push_back(Own::Coordinator(CoordinatorInput::Appended(record)));
                if begins {
                    // Of these nothing more will be heard.
                    for member in self.coordinator.gone() {
                        let input = CoordinatorInput::Disconnected { member };
                        self.own.push_back(Own::Coordinator(input));
                    }
                    self.probe_members();
                }
            }
            Some(AnchorEvent::Deposed) => {
                tracing::info!("another anchor leads");
                self.post.seat = None;
                self.coordinator.choose_other(self.me);
            }
            Some(AnchorEvent::Leader { peer: Some(peer), .. }) => {
                self.post.too_few = None;
                self.post.paused = false;
                if peer != self.me.peer {
                    self.coordinator.leads(peer);
                }
            }
            Some(AnchorEvent::Leader { peer: None, answering, voters }) => {
                let since = self.post.too_few.map_or_else(Instant::now, |(since, ..)| since);
                let few = answering * 2 <= voters;
                self.post.too_few = few.then_some((since, answering, voters));
            }
            Some(AnchorEvent::Failed(error)) => {
                self.ending.get_or_insert(Ending::Stopped(error.to_string()));
            }
            None => {
                self.ending.get_or_insert(Ending::Stopped("the run's log stopped".to_owned()));
            }
        }
    }

    /// Looks which members are gone without anybody having noticed.
    fn probe_members(&self) {
        let Some(history) = self.post.history().filter(|_| self.links.is_some()) else { return };
        let (me, done) = (self.me, self.gathered.0.clone());
        self.tracker.spawn(async move {
            let gone = probe::gone(history.view, me).await;
            // The driver that no longer listens is closing.
            let _ = done.send(Gathered::Gone(gone)).await;
        });
    }

    /// The anchors chose this one: its coordinator takes over from what the log says.
    fn take_seat(&mut self, term: Term, history: History) {
        self.meet_addresses(&history.view);
        // The newest records count only once this peer was chosen again.
        self.meters.stood(&history);
        let anchors = self.post.voters();
        let mut coordinator = Coordinator::new(CoordinatorConfig {
            manifest: self.manifest.clone(),
            history,
            anchors,
            wait_for: self.post.wait_for,
            home: self.me,
            retry: RETRY,
            patience: patience(&self.manifest),
            homecoming: HOMECOMING,
            load: load(&self.manifest),
            rebalance: self.post.rebalance,
            routing: Routing::default(),
        });
        let mut out = Vec::new();
        coordinator.start(self.now(), &mut out);
        self.post.too_few = None;
        self.post.seat = Some(Seat { coordinator, term });
        self.coordinator.is(self.me);
        self.obey_coordinator(out);
    }
}

/// What a step sends.
fn load(manifest: &Manifest) -> Load {
    Load::of(manifest, |stage| parameter_count(manifest, stage) as u64)
}

/// After how long the first all-reduce is tried again where it has no result.
fn patience(manifest: &Manifest) -> Duration {
    let numbers = manifest.stages().map(|stage| parameter_count(manifest, stage) as u64);
    round_patience(manifest.codec.all_reduce, numbers.max().unwrap_or(0))
}
