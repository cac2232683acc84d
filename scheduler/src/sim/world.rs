//! The simulated world that drives the state machines: a clock, an ordered queue of events, and the
//! counterparts of the real node's drivers. `faults` injects faults.

mod coordination;
mod coverage_marks;
mod event;
mod faults;
mod log;
mod seen;
mod trace;
mod traffic;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shoal_protocol::ids::{
    ContentHash, Era, Incarnation, Member, PeerId, Stage, StageSpan, Step, Term,
};
use shoal_protocol::message::{Candidate, Duties, PeerMessage, StageChoice};
use shoal_protocol::units::Moment;

use self::coverage_marks::Marks;
use self::event::{Cargo, Event};
use self::log::{Log, Seat};
use super::corruption::Corruption;
use super::engine::{Engine, is_pass};
use super::integer_model::Weights;
use super::network::Network;
use super::omitted_rules::{Omit, OmittedRules};
use super::oracle::{Oracles, Violation};
use super::payloads::Payloads;
use super::report::{Report, Trace};
use super::scenario::Scenario;
use super::watch::{Seen, Watch};
use crate::action::{PeerAction, PeerInput, Task, TaskResult};
use crate::peer::{Peer, PeerConfig};
use crate::rng::Rng;
use crate::router::Routing;

/// Maximum number of events of a run, for each simulated hour, and for each peer: far more than any
/// run takes.
const EVENTS: u64 = 20_000_000;
const EVENTS_OF_A_PEER: u64 = 200_000;

/// The limit for a small swarm that omits a rule and may loop.
#[cfg(test)]
const EVENTS_WITHOUT_A_RULE: u64 = 2_000_000;

/// The index of the first coordinator, which also archives the checkpoints.
const FIRST: usize = 0;

/// A peer and its driver.
#[derive(Debug)]
struct Node {
    peer: Peer,
    engine: Engine,
    payloads: Payloads,
    tick_at: Option<Moment>,
    span: Option<StageSpan>,
    finished: bool,
    me: Member,
    era: Era,
    /// The newest coordinator's term that it knows.
    term: Term,
    /// The coordinator that it believes in.
    coordinator: Option<Member>,
    /// The coordinator instance on this peer.
    seat: Option<Seat>,
    alive: bool,
    /// The end of its current stall.
    paused: Moment,
    /// Events that arrived during the stall, in order.
    delayed: VecDeque<Event>,
    /// Incarnations of others that it knows to be gone.
    known_dead: BTreeSet<Member>,
}

/// One run of the simulator.
#[derive(Debug)]
pub(super) struct World<'a> {
    scenario: &'a Scenario,
    corruption: Corruption,
    corrupted: bool,
    /// Stage whose replicas die with the next commit, and the time until they restart.
    ambush: Option<(usize, Duration)>,
    omitted_rules: OmittedRules,
    now: Moment,
    /// Ordered by time, then by the order of their creation.
    events: BTreeMap<(Moment, u64), Box<Event>>,
    sequence: u64,
    network: Network,
    /// Number of reconnections of two peers: data sent over an earlier connection is lost.
    connections: BTreeMap<(usize, usize), u64>,
    rng: Rng,
    log: Log,
    nodes: Vec<Node>,
    /// `None` in runs that show which corruptions are caught without oracles.
    oracles: Option<Oracles>,
    trace: Trace,
    marks: Marks,
    /// Whether every event is printed.
    traced: bool,
    /// Limit of events after which the run counts as endless.
    most: u64,
    watch: Option<&'a mut dyn Watch>,
    report: Report,
}

