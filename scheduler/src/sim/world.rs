//! The simulated world: the loop that hands each event to the part of the swarm that it concerns.
//!
//! | part | owns |
//! |---|---|
//! | `queue` | the clock, the scheduled events and the random decisions |
//! | `nodes` | the peers and the state of their drivers |
//! | `traffic` | the network and its connections |
//! | `log` | the replicated log, its anchors and their leader |
//! | `deviations` | an injected error and an omitted rule |
//! | `observation` | the oracles, the trace, the report and the observer |
//! | `swarm` | all of these; it carries out the actions of peers and coordinators |
//!
//! `coordination` and `incarnations` belong to the swarm. `faults` injects the scenario's faults, `lies` those of a
//! hostile member.

mod coordination;
mod deviations;
mod event;
mod faults;
mod incarnations;
mod lies;
mod log;
mod nodes;
mod observation;
mod peer_index;
mod queue;
mod rare_paths;
mod swarm;
mod trace;
mod traffic;

use std::time::Duration;

use shoal_protocol::units::Moment;

use self::event::Event;
use self::nodes::Node;
pub(super) use self::peer_index::index_of;
use self::swarm::Swarm;
use super::corruption::Corruption;
#[cfg(test)]
use super::omitted_rules::{Omit, OmittedRules};
use super::oracle::Violation;
use super::report::Report;
use super::scenario::Scenario;
use super::watch::{Seen, Watch};
use crate::action::PeerInput;

/// The limit for a small swarm that omits a rule and may loop.
#[cfg(test)]
const EVENTS_WITHOUT_A_RULE: u64 = 2_000_000;

/// One run of the simulator.
#[derive(Debug)]
pub(super) struct World<'a> {
    scenario: &'a Scenario,
    swarm: Swarm<'a>,
}

