//! The peers of a run, each with the state of its driver.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU16;
use std::ops::{Index, IndexMut};
use std::time::Duration;

use shoal_protocol::ids::{
    ContentHash, Era, Incarnation, Member, PeerId, Stage, StageSpan, Step, Term,
};
use shoal_protocol::message::{Candidate, Duties, StageChoice, StageRoom, TermProof};
use shoal_protocol::units::Moment;

use super::deviations::Deviations;
use super::event::{Cargo, Event};
use super::log::{Log, Seat};
use super::peer_index::{index_of, peer_id, place_of};
use super::queue::EventQueue;
use crate::office::{InOffice, Office};
use crate::peer::{Peer, PeerConfig};
use crate::router::Routing;
use crate::sim::engine::Engine;
use crate::sim::hash_keys::HashKeys;
use crate::sim::integer_model::Weights;
use crate::sim::omitted_rules::Omit;
use crate::sim::payloads::Payloads;
use crate::sim::scenario::Scenario;

/// The index of the first coordinator, which also archives the checkpoints.
pub(super) const FIRST: usize = 0;

/// A peer and its driver.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) peer: Peer,
    pub(super) engine: Engine,
    pub(super) payloads: Payloads,
    pub(super) tick_at: Option<Moment>,
    pub(super) span: Option<StageSpan>,
    pub(super) finished: bool,
    pub(super) me: Member,
    era: Era,
    office: Office,
    /// How many of all proofs of terms it was shown.
    proofs_heard: usize,
    /// The coordinator that it believes in.
    pub(super) coordinator: Option<Member>,
    /// The peer that it sent its last report to.
    asked: Option<PeerId>,
    /// The coordinator instance on this peer.
    pub(super) seat: Option<Seat>,
    pub(super) alive: bool,
    /// The end of its current stall.
    pub(super) paused: Moment,
    /// Events that arrived during the stall, in order.
    pub(super) delayed: VecDeque<Event>,
    /// Incarnations of others that it knows to be gone.
    pub(super) known_dead: BTreeSet<Member>,
}

/// How long a leaving peer waits for a checkpoint.
const SAVING: Duration = Duration::from_secs(2);

impl Node {
    fn new(scenario: &Scenario, index: usize, incarnation: Incarnation) -> Self {
        let me = Member { peer: peer_id(index), incarnation };
        let peer = Peer::new(PeerConfig {
            me,
            manifest: scenario.manifest.clone(),
            saving: SAVING,
            candidate: Candidate {
                choice: scenario.peers[index].choice,
                fits: scenario.peers[index].fits.clone(),
                devices: scenario.peers[index].devices,
                devices_per_pass: NonZeroU16::MIN,
                room: match scenario.peers[index].choice {
                    StageChoice::Auto => scenario.peers[index].room,
                    _ => StageRoom::NONE,
                },
                longest: scenario.peers[index].longest,
                price: None,
                island: scenario.peers[index].island.clone(),
                name: None,
                link_estimates: (!probes_links_first(scenario)).then(Vec::new),
                addresses: Vec::new(),
                fingerprint: Some(ContentHash([0; 32])),
                duties: Duties {
                    anchor: index < scenario.anchors || scenario.liar == Some(index),
                    archive: archives(scenario, index),
                },
            },
            parameters: scenario.parameters.clone(),
            limits: scenario.peers[index].limits.clone(),
            seed: scenario.seed ^ index as u64,
            sealer: HashKeys(me.peer).sealer(&scenario.manifest),
            routing: scenario.routing,
            divides_stages: scenario.peers[index].divides_stages,
        });
        Self {
            peer,
            engine: Engine::new(scenario, index),
            payloads: Payloads::new(scenario.manifest.audit.is_on()),
            tick_at: None,
            span: None,
            finished: false,
            me,
            era: Era(0),
            office: Office::default(),
            proofs_heard: 0,
            coordinator: None,
            asked: None,
            seat: None,
            alive: true,
            paused: Moment::default(),
            delayed: VecDeque::new(),
            known_dead: BTreeSet::new(),
        }
    }

    /// Whether data from another peer belongs to the era and term that its receiver expects.
    pub(super) fn accepts(
        &self,
        from: Member,
        (era, term): (Era, Term),
        cargo: &Cargo,
        deviations: &Deviations,
    ) -> bool {
        let any_era = deviations.omits(Omit::Eras);
        match cargo {
            Cargo::FromCoordinator(_) => era >= self.era || any_era,
            Cargo::PeerMessage(_) => era == self.era || any_era,
            Cargo::ToCoordinator(message) => self
                .seat
                .as_ref()
                .is_some_and(|seat| any_era || seat.accepts(from, (era, term), message)),
            Cargo::Tensor { .. } | Cargo::CoordinatorMoved(_) | Cargo::Elected(_) => true,
        }
    }

