//! The world that drives the state machines: a clock, an order of events, and the drivers that the
//! real node has too.

use std::collections::BTreeMap;

use shoal_protocol::ids::{ContentHash, Era, Incarnation, Member, PeerId, StageSpan, Step, Term};
use shoal_protocol::message::{Between, FromCoordinator, LogRecord, TensorTag, ToCoordinator};
use shoal_protocol::units::{Bytes, Moment};

use super::dice::Dice;
use super::engine::{Engine, Observed, is_pass};
use super::network::Network;
use super::oracle::{Oracles, Violation};
use super::payloads::{Content, Payloads};
use super::report::{Report, Trace};
use super::scenario::Scenario;
use super::tamper::Tamper;
use crate::action::{
    CoordinatorAction, CoordinatorEvent, CoordinatorInput, Fault, PeerAction, PeerEvent, PeerInput,
    Task, TaskResult,
};
use crate::coordinator::{Coordinator, CoordinatorConfig};
use crate::peer::{Peer, PeerConfig};

/// Events of one run at most: far more than any takes.
const EVENTS: u64 = 20_000_000;

/// The index of the peer that the coordinator lives with.
const HOME: usize = 0;

/// Something that happens at a moment.
#[derive(Debug)]
enum Event {
    Start(usize),
    Told { to: usize, message: FromCoordinator },
    Heard { to: usize, from: usize, message: Between },
    Tensor { to: usize, from: usize, tag: TensorTag, content: Content, size: Bytes },
    EngineDone(usize),
    Tick(usize),
    Reported { from: usize, message: ToCoordinator },
    Appended(LogRecord),
    Collected(Step),
}

/// A peer and its driver.
#[derive(Debug)]
struct Node {
    peer: Peer,
    engine: Engine,
    payloads: Payloads,
    tick_at: Option<Moment>,
    span: Option<StageSpan>,
    finished: bool,
}

/// One run of the simulator.
#[derive(Debug)]
pub(super) struct World<'a> {
    scenario: &'a Scenario,
    tamper: Tamper,
    tampered: bool,
    now: Moment,
    /// In the order of their moments and, at one moment, in the order in which they were caused.
    events: BTreeMap<(Moment, u64), Event>,
    sequence: u64,
    network: Network,
    dice: Dice,
    coordinator: Coordinator,
    last_append: Moment,
    nodes: Vec<Node>,
    /// None when the run is to show what is caught without oracles.
    oracles: Option<Oracles>,
    trace: Trace,
    report: Report,
}

