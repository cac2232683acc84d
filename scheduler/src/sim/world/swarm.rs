//! The swarm: all peers and coordinators, and the counterparts of the real node's drivers. A driver
//! passes inputs to a state machine and carries out its actions.

use std::time::Duration;

use shoal_protocol::ids::{Era, Member, Stage, Step, Term};
use shoal_protocol::message::{Founding, PeerMessage, SnapshotPart, TensorTag, ToCoordinator};
use shoal_protocol::units::Moment;

use super::Held;
use super::deviations::Deviations;
use super::event::{Cargo, Event};
use super::log::Log;
use super::nodes::{FIRST, Nodes, archives};
use super::observation::Observation;
use super::peer_index::{index_of, peer_id};
use super::queue::EventQueue;
use super::traffic::Traffic;
use crate::action::{
    CoordinatorInput, DeviceIndex, Fault, Payload, PeerAction, PeerEvent, PeerInput, Task,
    TaskResult,
};
use crate::sim::corruption::Corruption;
use crate::sim::engine::Observed;
use crate::sim::founded::Founded;
use crate::sim::integer_model::Weights;
use crate::sim::marks::Mark;
use crate::sim::omitted_rules::Omit;
use crate::sim::scenario::Scenario;
use crate::sim::watch::Seen;

/// Maximum time until a peer learns that it cannot reach another.
const UNREACHABLE: Duration = Duration::from_millis(100);

/// All peers and coordinators of a run.
#[derive(Debug)]
pub(super) struct Swarm<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) queue: EventQueue,
    pub(super) nodes: Nodes<'a>,
    pub(super) traffic: Traffic<'a>,
    pub(super) log: Log,
    pub(super) deviations: Deviations,
    pub(super) observation: Observation<'a>,
    /// Stage whose replicas die with the next commit, and the time until they restart.
    pub(super) ambush: Option<(usize, Duration)>,
    /// The beginning of the log, if the run is founded on a checkpoint.
    pub(super) founding: Option<Founding>,
}

impl<'a> Swarm<'a> {
    pub(super) fn new(scenario: &'a Scenario, corruption: Corruption, with_oracles: bool) -> Self {
        let founded = Founded::of(scenario, peer_id(FIRST));
        let mut nodes = Nodes::new(scenario);
        nodes[FIRST].engine.disk.extend(founded.files);
        Self {
            founding: founded.record,
            scenario,
            queue: EventQueue::new(scenario.seed),
            nodes,
            traffic: Traffic::new(scenario),
            log: Log::new(scenario, FIRST),
            deviations: Deviations::new(corruption),
            observation: Observation::new(scenario, with_oracles),
            ambush: None,
        }
    }

    /// A peer's current clock reading.
    pub(super) fn reads(&self, index: usize) -> Moment {
        self.nodes.reads(index, self.queue.now())
    }

    /// Starts an incarnation of a peer.
    pub(super) fn start(&mut self, index: usize) -> Held {
        self.observation.show(Seen::Born { peer: index });
        let mut actions = Vec::new();
        let now = self.reads(index);
        self.nodes[index].peer.start(now, &mut actions);
        self.carry_out(index, actions)?;
        self.nodes.schedule_tick(index, &mut self.queue);
        Ok(())
    }

    /// Passes an input to a peer.
    pub(super) fn input(&mut self, index: usize, input: PeerInput) -> Held {
        let mut actions = Vec::new();
        let now = self.reads(index);
        let from_coordinator =
            matches!(input, PeerInput::FromCoordinator { .. }).then(|| input.clone());
        let node = &mut self.nodes[index];
        node.peer.handle(now, input, &mut actions);
        if let Some(input) = from_coordinator {
            self.observation.peer_actions(node.me, &input, &actions);
        }
        self.observation.load(index, &node.peer.load())?;
        self.carry_out(index, actions)?;
        self.nodes.schedule_tick(index, &mut self.queue);
        Ok(())
    }