/// The result of a check.
type Held = Result<(), Violation>;

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario, corruption: Corruption, with_oracles: bool) -> Self {
        let mut swarm = Swarm::new(scenario, corruption, with_oracles);
        if corruption.makes_wrong_sums() {
            swarm.observation.expect_errors();
        }
        Self { scenario, swarm }
    }

    /// The id of a peer of a scenario.
    #[cfg(test)]
    pub(super) fn peer_id(index: usize) -> shoal_protocol::ids::PeerId {
        self::peer_index::peer_id(index)
    }

    /// Adds an observer.
    pub(super) fn watched(mut self, watch: &'a mut dyn Watch) -> Self {
        self.swarm.observation.watch = Some(watch);
        self
    }

    /// Prints every event.
    pub(super) fn traced(mut self) -> Self {
        self.swarm.observation.traced = true;
        self
    }

    /// Omits a rule of the protocol.
    #[cfg(test)]
    pub(super) fn without(mut self, rule: Omit) -> Self {
        self.swarm.deviations.rules = OmittedRules::new(rule);
        self.swarm.observation.most = EVENTS_WITHOUT_A_RULE;
        self
    }

    /// Runs until no event is left.
    pub(super) fn run(mut self) -> Result<Report, Violation> {
        self.schedule_scenario();
        self.swarm.elect()?;
        while let Some(event) = self.swarm.queue.pop() {
            let now = self.swarm.queue.now();
            if self.scenario.until.is_some_and(|until| now.0 > until) {
                return Ok(self.conclude());
            }
            self.swarm.observation.event(now, &event);
            self.happen(event)?;
            if self.swarm.observation.is_stopped() {
                break;
            }
            let gone = |node: &Node| !node.alive || node.finished;
            self.swarm.observation.check_progress(|| self.swarm.nodes.iter().all(gone))?;
        }
        self.finish()
    }

    /// Schedules the starts of all peers, and all faults.
    fn schedule_scenario(&mut self) {
        let Swarm { nodes, queue, .. } = &mut self.swarm;
        for (index, peer) in self.scenario.peers.iter().enumerate() {
            match peer.start {
                Some(start) => queue.at(Moment(start), Event::Start(nodes[index].me)),
                None => nodes[index].alive = false,
            }
        }
        for (at, fault) in &self.scenario.faults.happen {
            queue.at(Moment(*at), Event::Fault(*fault));
        }
    }

    /// Handles an event, unless its peer is stalled or its incarnation is gone.
    fn happen(&mut self, event: Event) -> Held {
        let swarm = &mut self.swarm;
        let Some(event) = swarm.nodes.delay(swarm.queue.now(), event) else { return Ok(()) };
        if event.incarnation().is_some_and(|incarnation| !swarm.nodes.lives(incarnation)) {
            return Ok(());
        }
        match event {
            Event::Start(me) => swarm.start(index_of(me)),
            Event::Arrives { to, from, connection, era, term, cargo } => {
                swarm.deliver(to, from, connection, (era, term), cargo)
            }
            Event::Fetched { to, version, stage, weights } => {
                let whole = swarm.write(to, version, stage, weights);
                swarm.input(index_of(to), PeerInput::Fetched { version, stage, whole })
            }
            Event::Kept { to, version, stage, weights } => {
                let whole = swarm.write(to, version, stage, weights);
                swarm.input(index_of(to), PeerInput::Kept { version, stage, whole })
            }
            Event::Written { to, version, stage, weights } => {
                let whole = swarm.write(to, version, stage, Some(weights));
                let engine = &swarm.nodes[index_of(to)].engine;
                let result = engine.stored(version, stage, weights, whole);
                swarm.input(index_of(to), PeerInput::Done { result, busy: Duration::ZERO })
            }
            Event::LinksProbed { to, link_estimates } => {
                swarm.input(index_of(to), PeerInput::LinksProbed(link_estimates))
            }
            Event::EngineDone(me, device) => swarm.engine_done(index_of(me), device),
            Event::Tick(me) => {
                swarm.nodes[index_of(me)].tick_at = None;
                swarm.input(index_of(me), PeerInput::Tick)
            }
            Event::Appended { to, leadership, record } => swarm.appended(to, leadership, record),
            Event::Logged { leadership } => swarm.logged(leadership),
            Event::Elect => swarm.elect(),
            Event::Deposed { at, leadership } => {
                swarm.deposed(at, leadership);
                Ok(())
            }
            Event::Remind { to, leadership } => swarm.remind(to, leadership),
            Event::Fault(fault) => self.fault(fault),
            Event::Noticed { at, other, dead } => swarm.noticed(at, other, dead),
            Event::Unreached { at, other } => swarm.unreached(at, other),
            Event::Reborn(index) => {
                swarm.reborn(index);
                Ok(())
            }
            Event::Resume(index) => self.resume(index),
        }
    }

    /// Checks the conditions at the end of a run.
    fn finish(self) -> Result<Report, Violation> {
        let Swarm { nodes, observation, .. } = &self.swarm;
        if observation.report.stopped.is_none() {
            for node in nodes.iter().filter(|node| node.alive) {
                observation.holds("progress", node.has_finished())?;
                observation.holds("payloads", node.has_released_all())?;
            }
        }
        Ok(self.conclude())
    }

    fn conclude(self) -> Report {
        let leader = self.swarm.leader().map(index_of);
        let Swarm { mut nodes, mut observation, .. } = self.swarm;
        observation.show(Seen::Goes { gone: false });
        drop(leader.and_then(|leader| nodes[leader].seat.take()));
        observation.show(Seen::Goes { gone: true });
        for tiers in nodes.iter().filter_map(|node| node.engine.tiers.as_ref()) {
            observation.report.swapped.loaded += tiers.swapped.loaded;
            observation.report.swapped.waited += tiers.swapped.waited;
        }
        observation.conclude(nodes.iter().map(|node| node.engine.busy).sum())
    }
}
