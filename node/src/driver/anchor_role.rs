//! This peer as an anchor: it keeps the log with other anchors and, where they elect it, runs the
//! coordinator.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use shoal_engine::{group_elements, optimizer_elements, parameter_count, summed_elements};
use shoal_protocol::history::History;
use shoal_protocol::ids::{Era, Incarnation, PeerId, Term};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{
    AnchorGroup, AnchorMessage, Envelope, Founding, LogRecord, Message, TermProof,
};
use shoal_protocol::net::transport::Transport;
use shoal_protocol::units::Moment;
use shoal_protocol::wire;
use shoal_scheduler::action::{CoordinatorAction, CoordinatorInput};
use shoal_scheduler::coordinator::placing::locality::Load;
use shoal_scheduler::coordinator::placing::rebalance::Rebalance;
use shoal_scheduler::coordinator::{Coordinator, CoordinatorConfig, round_patience};
use shoal_scheduler::router::Routing;
use tokio::sync::mpsc;

use super::archive::Archive;
use super::context::Context;
use super::effect::Effects;
use super::peer_names::PeerNames;
use super::resume::is_complete;
use super::setup::{AnchorStart, RoleSetup};
use crate::anchor::{self, Anchor, AnchorConfig, AnchorEvent, Heard, Timing, Voucher};
use crate::events::RunEvent;

/// After how long the coordinator sends a message again that shows no effect.
const RETRY: Duration = Duration::from_secs(1);

/// How long a run that lost a stage waits for the holders of its newest checkpoint.
const CHECKPOINT_WAIT: Duration = Duration::from_secs(120);

/// How long too few anchors answer before the pause is reported.
const PAUSE: Duration = Duration::from_secs(4);

/// Anchors that tolerate the loss of one of them.
const ENOUGH: usize = 3;

/// The part of this peer in keeping the log and coordinating the run.
pub(super) struct AnchorRole {
    /// `None` for a peer that is no anchor.
    anchor: Option<Anchor>,
    events: Option<mpsc::Receiver<AnchorEvent>>,
    /// `Some` while this anchor leads.
    coordinator: Option<ActiveCoordinator>,
    /// The anchors that the coordinator wants; empty before it has decided.
    wanted: BTreeSet<PeerId>,
    wait_for: usize,
    rebalance: Rebalance,
    extend_after: Duration,
    /// The history to found, if the log is empty.
    founding: Option<Founding>,
    /// The folder of the log.
    folder: PathBuf,
    /// Whether this peer founds logs.
    founds: bool,
    /// Whether the log is of an earlier history of the run, and another one takes its place.
    outdated: bool,
    /// Whether it was reported that too few anchors exist, and that too few of them answer.
    warned: bool,
    paused: bool,
    too_few: Option<TooFew>,
    /// The number of anchors whose majority signed for the local coordinator.
    proved_voters: usize,
    /// The number of anchors that was reported last.
    announced: usize,
}

/// A coordinator, and the term in which its anchor leads.
struct ActiveCoordinator {
    coordinator: Coordinator,
    term: Term,
}

/// Too few anchors answer to elect a leader.
#[derive(Debug, Clone, Copy)]
struct TooFew {
    since: Instant,
    answering: usize,
    anchors: usize,
}

/// Sends messages to other anchors.
struct AnchorLinks {
    me: Incarnation,
    transport: Option<Transport>,
    names: PeerNames,
}

impl anchor::Links for AnchorLinks {
    fn title(&self, peer: PeerId) -> String {
        self.names.title(peer)
    }

    fn send(&self, to: PeerId, message: AnchorMessage) {
        let Some(transport) = &self.transport else { return };
        // An anchor is the same voter in every life, and the log has terms of its own.
        let (to_life, era, term) = (Incarnation(0), Era(0), Term(0));
        let message = Message::Anchor(message);
        let envelope = Envelope { from: self.me, to: to_life, era, term, message };
        let bytes = wire::encode(&envelope).expect("anchors' messages are under their cap");
        if let Err(error) = transport.send_control(to, bytes) {
            tracing::debug!(peer = self.title(to), %error, "an anchor's message was not sent");
        }
    }
}