/// What holds until it does not.
type Held = Result<(), Violation>;

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario, tamper: Tamper, with_oracles: bool) -> Self {
        let coordinator = Coordinator::new(CoordinatorConfig {
            manifest: scenario.manifest.clone(),
            term: Term(1),
            era: Era(0),
            wait_for: scenario.peers.len(),
        });
        let nodes = (0..scenario.peers.len()).map(|index| node(scenario, index)).collect();
        Self {
            scenario,
            tamper,
            tampered: false,
            now: Moment::default(),
            events: BTreeMap::new(),
            sequence: 0,
            network: Network::new(scenario),
            dice: Dice::new(scenario.seed ^ 0x776f_726c_6400_0000),
            coordinator,
            last_append: Moment::default(),
            nodes,
            oracles: with_oracles.then(|| Oracles::new(scenario)),
            trace: Trace::default(),
            report: Report::default(),
        }
    }

    /// Runs until nothing happens any more.
    pub(super) fn run(mut self) -> Result<Report, Violation> {
        for (index, peer) in self.scenario.peers.iter().enumerate() {
            self.at(Moment(peer.start), Event::Start(index));
        }
        let mut actions = Vec::new();
        self.coordinator.start(self.now, &mut actions);
        self.coordinate(actions)?;
        while let Some(((at, _), event)) = self.events.pop_first() {
            assert!(at >= self.now, "time does not go back");
            self.now = at;
            self.report.events += 1;
            self.trace.note(at, &event);
            self.happen(event)?;
            if self.report.stopped.is_some() && self.oracles.is_none() {
                break;
            }
            let stuck = self.oracles.as_ref().map(|oracles| oracles.progress.check(at));
            self.holds("progress", stuck.unwrap_or(Ok(())))?;
            let endless = self.report.events > EVENTS;
            self.holds("progress", if endless { Err("it never ends".to_owned()) } else { Ok(()) })?;
        }
        self.finish()
    }

    fn happen(&mut self, event: Event) -> Held {
        match event {
            Event::Start(index) => {
                let mut actions = Vec::new();
                self.nodes[index].peer.start(self.now, &mut actions);
                self.carry_out(index, actions)?;
                self.schedule_tick(index);
                Ok(())
            }
            Event::Told { to, message } => {
                let from = member(HOME);
                self.input(to, PeerInput::FromCoordinator { from, message })
            }
            Event::Heard { to, from, message } => {
                self.input(to, PeerInput::Between { from: member(from), message })
            }
            Event::Tensor { to, from, tag, content, size } => {
                let payload = self.nodes[to].payloads.keep(content, size);
                self.input(to, PeerInput::Tensor { from: member(from), tag, payload })
            }
            Event::EngineDone(index) => self.engine_done(index),
            Event::Tick(index) => {
                self.nodes[index].tick_at = None;
                self.input(index, PeerInput::Tick)
            }
            Event::Reported { from, message } => {
                self.coordinator_input(CoordinatorInput::Message { from: member(from), message })
            }
            Event::Appended(record) => {
                let held = self.oracles.as_mut().map(|oracles| oracles.monotone.logged(&record));
                self.holds("never back", held.unwrap_or(Ok(())))?;
                self.coordinator_input(CoordinatorInput::Appended(record))
            }
            Event::Collected(version) => {
                self.coordinator_input(CoordinatorInput::Collected { version })
            }
        }
    }

    fn input(&mut self, index: usize, input: PeerInput) -> Held {
        let mut actions = Vec::new();
        let node = &mut self.nodes[index];
        node.peer.handle(self.now, input, &mut actions);
        let load = node.peer.load();
        let held = self.oracles.as_ref().map(|oracles| oracles.limits.check(index, &load));
        self.holds("limits", held.unwrap_or(Ok(())))?;
        let widest = load.window.values().max().copied().unwrap_or(0);
        self.report.widest_window = self.report.widest_window.max(widest);
        self.carry_out(index, actions)?;
        self.schedule_tick(index);
        Ok(())
    }

    fn schedule_tick(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let due = node.peer.next_timeout().map(|due| due.max(self.now));
        // An earlier tick is harmless; the next one is looked for after it.
        if let Some(due) = due
            && node.tick_at.is_none_or(|tick| tick > due)
        {
            node.tick_at = Some(due);
            self.at(due, Event::Tick(index));
        }
    }

    fn carry_out(&mut self, index: usize, actions: Vec<PeerAction>) -> Held {
        for mut action in actions {
            if !self.tamper.peer_action(&mut action) {
                continue;
            }
            match action {
                PeerAction::ToCoordinator(message) => {
                    for at in self.network.control(self.now, index, HOME) {
                        self.at(at, Event::Reported { from: index, message: message.clone() });
                    }
                }
                PeerAction::Send { to, message } => {
                    if matches!(message, Between::HeldBy { .. }) {
                        self.report.redirected += 1;
                    }
                    if matches!(message, Between::Busy { .. }) {
                        self.report.turned_away += 1;
                    }
                    self.say(index, index_of(to), message);
                }
                PeerAction::SendTensor { to, tag, payload } => {
                    let known = self.nodes[index].payloads.get(payload).cloned();
                    let (content, size) = self.holds("payloads", known)?;
                    let to = index_of(to);
                    for at in self.network.tensor(self.now, index, to, size) {
                        let content = content.clone();
                        self.at(at, Event::Tensor { to, from: index, tag, content, size });
                    }
                }
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

    /// Sends a word from one peer to another. Some offers stray.
    fn say(&mut self, from: usize, to: usize, mut message: Between) {
        if let Between::Offer { key, retry, .. } = &mut message
            && self.dice.chance(self.scenario.network.strays_per_mille)
        {
            *retry = true;
            let hosts = |node: &Node| node.span.is_some_and(|span| span.contains(key.stage));
            let others: Vec<usize> = (0..self.nodes.len())
                .filter(|other| *other != to && hosts(&self.nodes[*other]))
                .collect();
            if !others.is_empty() {
                let other = self.dice.pick(&others);
                self.deliver(from, other, &message);
            }
        }
        self.deliver(from, to, &message);
    }

    fn deliver(&mut self, from: usize, to: usize, message: &Between) {
        for at in self.network.control(self.now, from, to) {
            self.at(at, Event::Heard { to, from, message: message.clone() });
        }
    }

    fn compute(&mut self, index: usize, task: Task) {
        if let Some(end) = self.nodes[index].engine.give(self.now, task) {
            self.engine_began(index, end);
        }
    }

    fn engine_began(&mut self, index: usize, end: Moment) {
        self.at(end, Event::EngineDone(index));
        let Some(task) = self.nodes[index].engine.running().filter(|task| is_pass(task)) else {
            return;
        };
        if let Task::Forward { key, .. } | Task::Backward { key, .. } = task {
            self.report.ran(key.step, self.now, end);
        }
    }

    fn engine_done(&mut self, index: usize) -> Held {
        let node = &mut self.nodes[index];
        let skipped = self.tamper == Tamper::CountNever && !self.tampered;
        if skipped && matches!(node.engine.running(), Some(Task::Accumulate { .. })) {
            self.tampered = true;
            node.engine.forget_gradient();
        }
        let finished = node.engine.finish(&mut node.payloads);
        let (result, busy, observed) = self.holds("engine", finished)?;
        if let Some(end) = self.nodes[index].engine.begin(self.now) {
            self.engine_began(index, end);
        }
        self.observe(index, &observed)?;
        if self.tamper == Tamper::CountTwice
            && !self.tampered
            && matches!(result, TaskResult::Accumulated { .. })
        {
            self.tampered = true;
            self.observe(index, &observed)?;
            self.input(index, PeerInput::Done { result: result.clone(), busy })?;
        }
        if let (Tamper::ApplyWithoutCommit, TaskResult::Summarised { round, .. }) =
            (self.tamper, &result)
        {
            self.compute(index, Task::Apply { round: *round, gradient_norm: 1.0 });
        }
        self.input(index, PeerInput::Done { result, busy })
    }

    fn observe(&mut self, index: usize, observed: &Observed) -> Held {
        let Some(oracles) = &mut self.oracles else { return Ok(()) };
        match observed {
            Observed::Nothing => Ok(()),
            Observed::Accumulated(key) => {
                let held = oracles.exactly_once.added(*key, member(index));
                self.holds("exactly once", held)
            }
            Observed::Applied { step, stage, sums, weights } => {
                let held = oracles.replicas.applied(*step, *stage, sums, *weights);
                self.holds("equal replicas", held)
            }
        }
    }

    fn peer_event(&mut self, index: usize, event: PeerEvent) -> Held {
        let wrong = |text: String| Err::<(), String>(format!("peer {index}: {text}"));
        let held = match event {
            PeerEvent::Applied { record } => {
                let held = self
                    .oracles
                    .as_mut()
                    .map(|oracles| oracles.monotone.applied(member(index), record.step));
                return self.holds("never back", held.unwrap_or(Ok(())));
            }
            PeerEvent::Finished => {
                self.nodes[index].finished = true;
                Ok(())
            }
            PeerEvent::Refused { reason } | PeerEvent::Stopped { reason } => wrong(reason),
            PeerEvent::Fault(fault) => {
                self.report.faults.push(fault.clone());
                match fault {
                    // Under duplicates more may come late than can be remembered.
                    Fault::LogFull { .. } => Ok(()),
                    fault => wrong(fault.to_string()),
                }
            }
            PeerEvent::Admitted { span } => {
                self.nodes[index].span = Some(span);
                Ok(())
            }
            PeerEvent::View(_) | PeerEvent::Counted { .. } => Ok(()),
        };
        if self.oracles.is_some() { self.holds("no fault", held) } else { Ok(()) }
    }

    fn coordinator_input(&mut self, input: CoordinatorInput) -> Held {
        let mut actions = Vec::new();
        self.coordinator.handle(self.now, input, &mut actions);
        self.coordinate(actions)
    }

    fn coordinate(&mut self, actions: Vec<CoordinatorAction>) -> Held {
        for mut action in actions {
            self.tamper.coordinator_action(&mut action);
            match action {
                CoordinatorAction::Send { to, message } => {
                    let to = index_of(to);
                    for at in self.network.control(self.now, HOME, to) {
                        self.at(at, Event::Told { to, message: message.clone() });
                    }
                }
                CoordinatorAction::Append(record) => {
                    let most = self.scenario.log_delay.as_micros() as u64;
                    let down = self.now + self.dice.microseconds(0..=most);
                    self.last_append = self.last_append.max(down);
                    self.at(self.last_append, Event::Appended(record));
                }
                CoordinatorAction::Event(event) => self.coordinator_event(event)?,
            }
        }
        Ok(())
    }

    fn coordinator_event(&mut self, event: CoordinatorEvent) -> Held {
        if let Some(oracles) = &mut self.oracles {
            oracles.progress.advanced(self.now);
        }
        match event {
            CoordinatorEvent::Committed { record, repeated } => {
                self.report.commits += 1;
                self.report.repeated += repeated;
                let Some(oracles) = &mut self.oracles else { return Ok(()) };
                let once = oracles.exactly_once.committed(record.step);
                let same = oracles.replicas.committed(&record);
                self.holds("exactly once", once)?;
                self.holds("equal replicas", same)
            }
            CoordinatorEvent::CheckpointStored { version, stages, .. } => {
                let files: Vec<_> = stages.into_iter().map(|(_, files)| files).collect();
                let saved = self.oracles.as_ref().map(|o| o.replicas.saved(version, &files));
                self.holds("equal replicas", saved.unwrap_or(Ok(())))?;
                let hashes: Vec<u8> = files.iter().flatten().flat_map(|file| file.hash.0).collect();
                self.report.checkpoint = Some(ContentHash::of(&hashes));
                let delay = self.dice.microseconds(0..=50_000);
                self.at(self.now + delay, Event::Collected(version));
                Ok(())
            }
            CoordinatorEvent::Stopped { reason } => {
                let held = if self.oracles.is_some() { Err(reason.clone()) } else { Ok(()) };
                self.report.stopped = Some(reason);
                self.holds("no fault", held)
            }
            _ => Ok(()),
        }
    }

    /// Checks what must hold at the end.
    fn finish(mut self) -> Result<Report, Violation> {
        self.report.end = self.now;
        self.report.trace = self.trace.hash();
        self.report.busy = self.nodes.iter().map(|node| node.engine.busy).sum();
        if self.report.stopped.is_some() {
            return Ok(self.report);
        }
        for (index, node) in self.nodes.iter().enumerate() {
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
        Ok(self.report)
    }

    fn at(&mut self, moment: Moment, event: Event) {
        self.events.insert((moment, self.sequence), event);
        self.sequence += 1;
    }

    fn holds<T>(&self, oracle: &'static str, held: Result<T, String>) -> Result<T, Violation> {
        held.map_err(|detail| Violation { at: self.now, oracle, detail })
    }
}

fn node(scenario: &Scenario, index: usize) -> Node {
    let peer = Peer::new(PeerConfig {
        me: member(index),
        manifest: scenario.manifest.clone(),
        choice: scenario.peers[index].choice,
        addresses: Vec::new(),
        fingerprint: ContentHash([0; 32]),
        parameters: scenario.parameters.clone(),
        limits: scenario.peers[index].limits.clone(),
        seed: scenario.seed ^ index as u64,
    });
    Node {
        peer,
        engine: Engine::new(scenario, index),
        payloads: Payloads::default(),
        tick_at: None,
        span: None,
        finished: false,
    }
}

/// The member at an index.
fn member(index: usize) -> Member {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&(index as u64).to_le_bytes());
    Member { peer: PeerId(id), incarnation: Incarnation(1) }
}

fn index_of(member: Member) -> usize {
    let id = member.peer.0.first_chunk().expect("a peer id has 32 bytes");
    u64::from_le_bytes(*id) as usize
}

impl Trace {
    /// Takes an event into the trace.
    fn note(&mut self, at: Moment, event: &Event) {
        self.word(at.0.as_nanos() as u64);
        let (kind, to, from) = match event {
            Event::Start(index) => (0, *index, 0),
            Event::Told { to, message } => {
                self.message(message);
                (1, *to, HOME)
            }
            Event::Heard { to, from, message } => {
                self.message(message);
                (2, *to, *from)
            }
            Event::Tensor { to, from, tag, content, size } => {
                self.message(tag);
                self.word(size.0);
                self.word(content.digest());
                (3, *to, *from)
            }
            Event::EngineDone(index) => (4, *index, 0),
            Event::Tick(index) => (5, *index, 0),
            Event::Reported { from, message } => {
                self.message(message);
                (6, HOME, *from)
            }
            Event::Appended(record) => {
                self.message(record);
                (7, HOME, HOME)
            }
            Event::Collected(version) => (8, HOME, version.0 as usize),
        };
        self.word(kind << 48 | (to as u64) << 24 | from as u64);
    }
}