    fn carry_out(&mut self, index: usize, actions: Vec<PeerAction>) -> Held {
        let me = self.nodes[index].me;
        for mut action in actions {
            if !self.deviations.peer_action(index, me, &mut action) {
                continue;
            }
            match action {
                PeerAction::ToCoordinator(message) => self.report_to_coordinator(me, message),
                PeerAction::Send { to, message } => {
                    self.observation.message(&message);
                    self.send_message(me, to, message);
                }
                PeerAction::SendTensor { to, tag, seal, payload } => {
                    self.observation.tensor_sent(me, &tag);
                    let known = self.nodes[index].payloads.get(payload).cloned();
                    let (content, size) = self.observation.holds("payloads", known)?;
                    let mut cargo = Cargo::Tensor { tag, seal, content, size };
                    self.deviations.tensor(index, &mut cargo, &self.scenario.manifest);
                    self.send(me, to, cargo);
                }
                PeerAction::ProbeLinks { at } => {
                    let link_estimates = self.traffic.probe_links(index, &at, &self.nodes);
                    let round_trips = link_estimates.iter().map(|(_, path)| path.round_trip);
                    let longest = round_trips.max().unwrap_or_default();
                    self.queue.after(longest, Event::LinksProbed { to: me, link_estimates });
                }
                PeerAction::Fetch { version, part } => {
                    let (at, weights) = self.obtain(index, version, &part);
                    let stage = part.stage;
                    self.queue.at(at, Event::Fetched { to: me, version, stage, weights });
                }
                PeerAction::Keep { version, part } => {
                    let (at, weights) = self.obtain(index, version, &part);
                    let stage = part.stage;
                    self.queue.at(at, Event::Kept { to: me, version, stage, weights });
                }
                PeerAction::Compute(task) => {
                    self.observation.task_begun(me, &task);
                    self.compute(index, task);
                }
                PeerAction::Release(id) => {
                    let released = self.nodes[index].payloads.release(id);
                    self.observation.holds("payloads", released)?;
                }
                PeerAction::Event(event) => self.peer_event(index, event)?,
            }
        }
        Ok(())
    }

    fn obtain(
        &mut self,
        index: usize,
        version: Step,
        part: &SnapshotPart,
    ) -> (Moment, Option<Weights>) {
        let Self { traffic, nodes, queue, observation, .. } = self;
        traffic.obtain(index, (version, part), nodes, queue, observation)
    }

    /// Writes files to a peer's disk. Returns whether that succeeded.
    pub(super) fn write(
        &mut self,
        to: Member,
        version: Step,
        stage: Stage,
        weights: Option<Weights>,
    ) -> bool {
        let engine = &mut self.nodes[index_of(to)].engine;
        let weights = weights.filter(|_| self.queue.now() >= engine.disk_fails_until);
        let before = engine.disk.len();
        engine.disk.extend(weights.map(|weights| ((version, stage), weights)));
        // At the end of a run, a new archive on a slow link receives one file after the other.
        if engine.disk.len() > before {
            self.observation.advanced(Duration::ZERO);
        }
        weights.is_some()
    }

    fn compute(&mut self, index: usize, task: Task) {
        self.nodes[index].engine.give(task);
        self.begin_tasks(index);
    }

    /// Begins the tasks of a peer's engine that can begin.
    fn begin_tasks(&mut self, index: usize) {
        let (now, omit) = (self.queue.now(), self.deviations.rules.omit);
        while let Some((device, end)) = self.nodes[index].engine.begin(now, omit) {
            self.engine_began(index, device, end);
        }
    }

    fn engine_began(&mut self, index: usize, device: DeviceIndex, end: Moment) {
        let node = &self.nodes[index];
        self.queue.at(end, Event::EngineDone(node.me, device));
        let running = node.engine.running(device);
        if let Some(key) = running.and_then(|task| node.engine.computes(task)) {
            self.observation.report.ran(key.step, self.queue.now(), end);
            self.observation.show(Seen::Ran { peer: index, key, until: end });
        }
    }

    /// A device of a peer's engine has executed its running task.
    pub(super) fn engine_done(&mut self, index: usize, device: DeviceIndex) -> Held {
        let node = &mut self.nodes[index];
        if self.deviations.skips(node.engine.running(device)) {
            node.engine.forget_gradient(device);
        }
        if self.deviations.stays() {
            node.engine.forget_meeting(device);
        }
        node.engine.sum_lie = self.deviations.sum_lie(index);
        node.engine.errs = self.deviations.errs(index);
        node.engine.others_err = self.deviations.corruption.gives_wrong_results();
        let finished = node.engine.finish(device, &mut node.payloads);
        if finished.is_err() && self.scenario.liar == Some(index) {
            // What it said of its work does not fit what it did.
            self.ends(index, Some(self.scenario.faults.rebirth));
            return Ok(());
        }
        let (result, busy, observed) = self.observation.holds("engine", finished)?;
        self.observation.device(self.queue.now(), &node.engine)?;
        self.begin_tasks(index);
        self.observe(index, &observed)?;
        let Some(result) = result else { return Ok(()) };
        if self.deviations.repeats(&result) {
            self.observe(index, &observed)?;
            self.input(index, PeerInput::Done { result: result.clone(), busy })?;
        }
        if let Some(round) = self.deviations.applies_early(&result)
            && let Some(update) = self.nodes[index].engine.possible_update(round)
        {
            self.compute(index, update);
        }
        if matches!(result, TaskResult::Summarised { .. }) {
            self.input(index, PeerInput::Links(self.traffic.measured_links(index)))?;
        }
        self.input(index, PeerInput::Done { result, busy })
    }