/// The result of a check.
type Held = Result<(), Violation>;

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario, corruption: Corruption, with_oracles: bool) -> Self {
        let first = Incarnation(1);
        let nodes = (0..scenario.peers.len()).map(|index| node(scenario, index, first)).collect();
        let hours = 1 + scenario.until.unwrap_or_default().as_secs() / 3600;
        Self {
            scenario,
            corruption,
            corrupted: false,
            ambush: None,
            omitted_rules: OmittedRules::new(Omit::Nothing),
            now: Moment::default(),
            events: BTreeMap::new(),
            sequence: 0,
            network: Network::new(scenario),
            connections: BTreeMap::new(),
            rng: Rng::new(scenario.seed ^ 0x776f_726c_6400_0000),
            log: Log::new([peer_id(FIRST)].into()),
            nodes,
            oracles: with_oracles.then(|| Oracles::new(scenario)),
            trace: Trace::default(),
            marks: Marks::default(),
            most: EVENTS.max(EVENTS_OF_A_PEER * scenario.peers.len() as u64) * hours,
            traced: cfg!(test) && std::env::var_os("SHOAL_SIM_TRACE").is_some(),
            watch: None,
            report: Report::default(),
        }
    }

    /// Adds an observer.
    pub(super) fn watched(mut self, watch: &'a mut dyn Watch) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Prints every event.
    pub(super) fn traced(mut self) -> Self {
        self.traced = true;
        self
    }

    /// Omits a rule of the protocol.
    #[cfg(test)]
    pub(super) fn without(mut self, rule: Omit) -> Self {
        self.omitted_rules = OmittedRules::new(rule);
        self.most = EVENTS_WITHOUT_A_RULE;
        self
    }

    /// Runs until no event is left.
    pub(super) fn run(mut self) -> Result<Report, Violation> {
        for (index, peer) in self.scenario.peers.iter().enumerate() {
            match peer.start {
                Some(start) => self.at(Moment(start), Event::Start(self.nodes[index].me)),
                None => self.nodes[index].alive = false,
            }
        }
        for (at, fault) in &self.scenario.faults.happen {
            self.at(Moment(*at), Event::Fault(*fault));
        }
        self.elect()?;
        while let Some(((at, _), event)) = self.events.pop_first() {
            assert!(at >= self.now, "time does not go back");
            if self.scenario.until.is_some_and(|until| at.0 > until) {
                return Ok(self.concluded());
            }
            self.now = at;
            self.report.events += 1;
            self.trace.note(at, &event);
            if self.traced {
                eprintln!("{:?} {event:?}", at.0);
            }
            self.happen(*event)?;
            if self.report.stopped.is_some() && self.oracles.is_none() {
                break;
            }
            let stuck = self.oracles.as_ref().map(|oracles| oracles.progress.check(at));
            // Events that remain after all peers have gone have no receiver.
            let gone = |node: &Node| !node.alive || node.finished;
            let stuck = stuck.filter(|held| held.is_err() && !self.nodes.iter().all(gone));
            self.holds("progress", stuck.unwrap_or(Ok(())))?;
            let endless = self.report.events > self.most;
            self.holds("progress", if endless { Err("it never ends".to_owned()) } else { Ok(()) })?;
        }
        self.finish()
    }

    fn happen(&mut self, event: Event) -> Held {
        if let Some(index) = event.target()
            && (self.nodes[index].paused > self.now || !self.nodes[index].delayed.is_empty())
        {
            self.nodes[index].delayed.push_back(event);
            return Ok(());
        }
        match event {
            Event::Start(me) if self.lives(me) => {
                let index = index_of(me);
                self.show(Seen::Born { peer: index });
                let mut actions = Vec::new();
                let now = self.reads(index);
                self.nodes[index].peer.start(now, &mut actions);
                self.carry_out(index, actions)?;
                self.schedule_tick(index);
                Ok(())
            }
            Event::Arrives { to, from, connection, era, term, cargo } => {
                self.arrives(to, from, connection, (era, term), cargo)
            }
            Event::Fetched { to, version, stage, weights } if self.lives(to) => {
                let whole = self.writes(to, version, stage, weights);
                self.input(index_of(to), PeerInput::Fetched { version, stage, whole })
            }
            Event::LinksProbed { to, link_estimates } if self.lives(to) => {
                self.input(index_of(to), PeerInput::LinksProbed(link_estimates))
            }
            Event::EngineDone(me) if self.lives(me) => {
                let index = index_of(me);
                self.engine_done(index)
            }
            Event::Written { to, version, stage, weights } if self.lives(to) => {
                let whole = self.writes(to, version, stage, Some(weights));
                let engine = &self.nodes[index_of(to)].engine;
                let result = engine.stored(version, stage, weights, whole);
                self.input(index_of(to), PeerInput::Done { result, busy: Duration::ZERO })
            }
            Event::Tick(me) if self.lives(me) => {
                self.nodes[index_of(me)].tick_at = None;
                self.input(index_of(me), PeerInput::Tick)
            }
            Event::Kept { to, version, stage, weights } if self.lives(to) => {
                let whole = self.writes(to, version, stage, weights);
                self.input(index_of(to), PeerInput::Kept { version, stage, whole })
            }
            Event::Appended { to, leadership, record } => self.appended(to, leadership, record),
            Event::Logged { leadership } => self.logged(leadership),
            Event::Elect => self.elect(),
            Event::Deposed { at, leadership } => {
                self.deposed(at, leadership);
                Ok(())
            }
            Event::Remind { to, leadership } => self.remind(to, leadership),
            Event::Fault(fault) => self.fault(fault),
            Event::Noticed { at, other, dead } => self.noticed(at, other, dead),
            Event::Unreached { at, other } if self.lives(at) => self.unreached(at, other),
            Event::Reborn(index) => {
                self.reborn(index);
                Ok(())
            }
            Event::Resume(index) => self.resume(index),
            Event::Start(_)
            | Event::Kept { .. }
            | Event::Fetched { .. }
            | Event::LinksProbed { .. }
            | Event::EngineDone(_)
            | Event::Written { .. }
            | Event::Tick(_)
            | Event::Unreached { .. } => Ok(()),
        }
    }

    /// Writes files to a peer's disk. Returns whether that succeeded.
    fn writes(
        &mut self,
        to: Member,
        version: Step,
        stage: Stage,
        weights: Option<Weights>,
    ) -> bool {
        let engine = &mut self.nodes[index_of(to)].engine;
        let weights = weights.filter(|_| self.now >= engine.disk_fails_until);
        let before = engine.disk.len();
        engine.disk.extend(weights.map(|weights| ((version, stage), weights)));
        // At the end of a run, a new archive on a slow link receives one file after the other.
        let brought = engine.disk.len() > before;
        if let Some(oracles) = self.oracles.as_mut().filter(|_| brought) {
            oracles.progress.advanced(self.now);
        }
        weights.is_some()
    }

    /// A peer's current clock reading.
    fn reads(&self, index: usize) -> Moment {
        self.scenario.peers[index].clock.reads(self.now)
    }

    /// Whether this incarnation is alive.
    fn lives(&self, member: Member) -> bool {
        let node = &self.nodes[index_of(member)];
        node.alive && node.me == member
    }

    fn input(&mut self, index: usize, input: PeerInput) -> Held {
        let mut actions = Vec::new();
        let now = self.reads(index);
        let from_coordinator =
            matches!(input, PeerInput::FromCoordinator { .. }).then(|| input.clone());
        let node = &mut self.nodes[index];
        node.peer.handle(now, input, &mut actions);
        if let Some(input) = from_coordinator {
            self.marks.peer(node.me, &input, &actions);
        }
        let load = node.peer.load();
        let held = self.oracles.as_ref().map(|oracles| oracles.limits.check(index, &load));
        self.holds("limits", held.unwrap_or(Ok(())))?;
        self.show(Seen::Holds { peer: index, load: &load });
        let widest = load.window.values().max().copied().unwrap_or(0);
        self.report.widest_window = self.report.widest_window.max(widest);
        self.carry_out(index, actions)?;
        self.schedule_tick(index);
        Ok(())
    }

    fn schedule_tick(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let clock = self.scenario.peers[index].clock;
        let due = node.peer.next_timeout().map(|due| clock.when(due).max(self.now));
        // An earlier tick is harmless; the next one is scheduled after it.
        if let Some(due) = due
            && node.tick_at.is_none_or(|tick| tick > due)
        {
            node.tick_at = Some(due);
            let me = node.me;
            self.at(due, Event::Tick(me));
        }
    }

    fn carry_out(&mut self, index: usize, actions: Vec<PeerAction>) -> Held {
        let me = self.nodes[index].me;
        for mut action in actions {
            if !self.corruption.peer_action(index, &mut action)
                || !self.omitted_rules.sent_by_peer(me, &action)
            {
                continue;
            }
            match action {
                PeerAction::ToCoordinator(message) => {
                    self.report_to_coordinator(me, message);
                }
                PeerAction::Send { to, message } => {
                    if matches!(message, PeerMessage::HeldBy { .. }) {
                        self.report.redirected += 1;
                    }
                    if matches!(message, PeerMessage::Busy { .. }) {
                        self.report.refused += 1;
                    }
                    self.send_message(me, to, message);
                }
                PeerAction::SendTensor { to, tag, payload } => {
                    let known = self.nodes[index].payloads.get(payload).cloned();
                    let (content, size) = self.holds("payloads", known)?;
                    self.send(me, to, Cargo::Tensor { tag, content, size });
                }
                PeerAction::ProbeLinks { at } => self.probe_links(index, &at),
                PeerAction::Fetch { version, part } => self.fetch(index, version, &part),
                PeerAction::Keep { version, part } => self.keep(index, version, &part),
                PeerAction::Compute(task) => self.compute(index, task),
                PeerAction::Release(id) => {
                    let released = self.nodes[index].payloads.release(id);
                    self.holds("payloads", released)?;
                }
                PeerAction::Event(event) => self.peer_event(index, event)?,
            }
        }
        Ok(())
    }

    fn compute(&mut self, index: usize, task: Task) {
        if let Some(end) = self.nodes[index].engine.give(self.now, task) {
            self.engine_began(index, end);
        }
    }

    fn engine_began(&mut self, index: usize, end: Moment) {
        self.at(end, Event::EngineDone(self.nodes[index].me));
        let Some(task) = self.nodes[index].engine.running().filter(|task| is_pass(task)) else {
            return;
        };
        if let Task::Forward { key, .. } | Task::Backward { key, .. } = task {
            let key = *key;
            self.report.ran(key.step, self.now, end);
            self.show(Seen::Ran { peer: index, key, until: end });
        }
    }

    fn engine_done(&mut self, index: usize) -> Held {
        let node = &mut self.nodes[index];
        let skipped = self.corruption == Corruption::CountNever && !self.corrupted;
        if skipped && matches!(node.engine.running(), Some(Task::Accumulate { .. })) {
            self.corrupted = true;
            node.engine.forget_gradient();
        }
        let finished = node.engine.finish(&mut node.payloads);
        let (result, busy, observed) = self.holds("engine", finished)?;
        if let Some(end) = self.nodes[index].engine.begin(self.now) {
            self.engine_began(index, end);
        }
        self.observe(index, &observed)?;
        let Some(result) = result else { return Ok(()) };
        if self.corruption == Corruption::CountTwice
            && !self.corrupted
            && matches!(result, TaskResult::Accumulated { .. })
        {
            self.corrupted = true;
            self.observe(index, &observed)?;
            self.input(index, PeerInput::Done { result: result.clone(), busy })?;
        }
        if let (Corruption::ApplyWithoutCommit, TaskResult::Summarised { round, .. }) =
            (self.corruption, &result)
        {
            self.compute(index, Task::Apply { round: *round, gradient_norm: 1.0 });
        }
        if matches!(result, TaskResult::Summarised { .. }) {
            self.input(index, PeerInput::Links(self.measured_links(index)))?;
        }
        self.input(index, PeerInput::Done { result, busy })
    }

    /// Whether the run ended, successfully or not.
    fn is_over(&self) -> bool {
        self.report.finished || self.report.stopped.is_some()
    }

    /// Checks the conditions at the end of a run.
    fn finish(self) -> Result<Report, Violation> {
        if self.report.stopped.is_some() {
            return Ok(self.concluded());
        }
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
            let end = if !node.finished {
                Err(format!("peer {index} never finished"))
            } else if !node.engine.is_empty() {
                Err(format!("the engine of peer {index} was left with work"))
            } else {
                Ok(())
            };
            self.holds("progress", end)?;
            let leaked = match node.payloads.leaked() {
                0 => Ok(()),
                count => Err(format!("peer {index} never released {count} payloads")),
            };
            self.holds("payloads", leaked)?;
        }
        Ok(self.concluded())
    }

    fn concluded(mut self) -> Report {
        let leader = self.leader().map(index_of);
        self.show(Seen::Goes { gone: false });
        drop(leader.and_then(|leader| self.nodes[leader].seat.take()));
        self.show(Seen::Goes { gone: true });
        self.report.end = self.now;
        self.report.rare = self.marks.rare;
        self.report.trace = self.trace.hash();
        self.report.busy = self.nodes.iter().map(|node| node.engine.busy).sum();
        self.report
    }

    /// Passes an observation to the observer.
    fn show(&mut self, seen: Seen<'_>) {
        if let Some(watch) = &mut self.watch {
            watch.sees(self.now, seen);
        }
    }

    fn at(&mut self, moment: Moment, event: Event) {
        self.events.insert((moment, self.sequence), Box::new(event));
        self.sequence += 1;
    }

    fn holds<T>(&self, oracle: &'static str, held: Result<T, String>) -> Result<T, Violation> {
        held.map_err(|detail| Violation { at: self.now, oracle, detail })
    }
}