impl AnchorRole {
    /// Opens the log, if this peer is an anchor.
    ///
    /// # Errors
    /// When the folder cannot be made, or the log in it is damaged.
    pub(super) async fn open(role: &RoleSetup, context: &Context) -> anyhow::Result<Self> {
        let Context { me, transport, .. } = context;
        let (mut anchor, mut events, alone) = (None, None, transport.is_none());
        let run = context.manifest.run_id().to_string();
        let folder = context.data_dir.join("runs").join(run).join("log");
        if let Some(start) = role.anchor {
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("{} cannot be made", folder.display()))?;
            let (first, timing) = (context.manifest.first_version(), Timing::default());
            let founds = matches!(start, AnchorStart::Founds);
            let (folder, me) = (folder.clone(), *me);
            let removed = removed_anchors(transport.as_ref().filter(|_| founds));
            let founding = role.founding.as_ref().map(|founding| founding.number);
            let voucher =
                Voucher { run: context.manifest.run_id(), keys: context.keys.clone(), founding };
            let config = AnchorConfig { folder, me: me.peer, first, timing, voucher, removed };
            let (transport, names) = (transport.clone(), context.names.clone());
            let links = Arc::new(AnchorLinks { me: me.incarnation, transport, names });
            let (opened, receiver) = Anchor::open(config, founds, links).await?;
            (anchor, events) = (Some(opened), Some(receiver));
        }
        Ok(Self {
            anchor,
            events,
            coordinator: None,
            wanted: BTreeSet::new(),
            wait_for: role.wait_for,
            rebalance: role.rebalance,
            extend_after: role.extend_after,
            founding: role.founding.clone(),
            folder,
            founds: matches!(role.anchor, Some(AnchorStart::Founds)),
            outdated: false,
            warned: alone,
            paused: false,
            too_few: None,
            proved_voters: 0,
            announced: 0,
        })
    }

    /// Returns the state of the run as the local log has it.
    pub(super) fn history(&self) -> Option<History> {
        self.anchor.as_ref().map(Anchor::history)
    }

    /// Returns the anchors that the local log names, as a group that proves terms.
    pub(super) fn group(&self) -> Option<AnchorGroup> {
        self.anchor.as_ref().and_then(Anchor::group)
    }

    /// Signs from now on for a leader whose election was proved.
    pub(super) fn follow(&self, term: Term, leader: PeerId) {
        if let Some(anchor) = &self.anchor {
            anchor.follow(term, leader);
        }
    }

    /// Returns the peers that keep the log, as far as this peer knows.
    pub(super) fn voters(&self) -> BTreeSet<PeerId> {
        self.anchor.as_ref().map(Anchor::voters).unwrap_or_default()
    }

    /// Returns whether this peer alone keeps the log.
    pub(super) fn is_alone(&self) -> bool {
        self.anchor.is_some() && self.voters().len() < 2
    }

    /// Returns whether too few anchors answer, and that was reported.
    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Returns whether the run has ended and its model is in the archive. A record that the log is
    /// known to have is agreed on, whether other anchors answer or not.
    pub(super) fn has_completed(&self, context: &Context) -> bool {
        let archive = context.archive.as_ref().map(Archive::folder);
        let complete = |history: History| is_complete(&history, &context.manifest, archive);
        (archive.is_some() || !self.is_alone()) && self.history().is_some_and(complete)
    }

    pub(super) fn coordinator(&self) -> Option<&Coordinator> {
        self.coordinator.as_ref().map(|active| &active.coordinator)
    }

    /// Hands the coordinator an input, if it is here.
    pub(super) fn handle(
        &mut self,
        now: Moment,
        input: CoordinatorInput,
    ) -> Vec<CoordinatorAction> {
        let mut out = Vec::new();
        if let Some(active) = &mut self.coordinator {
            active.coordinator.handle(now, input, &mut out);
        }
        out
    }

    /// Waits for the next event of the anchor. Safe to cancel.
    pub(super) async fn next(&mut self) -> Option<AnchorEvent> {
        match &mut self.events {
            Some(events) => events.recv().await,
            None => std::future::pending().await,
        }
    }

    /// Hands a message of another anchor to the local one. Returns what became of it; `None` if it was not taken:
    /// the sender must be known as an anchor, or vote.
    pub(super) fn receive(
        &mut self,
        from: PeerId,
        message: AnchorMessage,
        known: bool,
    ) -> Option<Heard> {
        let anchor = self.anchor.as_ref();
        let anchor = anchor.filter(|anchor| known || anchor.voters().contains(&from))?;
        let heard = anchor.heard(from, message);
        // A peer that founds logs would found another one.
        self.outdated |= heard == Heard::NewerHistory && !self.founds;
        Some(heard)
    }

    /// Returns whether the log is set aside at the end of this life, so that the next one begins without it.
    pub(super) fn is_outdated(&self) -> bool {
        self.outdated
    }

    /// Appends a record to the log, in the term of the local coordinator.
    pub(super) fn append(&self, record: LogRecord) {
        let (Some(anchor), Some(active)) = (&self.anchor, &self.coordinator) else { return };
        anchor.append(active.term, record);
    }

    /// Sets the anchors that the coordinator wants.
    pub(super) fn set_wanted(&mut self, wanted: BTreeSet<PeerId>, out: &mut Effects) {
        self.wanted = wanted;
        self.change_voters(out);
    }

    /// Changes the voters to the wanted anchors; repeated until it has succeeded.
    fn change_voters(&mut self, out: &mut Effects) {
        let Some(anchor) = self.anchor.as_ref().filter(|_| self.coordinator.is_some()) else {
            return;
        };
        if !self.wanted.is_empty() && anchor.voters() != self.wanted {
            anchor.set_voters(self.wanted.clone());
        }
        if self.wanted.len() >= ENOUGH {
            self.warned = false;
        } else if !std::mem::replace(&mut self.warned, true) {
            out.push(RunEvent::FewAnchors { wanted: ENOUGH }.into());
        }
    }

    /// Repeats a change of the voters, and reports changes of their number and pauses.
    pub(super) fn tick(&mut self, out: &mut Effects) {
        self.change_voters(out);
        let leads = self.anchor.as_ref().filter(|_| self.coordinator.is_some());
        let count = leads.map_or(0, |_| self.proved_voters);
        if count > 1 && count != std::mem::replace(&mut self.announced, count) {
            out.push(RunEvent::Anchors { count }.into());
        }
        // An election passes without a leader, and a peer that just started knows no other yet.
        if let Some(TooFew { answering, anchors, .. }) =
            self.too_few.filter(|few| few.since.elapsed() >= PAUSE)
            && !std::mem::replace(&mut self.paused, true)
        {
            out.push(RunEvent::Paused { answering, anchors }.into());
        }
    }

    /// Notes that the anchors have a leader.
    pub(super) fn leader_found(&mut self) {
        self.too_few = None;
        self.paused = false;
    }

    /// Notes that so many of the anchors answer, and none of them leads.
    pub(super) fn leader_missing(&mut self, answering: usize, anchors: usize) {
        let since = self.too_few.map_or_else(Instant::now, |few| few.since);
        // A peer that waits to be made an anchor knows of none.
        let few = anchors > 0 && answering * 2 <= anchors;
        self.too_few = few.then_some(TooFew { since, answering, anchors });
    }

    /// Notes the anchors that signed for the local coordinator.
    pub(super) fn confirmed(&mut self, proof: &TermProof) {
        self.proved_voters = match proof.vote.group.voters.as_slice() {
            [voters] => voters.len(),
            // A change of the voters is under way.
            _ => self.proved_voters,
        };
    }

    /// Ends the local coordinator: another anchor leads.
    pub(super) fn deposed(&mut self) {
        self.coordinator = None;
    }

    /// Starts the coordinator from the state in the log: the anchors elected this one.
    pub(super) fn lead(
        &mut self,
        context: &Context,
        term: Term,
        history: History,
        proof: &TermProof,
    ) -> Vec<CoordinatorAction> {
        let manifest = &context.manifest;
        let mut coordinator = Coordinator::new(CoordinatorConfig {
            manifest: manifest.clone(),
            term: proof.vote.term,
            history,
            founding: self.founding.take(),
            anchors: self.voters(),
            wait_for: self.wait_for,
            home: context.me,
            retry: RETRY,
            patience: patience(manifest),
            return_trip: CHECKPOINT_WAIT,
            extend_after: self.extend_after,
            load: Load::of(
                manifest,
                |stage| summed_elements(manifest, stage) as u64,
                |stage| {
                    (parameter_count(manifest, stage) + optimizer_elements(manifest, stage)) as u64
                },
            ),
            rebalance: self.rebalance,
            sealer: context.sealer(),
            routing: Routing::default(),
        });
        let mut out = Vec::new();
        coordinator.start(context.now(), &mut out);
        self.too_few = None;
        self.confirmed(proof);
        self.coordinator = Some(ActiveCoordinator { coordinator, term });
        out
    }

    /// Moves the log of an earlier history away, so that the next life begins without one.
    fn set_log_aside(&self) {
        let aside = self.folder.with_extension("replaced");
        let moved = match std::fs::remove_dir_all(&aside) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => std::fs::rename(&self.folder, &aside),
        };
        if let Err(error) = moved {
            let folder = self.folder.display();
            tracing::error!(%folder, %error, "the log of an earlier history is in the way: remove it");
        }
    }

    /// Ends the coordinator, the anchor and its writing.
    pub(super) async fn close(&mut self) {
        self.coordinator = None;
        if let Some(anchor) = self.anchor.take() {
            anchor.close().await;
        }
        if self.outdated {
            self.set_log_aside();
        }
    }
}

/// Returns the anchors that the run's issuer removed: those that it banned.
fn removed_anchors(transport: Option<&Transport>) -> BTreeSet<PeerId> {
    transport.map(|transport| transport.gate().access_list().0.banned).unwrap_or_default()
}

/// Returns the time after which the first all-reduce without a result is tried again.
fn patience(manifest: &Manifest) -> Duration {
    let numbers = manifest.weight_groups().map(|weights| group_elements(manifest, weights) as u64);
    round_patience(manifest.codec.all_reduce, numbers.max().unwrap_or(0))
}
