//! The driver: tells the scheduler what happened and does what it answers.
//!
//! One task owns the state machines and runs until the run is over. Around it: the engine's thread
//! ([`engine_thread`]), the links ([`incoming`], [`outgoing`]), the commit log's thread
//! ([`commit_log`]) and, while one is brought together, a checkpoint ([`collect`]). What a peer says
//! to itself goes through the same inputs as what others say, so a run alone is a swarm of one.

mod actions;
mod checkpoint_writer;
pub(crate) mod chunks;
mod collect;
mod doors;
mod engine_thread;
mod farewell;
mod gathered;
mod heard;
pub mod home;
mod incoming;
mod keeper;
mod landmarks;
mod meters;
pub mod observer;
mod office;
mod outgoing;
mod packer;
mod payload;
mod port_watch;
mod probe;
mod prospects;
pub(crate) mod resume;
mod room;
mod setup;
mod sight;
mod spill;
mod staging;
mod text;
mod unpacker;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use shoal_engine::{Device, DeviceChoice};
use shoal_metrics::{NodeState, Preemption, Refusal};
use shoal_protocol::ids::{Era, Member, PeerId, Stage, StageSpan, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{
    Candidate, Duties, LinkEstimate, StageChoice, StoredStage, ToCoordinator, View,
};
use shoal_protocol::net::transport::TransportEvent;
use shoal_protocol::units::{Moment, Rate};
use shoal_scheduler::action::{CoordinatorInput, PeerInput, TaskResult};
use shoal_scheduler::coordinator::Coordinator;
use shoal_scheduler::peer::{Peer, PeerConfig, PeerLimits};
use shoal_scheduler::router::Routing;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

pub(crate) use self::collect::{Scattered, collect};
pub use self::packer::PackingMode;
pub use self::room::RoomLimits;
pub use self::setup::{AnchorPart, Leaving, Network, Office, Setup};
use crate::events::RunEvent;
use crate::exit::{Exit, ExitWith};
use crate::progress;
use checkpoint_writer::Shelf;
use doors::Doors;
use engine_thread::{EngineThread, Job, JobDone, Workshop};
use farewell::Farewell;
use gathered::Gathered;
use home::Files;
use keeper::Keeper;
use meters::Meters;
use observer::Observer;
use office::Post;
use outgoing::Links;
use payload::Payloads;
use port_watch::PortWatch;
use prospects::{known_answers, offer_kept, peak_flops};
use room::Room;
use sight::Lookout;
use text::Text;
use unpacker::Unpacker;

/// Checkpoints and snapshots that are brought together at once.
const COLLECTIONS: usize = 64;

/// How often it is looked for the file that announces a preemption.
const PREEMPTION_POLL: Duration = Duration::from_millis(500);

/// Takes part in a run until it is over.
///
/// # Errors
/// When the run cannot go on, or this process cannot.
pub async fn run(setup: Setup, observer: &mut Observer) -> anyhow::Result<Outcome> {
    let mut driver = Driver::new(setup, observer).await?;
    let outcome = match driver.ending {
        Some(Ending::Complete) => Ok(Outcome::Complete),
        _ => driver.drive().await,
    };
    driver.close().await;
    outcome
}

/// How a life ends for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The run is over.
    Finished,
    /// The others went on without this peer; it may come back as a new life.
    Expelled,
    /// The peer that keeps the run cannot be reached; it may come back.
    Orphaned,
    /// It left in order, as it was asked to.
    Drained,
    /// The run had come to its end before.
    Complete,
}

/// How a run ends for this process.
enum Ending {
    Finished,
    Stopped(String),
    Refused(String),
    Expelled(String),
    Orphaned(String),
    Drained,
    Complete,
}

/// Something for one of this process's own state machines.
enum Own {
    Peer(PeerInput),
    Coordinator(CoordinatorInput),
}