/// Whether newcomers measure links to members before they get a stage.
fn probes_links_first(scenario: &Scenario) -> bool {
    let measured = scenario.network.measured || scenario.seed % 4 == 1;
    measured && scenario.routing == Routing::BySpeed
}

fn node(scenario: &Scenario, index: usize, life: Incarnation) -> Node {
    let me = Member { peer: peer_id(index), incarnation: life };
    let peer = Peer::new(PeerConfig {
        me,
        manifest: scenario.manifest.clone(),
        candidate: Candidate {
            choice: scenario.peers[index].choice,
            fits: scenario.peers[index].fits.clone(),
            mobile: scenario.peers[index].choice == StageChoice::Auto,
            link_estimates: (!probes_links_first(scenario)).then(Vec::new),
            addresses: Vec::new(),
            fingerprint: Some(ContentHash([0; 32])),
            duties: Duties {
                anchor: index < scenario.anchors,
                archive: index == FIRST || scenario.peers[index].archive,
            },
        },
        parameters: scenario.parameters.clone(),
        limits: scenario.peers[index].limits.clone(),
        seed: scenario.seed ^ index as u64,
        routing: scenario.routing,
    });
    Node {
        peer,
        engine: Engine::new(scenario, index),
        payloads: Payloads::default(),
        tick_at: None,
        span: None,
        finished: false,
        me,
        era: Era(0),
        term: Term(0),
        coordinator: None,
        seat: None,
        alive: true,
        paused: Moment::default(),
        delayed: VecDeque::new(),
        known_dead: BTreeSet::new(),
    }
}

/// The id of the peer at an index.
fn peer_id(index: usize) -> PeerId {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&(index as u64).to_le_bytes());
    PeerId(id)
}

/// The index of a peer in its scenario.
pub(super) fn index_of(member: Member) -> usize {
    place_of(member.peer)
}

fn place_of(peer: PeerId) -> usize {
    let id = peer.0.first_chunk().expect("a peer id has 32 bytes");
    u64::from_le_bytes(*id) as usize
}