    /// Follows the coordinator that sent a message; `None` if its sender does not hold the office.
    pub(super) fn follow(
        &mut self,
        from: Member,
        (era, term): (Era, Term),
        deviations: &Deviations,
    ) -> Option<InOffice> {
        let admitted = self.office.admit(from, term);
        let any_term = deviations.omits(Omit::Terms);
        let any_anchor = deviations.omits(Omit::Majority) && self.poses(from, term);
        let unchecked = (any_term || any_anchor).then(|| InOffice::unchecked(from));
        let coordinator = admitted.or(unchecked)?;
        self.era = era;
        self.coordinator = Some(from);
        Some(coordinator)
    }

    /// Whether a peer that may be elected claims a newer term.
    fn poses(&mut self, from: Member, term: Term) -> bool {
        let poses = term > self.office.term() && self.office.is_anchor(from.peer);
        if poses {
            self.office.assume(from, term);
        }
        poses
    }

    /// Takes in proofs of a term. Returns whether they prove anything, or nothing new.
    pub(super) fn learn(&mut self, from: Member, proofs: Vec<TermProof>, log: &Log) -> bool {
        let asked = self.asked == Some(from.peer);
        self.office.learn((log.run(), &HashKeys(self.me.peer)), proofs, asked).is_ok()
    }

    /// Takes in the proofs that a coordinator of a term shows before its messages.
    pub(super) fn hear_of(&mut self, from: Member, term: Term, log: &Log) {
        self.hear(from, log.proofs_of(from.peer, term, self.proofs_heard), log);
    }

    /// Takes in the proofs that come with the name of the leader.
    pub(super) fn hear_of_newest(&mut self, from: Member, log: &Log) {
        self.hear(from, log.newest_proofs(self.proofs_heard), log);
    }

    fn hear(&mut self, from: Member, proofs: &[TermProof], log: &Log) {
        let count = proofs.len();
        if count > 0 && self.learn(from, proofs.to_vec(), log) {
            self.proofs_heard += count;
        }
    }

    /// Sends its next reports to this peer.
    pub(super) fn ask(&mut self, coordinator: Member) {
        self.asked = Some(coordinator.peer);
    }

    /// Follows another peer's word on who the coordinator is.
    pub(super) fn redirect(&mut self, from: Member, coordinator: Member) {
        let lost = self.coordinator.is_none_or(|known| self.known_dead.contains(&known));
        if self.office.may_redirect(from.peer, self.asked)
            && self.office.may_be_asked(coordinator.peer, lost)
        {
            self.coordinator = Some(coordinator);
            self.ask(coordinator);
        }
    }

    /// Notes which members may be elected.
    pub(super) fn note_anchors(&mut self) {
        for record in &self.peer.view().members {
            if record.duties.anchor {
                self.office.add_anchor(record.member.peer);
            }
        }
    }

    /// The era and term of data that it sends.
    pub(super) fn era_and_term(&self, cargo: &Cargo) -> (Era, Term) {
        match (cargo, &self.seat) {
            (Cargo::FromCoordinator(_), Some(seat)) => {
                (seat.coordinator.era(), seat.coordinator.term())
            }
            _ => (self.era, self.office.term()),
        }
    }

    /// A stage's files on its disk, if it is alive and its disk works.
    pub(super) fn read(&self, now: Moment, version: Step, stage: Stage) -> Option<Weights> {
        let works = self.alive && now >= self.engine.disk_fails_until;
        self.engine.disk.get(&(version, stage)).filter(|_| works).copied()
    }

    /// Whether it has work at a stage.
    pub(super) fn has_work_at(&self, stage: Stage) -> bool {
        self.peer.load().window.contains_key(&stage)
    }

    /// Whether it has ended its training and its engine is idle.
    pub(super) fn has_finished(&self) -> Result<(), String> {
        let index = index_of(self.me);
        if !self.finished {
            Err(format!("peer {index} never finished"))
        } else if !self.engine.is_empty() {
            Err(format!("the engine of peer {index} was left with work"))
        } else {
            Ok(())
        }
    }