struct Driver<'a> {
    manifest: Arc<Manifest>,
    me: Member,
    era: Era,
    clock: Instant,
    peer: Peer,
    /// Who keeps the run; perhaps this peer.
    coordinator: Keeper,
    post: Post,
    /// A word for a keeper that is not known yet.
    unsaid: Option<ToCoordinator>,
    own: VecDeque<Own>,
    payloads: Payloads,
    workshop: WorkshopPlan,
    engine: Option<EngineThread>,
    files: Files,
    /// Versions of checkpoints whose parts are kept here, the oldest of use first.
    kept: BTreeSet<Step>,
    /// The newest complete checkpoint that was told of.
    newest: Option<(Step, Vec<StoredStage>)>,
    /// Checkpoints that are being brought together.
    archiving: usize,
    links: Option<Links>,
    network: Option<mpsc::Receiver<TransportEvent>>,
    unpacker: Unpacker,
    /// Where peers were reached: their own word does not know how others see them.
    seen_at: BTreeMap<PeerId, SocketAddr>,
    tracker: TaskTracker,
    /// What was brought here in the background.
    gathered: (mpsc::Sender<Gathered>, mpsc::Receiver<Gathered>),
    /// Who is a member.
    view: View,
    /// The newest step that was told of, and in which era.
    told: Option<(Era, Step)>,
    observer: &'a mut Observer,
    meters: Meters,
    lookout: Lookout,
    doors: Doors,
    own_port: PortWatch,
    step_began: Moment,
    ending: Option<Ending>,
    /// When the run is over: those who are still to be told.
    farewell: Option<Farewell>,
    preempt_file: Option<PathBuf>,
    /// When that file is looked for next.
    preempt_poll: Instant,
    drain_timeout: Duration,
    /// It leaves, at this moment at the latest.
    drain_until: Option<Instant>,
}

/// What the engine is made of once the hosted stages are known.
struct WorkshopPlan {
    device: DeviceChoice,
    threads: usize,
    slow_down: Duration,
    data_dir: PathBuf,
    room: Room,
    /// Whether it may be given another stage than its first.
    mobile: bool,
}

impl<'a> Driver<'a> {
    async fn new(setup: Setup, observer: &'a mut Observer) -> anyhow::Result<Self> {
        let room = Room::measure(setup.room, setup.device.is_processor(), &setup.data_dir)?;
        let (peer, mobile) = peer(&setup, &room).await?;
        let Setup { manifest, me, device, threads, network, office, .. } = setup;
        let coordinator = Keeper::new(office.coordinator);
        let run = manifest.run_id();
        let folder = setup.data_dir.join("runs").join(run.to_string()).join("log");
        let transport = network.as_ref().map(|network| network.transport.clone());
        let post = Post::take_up(office, me, folder, transport).await?;
        let complete = post.has_completed(&manifest);
        let meters = Meters::new(setup.metrics.clone(), &manifest, post.history().as_ref());
        let peak =
            if setup.watched { Some(peak_flops(&manifest, device, threads).await?) } else { None };
        meters.room(room.memory(), room.log_memory(), peak);
        let (data_dir, archive) = (setup.data_dir.clone(), post.archive.clone());
        for _ in 0..offer_kept(data_dir, archive, run, setup.files.clone()).await? {
            meters.refused(Refusal::Checkpoint);
        }
        let (tracker, own_port) = (TaskTracker::new(), PortWatch::of(network.as_ref()));
        let lookout = Lookout::new(observer.board().clone());
        let (links, events) = Links::of(network, &tracker, setup.metrics);
        if let Some(links) = &links {
            links.transport.set_chunk_packing(manifest.codec.chunks);
        }
        Ok(Self {
            unpacker: Unpacker::new(manifest.clone()),
            manifest,
            me,
            era: Era(0),
            clock: Instant::now(),
            peer,
            coordinator,
            post,
            unsaid: None,
            own: VecDeque::new(),
            payloads: Payloads::default(),
            workshop: WorkshopPlan {
                device,
                threads,
                slow_down: setup.slow_down,
                data_dir: setup.data_dir,
                room,
                mobile,
            },
            engine: None,
            files: setup.files,
            kept: BTreeSet::new(),
            newest: None,
            archiving: 0,
            doors: Doors::of(links.as_ref()),
            links,
            network: events,
            seen_at: BTreeMap::new(),
            tracker,
            gathered: mpsc::channel(COLLECTIONS),
            view: View::default(),
            told: None,
            observer,
            meters,
            lookout,
            own_port,
            step_began: Moment::default(),
            ending: complete.then_some(Ending::Complete),
            farewell: None,
            preempt_file: setup.leaving.preempt_file,
            preempt_poll: Instant::now(),
            drain_timeout: setup.leaving.drain_timeout,
            drain_until: None,
        })
    }