    fn observe(&mut self, index: usize, observed: &Observed) -> Held {
        let me = self.nodes[index].me;
        if let Observed::Copied { version, stage, weights } = *observed {
            let written = Event::Written { to: me, version, stage, weights };
            self.queue.within(self.scenario.snapshot.write, written);
        }
        self.observation.engine(me, observed)
    }

    fn peer_event(&mut self, index: usize, event: PeerEvent) -> Held {
        let me = self.nodes[index].me;
        self.observation.peer_event(me, &event)?;
        let wrong = |reason: String| format!("peer {index}: {reason}");
        match event {
            PeerEvent::Finished => self.nodes[index].finished = true,
            PeerEvent::Drained | PeerEvent::Expelled { .. } => {
                self.ends(index, Some(self.scenario.faults.rebirth));
            }
            PeerEvent::Refused { .. } | PeerEvent::Stopped { .. } if self.observation.is_over() => {
                self.nodes[index].finished = true;
            }
            PeerEvent::Refused { .. } if self.observation.report.has_convicted(me.peer) => {
                self.nodes[index].finished = true;
            }
            PeerEvent::Refused { reason } | PeerEvent::Stopped { reason } => {
                return self.observation.fails(wrong(reason));
            }
            PeerEvent::Fault(fault) => {
                let by_liar = matches!(&fault, Fault::UnexpectedMessage { from, .. } if self.scenario.liar == Some(index_of(*from)));
                if !by_liar {
                    return self.observation.fails(wrong(fault.to_string()));
                }
            }
            PeerEvent::Admitted { span, .. } => self.nodes[index].span = Some(span),
            PeerEvent::Moved { to, .. } => self.nodes[index].span = Some(to),
            PeerEvent::Checkpoint { version, stages, oldest } => {
                return self.archive(index, version, stages.len(), oldest);
            }
            // Without this rule views differ from the log.
            PeerEvent::View => {
                self.nodes[index].note_anchors();
                if !self.deviations.omits(Omit::Readiness) {
                    return self.observation.viewed(me, self.nodes[index].peer.view());
                }
            }
            PeerEvent::Applied { .. }
            | PeerEvent::Judged { .. }
            | PeerEvent::Serving { .. }
            | PeerEvent::Rewound { .. }
            | PeerEvent::ResultLost { .. }
            | PeerEvent::MoveBegun { .. }
            | PeerEvent::MoveCancelled { .. }
            | PeerEvent::Unentitled { .. }
            | PeerEvent::Counted { .. } => {}
        }
        Ok(())
    }

    /// A checkpoint is complete: archiving peers report it, and old files are removed.
    fn archive(&mut self, index: usize, version: Step, stages: usize, oldest: Step) -> Held {
        let engine = &mut self.nodes[index].engine;
        engine.forget_before(oldest);
        let whole =
            (0..stages as u16).all(|stage| engine.disk.contains_key(&(version, Stage(stage))));
        let works = self.queue.now() >= engine.disk_fails_until;
        if archives(self.scenario, index) && whole && works {
            return self.input(index, PeerInput::Archived { version });
        }
        Ok(())
    }