    /// Whether it has released all payloads.
    pub(super) fn has_released_all(&self) -> Result<(), String> {
        match self.payloads.leaked() {
            0 => Ok(()),
            count => Err(format!("peer {} never released {count} payloads", index_of(self.me))),
        }
    }
}

/// All peers, in the order of the scenario.
#[derive(Debug)]
pub(super) struct Nodes<'a> {
    scenario: &'a Scenario,
    nodes: Vec<Node>,
}

impl<'a> Nodes<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Self {
        let node = |index| Node::new(scenario, index, Incarnation(1));
        Self { scenario, nodes: (0..scenario.peers.len()).map(node).collect() }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter()
    }

    /// Whether this incarnation is alive.
    pub(super) fn lives(&self, member: Member) -> bool {
        let node = &self[index_of(member)];
        node.alive && node.me == member
    }

    /// The index of a peer, if the scenario has it.
    pub(super) fn place(&self, peer: PeerId) -> Option<usize> {
        Some(place_of(peer)).filter(|place| *place < self.nodes.len())
    }

    /// The peers of a set that are alive and not stalled.
    pub(super) fn running(&self, now: Moment, peers: &BTreeSet<PeerId>) -> Vec<usize> {
        let runs = |index: &usize| {
            let node = &self[*index];
            node.alive && node.paused <= now && peers.contains(&node.me.peer)
        };
        (0..self.nodes.len()).filter(runs).collect()
    }

    /// Delays an event until its stalled peer continues. Returns the events of other peers.
    pub(super) fn delay(&mut self, now: Moment, event: Event) -> Option<Event> {
        if let Some(index) = event.target()
            && (self[index].paused > now || !self[index].delayed.is_empty())
        {
            self[index].delayed.push_back(event);
            return None;
        }
        Some(event)
    }

    /// A peer's clock reading.
    pub(super) fn reads(&self, index: usize, now: Moment) -> Moment {
        self.scenario.peers[index].clock.reads(now)
    }

    /// Schedules a peer's next tick. An earlier one is harmless: the next one is scheduled after it.
    pub(super) fn schedule_tick(&mut self, index: usize, queue: &mut EventQueue) {
        let clock = self.scenario.peers[index].clock;
        let node = &mut self[index];
        let due = node.peer.next_timeout().map(|due| clock.when(due).max(queue.now()));
        if let Some(due) = due
            && node.tick_at.is_none_or(|tick| tick > due)
        {
            node.tick_at = Some(due);
            queue.at(due, Event::Tick(node.me));
        }
    }

    /// Schedules the next tick of the coordinator on a peer.
    pub(super) fn schedule_reminder(&mut self, index: usize, queue: &mut EventQueue) {
        let clock = self.scenario.peers[index].clock;
        let to = self[index].me;
        let Some(seat) = self[index].seat.as_mut() else { return };
        let due = seat.coordinator.next_timeout().map(|due| clock.when(due).max(queue.now()));
        if let Some(due) = due
            && seat.remind_at.is_none_or(|remind| remind > due)
        {
            seat.remind_at = Some(due);
            queue.at(due, Event::Remind { to, leadership: seat.leadership });
        }
    }

    /// The coordinator instance of a leadership, if it is on this incarnation.
    pub(super) fn seat(&mut self, member: Member, leadership: u64) -> Option<&mut Seat> {
        let node = &mut self[index_of(member)];
        let seat = node.seat.as_mut().filter(|seat| seat.leadership == leadership);
        seat.filter(|_| node.me == member)
    }

    /// Starts a new incarnation of a peer, with its disk. Returns it.
    pub(super) fn restart(&mut self, index: usize) -> Member {
        let incarnation = self[index].me.incarnation.next();
        let new = Node::new(self.scenario, index, incarnation);
        let old = std::mem::replace(&mut self[index], new);
        self[index].known_dead = old.known_dead;
        self[index].engine.disk = old.engine.disk;
        self[index].me
    }
}

impl Index<usize> for Nodes<'_> {
    type Output = Node;

    fn index(&self, index: usize) -> &Node {
        &self.nodes[index]
    }
}

impl IndexMut<usize> for Nodes<'_> {
    fn index_mut(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }
}

/// Whether newcomers measure links to members before they get a stage.
fn probes_links_first(scenario: &Scenario) -> bool {
    let measured = scenario.network.measured || scenario.seed % 4 == 1;
    measured && scenario.routing == Routing::BySpeed
}

/// Whether a peer archives the checkpoints.
pub(super) fn archives(scenario: &Scenario, index: usize) -> bool {
    index == FIRST || scenario.peers[index].archive
}