    fn now(&self) -> Moment {
        Moment(self.clock.elapsed())
    }

    fn note(&mut self, event: &RunEvent) {
        self.observer.note(event);
    }

    /// Runs until the run is over.
    async fn drive(&mut self) -> anyhow::Result<Outcome> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        self.note(&RunEvent::Started {
            run: self.manifest.run_id(),
            seed: self.manifest.training.seed,
            stages: self.manifest.training.stages,
            steps: self.manifest.training.steps,
            tokens_per_step: self.manifest.tokens_per_step(),
            microbatches: self.manifest.training.microbatches,
        });
        self.begin();
        loop {
            self.settle();
            self.meters.load(&self.peer.load(), self.payloads.log_use());
            if let Some(links) = &self.links {
                self.meters.links(&links.transport, &self.view);
            }
            self.look();
            self.look_at_doors();
            match self.ending.take() {
                None => {}
                Some(Ending::Finished) if self.may_end() => return Ok(Outcome::Finished),
                Some(Ending::Finished) => self.ending = Some(Ending::Finished),
                Some(Ending::Expelled(reason)) => {
                    tracing::warn!(%reason, "expelled");
                    return Ok(Outcome::Expelled);
                }
                Some(Ending::Drained) => return Ok(Outcome::Drained),
                Some(Ending::Complete) => return Ok(Outcome::Complete),
                Some(Ending::Orphaned(reason)) => {
                    tracing::warn!(%reason, "nobody keeps the run");
                    return Ok(Outcome::Orphaned);
                }
                Some(Ending::Stopped(reason)) => bail!("the run stopped: {reason}"),
                // What was logged last is known only once this process keeps the log again.
                Some(Ending::Refused(_)) if self.post.has_completed(&self.manifest) => {
                    return Ok(Outcome::Complete);
                }
                Some(Ending::Refused(reason)) => {
                    return Err(anyhow::anyhow!("not admitted: {reason}"))
                        .exit_with(Exit::NotAdmitted);
                }
            }
            self.wait(&mut interrupt, &mut terminate).await?;
        }
    }

    /// Whether what it archives has come together, and those who keep the log know of the end.
    fn may_end(&self) -> bool {
        let told = self.farewell.as_ref().is_none_or(|farewell| farewell.is_over(Instant::now()));
        self.archiving == 0 && (told || self.drain_until.is_some())
    }

    fn begin(&mut self) {
        let now = self.now();
        if let Some(history) = self.post.history() {
            self.meet_addresses(&history.view);
        }
        let mut out = Vec::new();
        self.peer.start(now, &mut out);
        self.obey_peer(out);
    }

    /// Hands the state machines what they have said to each other, until they are quiet.
    fn settle(&mut self) {
        self.say_what_waits();
        while let Some(own) = self.own.pop_front() {
            let now = self.now();
            match own {
                Own::Peer(input) => {
                    let mut out = Vec::new();
                    self.peer.handle(now, input, &mut out);
                    self.obey_peer(out);
                }
                Own::Coordinator(input) => {
                    let mut out = Vec::new();
                    if let Some(seat) = &mut self.post.seat {
                        seat.coordinator.handle(now, input, &mut out);
                    }
                    self.obey_coordinator(out);
                }
            }
            self.say_what_waits();
        }
    }

    /// Says what was to be said when there was nobody yet to hear it.
    fn say_what_waits(&mut self) {
        let Some(coordinator) = self.coordinator.member() else { return };
        let hears = coordinator != self.me
            || self.post.coordinator().is_some_and(Coordinator::is_in_office);
        if hears && let Some(message) = self.unsaid.take() {
            self.tell_coordinator(message);
        }
    }

    /// Waits for the next thing to happen.
    async fn wait(&mut self, interrupt: &mut Signal, terminate: &mut Signal) -> anyhow::Result<()> {
        let timeouts =
            [self.peer.next_timeout(), self.post.coordinator().and_then(Coordinator::next_timeout)];
        let timeout = timeouts.into_iter().flatten().min();
        let clock = self.clock;
        let watches = self.preempt_file.is_some() && self.drain_until.is_none();
        let orphaned = self.coordinator.patience_ends();
        let farewell = self.farewell.as_ref().map(Farewell::until);
        let drain_end = self.drain_until.unwrap_or_else(Instant::now).into();
        tokio::select! {
            done = next_done(&mut self.engine) => self.engine_done(done)?,
            event = next_event(&mut self.network) => self.network_event(event),
            unpacked = self.unpacker.next() => self.unpacked(unpacked?),
            event = self.post.next() => self.anchor_event(event),
            Some(gathered) = self.gathered.1.recv() => self.gathered(gathered),
            () = sleep_until(clock, timeout) => {
                self.own.push_back(Own::Peer(PeerInput::Tick));
                self.own.push_back(Own::Coordinator(CoordinatorInput::Tick));
                self.tend_anchors();
            }
            () = self.doors.changed() => self.doors_changed(),
            port = self.own_port.next() => self.port_stands(port),
            () = sleep_to(farewell) => self.farewell = None,
            () = sleep_to(orphaned) => {
                let reason = "its keeper has been out of reach for too long".to_owned();
                self.ending.get_or_insert(Ending::Orphaned(reason));
            }
            _ = interrupt.recv() => self.drain(Preemption::Interrupted)?,
            _ = terminate.recv() => self.drain(Preemption::Terminated)?,
            () = tokio::time::sleep_until(self.preempt_poll.into()), if watches => {
                self.preempt_poll = Instant::now() + PREEMPTION_POLL;
                if self.preempt_file.as_deref().is_some_and(Path::exists) {
                    self.drain(Preemption::File)?;
                }
            }
            () = tokio::time::sleep_until(drain_end), if self.drain_until.is_some() => {
                tracing::warn!("the drain took too long: others do again what is not finished");
                self.tell_coordinator(ToCoordinator::Leave);
                self.ending.get_or_insert(Ending::Drained);
            }
        }
        Ok(())
    }

    fn engine_done(&mut self, done: Option<JobDone>) -> anyhow::Result<()> {
        let JobDone { result, busy } = done.context("the engine's thread panicked")?;
        let result = result?;
        self.meters.computed(&result, busy);
        if matches!(result, TaskResult::Summarised { .. }) {
            // Goes out with what the round came to.
            self.own.push_back(Own::Peer(PeerInput::Links(self.measured_links())));
        }
        self.own.push_back(Own::Peer(PeerInput::Done { result, busy }));
        Ok(())
    }

    /// What the links to the other members were measured to be.
    fn measured_links(&self) -> BTreeMap<PeerId, LinkEstimate> {
        let Some(links) = &self.links else { return BTreeMap::new() };
        let peers = self.view.members.iter().map(|record| record.member.peer);
        let link = |peer| {
            let round_trip = links.transport.path_to(peer)?.shortest_round_trip;
            let rate = links.transport.rate_to(peer).map(|rate| Rate(rate as u64));
            Some((peer, LinkEstimate { round_trip, rate }))
        };
        peers.filter_map(link).collect()
    }

    /// Leaves in order, as far as the time for it allows. Who asks again does not want to wait.
    fn drain(&mut self, told_by: Preemption) -> anyhow::Result<()> {
        let source = match told_by {
            Preemption::Terminated => "SIGTERM",
            Preemption::Interrupted => "SIGINT",
            Preemption::File => "the preemption file",
        };
        if self.drain_until.is_some() || self.links.is_none() {
            self.tell_coordinator(ToCoordinator::Leave);
            bail!("interrupted by {source}");
        }
        self.meters.is(NodeState::Draining);
        self.meters.preempted(told_by);
        let event = RunEvent::Draining { source: source.to_owned() };
        progress::say(&progress::describe(&event).expect("leaving is told of"));
        self.note(&event);
        self.drain_until = Some(Instant::now() + self.drain_timeout);
        if self.post.seat.is_some() && self.post.is_alone() {
            // The run stands still until it is started again, so there is nothing to wait for.
            self.ending.get_or_insert(Ending::Drained);
        } else {
            self.own.push_back(Own::Peer(PeerInput::Drain));
        }
        Ok(())
    }

    /// Starts the engine for these stages. A peer of the first stage fetches the text if need be.
    fn open_workshop(&mut self, span: StageSpan) -> anyhow::Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        let plan = &self.workshop;
        self.meters.hosts(plan.room.memory_for(&self.manifest, span, 1));
        let spill = plan.room.spill_file(&self.manifest, span, plan.mobile);
        let spill = spill.context("the disk has no room for the output log")?;
        self.payloads.spill_into(spill, plan.room.log_memory());
        let (device, threads, slow_down) = (plan.device, plan.threads, plan.slow_down);
        let data_dir = plan.data_dir.clone();
        let (manifest, payloads, files) =
            (self.manifest.clone(), self.payloads.clone(), self.files.clone());
        let text = self.text();
        let transport = self.links.as_ref().map(|links| links.transport.clone());
        let holders = self.text_holders();
        let runtime = tokio::runtime::Handle::current();
        let make = move || {
            let needs_text = span.contains(Stage(0));
            let samples = if needs_text {
                runtime.block_on(text.obtain(transport, holders))?;
                Some(text.open()?)
            } else {
                None
            };
            let engine =
                shoal_engine::Engine::new(&manifest, span, Device::open(device, threads)?)?;
            let (stored, fetched) = (data_dir.join(resume::STORED), data_dir.join(resume::FETCHED));
            let shelf = Shelf { manifest, stored, files };
            Ok(Workshop { engine, samples, text, payloads, shelf, fetched, slow_down })
        };
        self.engine = Some(EngineThread::start(make).context("no thread for the engine")?);
        Ok(())
    }

    fn text(&self) -> Text {
        let folder = self.workshop.data_dir.clone();
        Text { manifest: self.manifest.clone(), folder, files: self.files.clone() }
    }

    /// Who may have the text: who hosts the first stage, who archives, and who keeps the run.
    fn text_holders(&self) -> Vec<PeerId> {
        let members = self.view.members.iter();
        let able = members.filter(|record| record.span.contains(Stage(0)) || record.duties.archive);
        let coordinator = self.coordinator.member().map(|member| member.peer);
        let all = able.map(|record| record.member.peer).chain(coordinator);
        all.filter(|peer| *peer != self.me.peer).collect()
    }

    async fn close(&mut self) {
        self.meters.over();
        self.post.close().await;
        if let Some(links) = &self.links {
            self.tracker.close();
            self.unpacker.close().await;
            let sent = links.transport.traffic();
            tracing::info!(tensor = %sent.tensor.sent, control = %sent.control.sent, "sent");
            self.network = None;
            links.transport.close().await;
        }
    }
}