    /// Data arrives at a peer. It is dropped if its connection or one of its ends is gone.
    pub(super) fn deliver(
        &mut self,
        to: Member,
        from: Member,
        connection: u64,
        era_and_term: (Era, Term),
        cargo: Cargo,
    ) -> Held {
        let index = index_of(to);
        let is_gone = !self.nodes.lives(to) || self.nodes[index].known_dead.contains(&from);
        if is_gone {
            self.observation.mark(Mark::EarlierLife);
        }
        if is_gone || connection != self.traffic.connection(index, index_of(from)) {
            return Ok(());
        }
        if let Cargo::ToCoordinator(message) = &cargo
            && self.nodes[index].seat.is_none()
        {
            self.redirect(to, from, message);
            return Ok(());
        }
        if !self.nodes[index].accepts(from, era_and_term, &cargo, &self.deviations) {
            return Ok(());
        }
        match cargo {
            Cargo::CoordinatorMoved(coordinator) => {
                if self.log.leader() == Some(coordinator) {
                    self.nodes[index].hear_of_newest(from, &self.log);
                }
                self.nodes[index].redirect(from, coordinator);
                Ok(())
            }
            Cargo::Elected(proofs) => {
                self.nodes[index].learn(from, proofs, &self.log);
                Ok(())
            }
            Cargo::FromCoordinator(mut message) => {
                let node = &mut self.nodes[index];
                node.hear_of(from, era_and_term.1, &self.log);
                let Some(from) = node.follow(from, era_and_term, &self.deviations) else {
                    return Ok(());
                };
                if !self.deviations.rules.sent_to_member(to, &mut message) {
                    return Ok(());
                }
                self.input(index, PeerInput::FromCoordinator { from, message })
            }
            Cargo::PeerMessage(message) => {
                self.input(index, PeerInput::PeerMessage { from, message })
            }
            Cargo::Tensor { mut tag, seal, content, size } => {
                if let TensorTag::RoundResult { round, piece, .. } = tag
                    && self.nodes[index].peer.may_host(round.weights)
                {
                    self.observation.result_received(to, round, piece);
                }
                self.deviations.rules.tagged(to, &mut tag);
                let payload = self.nodes[index].payloads.keep(content, size);
                let payload = Payload { seal, ..payload };
                self.input(index, PeerInput::Tensor { from, tag, payload })
            }
            Cargo::ToCoordinator(mut message) => {
                self.deviations.rules.reported(from, &mut message);
                self.observation.reported(&message);
                self.coordinator_input(index, CoordinatorInput::Message { from, message })
            }
        }
    }

    /// A message to the coordinator arrived at a peer without one: the sender learns where the
    /// coordinator is.
    fn redirect(&mut self, me: Member, from: Member, message: &ToCoordinator) {
        if let Some(leader) = self.leader().filter(|_| !matches!(message, ToCoordinator::Leave)) {
            self.send(me, from, Cargo::CoordinatorMoved(leader));
        }
    }

    /// Sends a message to the coordinator that a peer believes in, or to the actual one if that is
    /// gone or unknown.
    fn report_to_coordinator(&mut self, me: Member, message: ToCoordinator) {
        let node = &self.nodes[index_of(me)];
        let coordinator =
            node.coordinator.filter(|coordinator| !node.known_dead.contains(coordinator));
        if let Some(to) = coordinator.or_else(|| self.leader()) {
            self.nodes[index_of(me)].ask(to);
            self.send(me, to, Cargo::ToCoordinator(message));
        }
    }

    /// Sends a message from one peer to another. Some offers also go to a wrong peer.
    fn send_message(&mut self, from: Member, to: Member, mut message: PeerMessage) {
        if let PeerMessage::Offer { key, retry, .. } = &mut message
            && self.queue.rng.chance(self.scenario.network.strays_per_mille)
        {
            *retry = true;
            let others = self.nodes.iter().filter(|node| node.me != to);
            let others = others.filter(|node| node.span.is_some_and(|s| s.contains(key.stage)));
            let others: Vec<Member> = others.map(|node| node.me).collect();
            if !others.is_empty() {
                let other = self.queue.rng.pick(&others);
                self.send(from, other, Cargo::PeerMessage(message.clone()));
            }
        }
        self.send(from, to, Cargo::PeerMessage(message));
    }

    /// Sends data over the network.
    pub(super) fn send(&mut self, from: Member, to: Member, cargo: Cargo) {
        let (sender, receiver) = (index_of(from), index_of(to));
        let cut = self.traffic.network.is_cut(self.queue.now(), (sender, receiver));
        if cut || self.nodes[sender].known_dead.contains(&to) {
            // The connection is gone and cannot be made again.
            self.observation.mark(Mark::Unreached);
            return self.queue.within(UNREACHABLE, Event::Unreached { at: from, other: to });
        }
        if self.observation.watch.is_some() {
            let (sort, size) = self.traffic.weight(&cargo);
            self.observation.show(Seen::Sent { from: sender, to: receiver, sort, size });
        }
        let era_and_term = self.nodes[sender].era_and_term(&cargo);
        self.traffic.send(from, to, era_and_term, cargo, &mut self.queue);
    }
}