/// This process's peer, which hosts what the machine has room for, and whether it may move.
async fn peer(setup: &Setup, room: &Room) -> anyhow::Result<(Peer, bool)> {
    let Setup { manifest, me, choice, device, threads, network, office, .. } = setup;
    let fits = room.fits(manifest, *choice).exit_with(Exit::NotAdmitted)?;
    let mobile = room.has_any_two(manifest, *choice, &fits);
    let fingerprint = match choice {
        StageChoice::None => None,
        _ => Some(known_answers(manifest.clone(), *device, *threads).await?),
    };
    let limits = PeerLimits::default();
    let largest_window = room.window(manifest, &fits, limits.largest_window);
    let candidate = Candidate {
        choice: *choice,
        fits,
        mobile,
        link_estimates: None,
        addresses: network.as_ref().map_or_else(Vec::new, |net| net.addresses.clone()),
        fingerprint,
        duties: Duties { anchor: office.anchor.is_some(), archive: office.archive.is_some() },
    };
    let peer = Peer::new(PeerConfig {
        me: *me,
        manifest: manifest.clone(),
        candidate,
        parameters: manifest
            .stages()
            .map(|stage| (stage, shoal_engine::parameter_count(manifest, stage)))
            .collect(),
        limits: PeerLimits { largest_window, ..limits },
        seed: u64::from_le_bytes(*me.peer.0.first_chunk().expect("32 bytes")),
        routing: Routing::default(),
    });
    Ok((peer, mobile))
}

async fn next_done(engine: &mut Option<EngineThread>) -> Option<JobDone> {
    match engine {
        Some(engine) => engine.done().await,
        None => std::future::pending().await,
    }
}

async fn next_event(
    network: &mut Option<mpsc::Receiver<TransportEvent>>,
) -> Option<TransportEvent> {
    match network {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

async fn sleep_to(end: Option<Instant>) {
    match end {
        Some(end) => tokio::time::sleep_until(end.into()).await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(clock: Instant, timeout: Option<Moment>) {
    match timeout {
        Some(moment) => tokio::time::sleep_until((clock + moment.0).into()).await,
        None => std::future::pending().await,
    }
}
