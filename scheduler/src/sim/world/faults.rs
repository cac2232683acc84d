//! Injects faults into the simulated world.

use std::time::Duration;

use shoal_protocol::units::Moment;

use super::event::Event;
use super::swarm::Swarm;
use super::{Held, World};
use crate::action::PeerInput;
use crate::sim::marks::Mark;
use crate::sim::scenario::{Fault, Scenario};

impl World<'_> {
    pub(super) fn fault(&mut self, fault: Fault) -> Held {
        let swarm = &mut self.swarm;
        if swarm.observation.is_over() {
            return Ok(());
        }
        let now = swarm.queue.now();
        swarm.observation.advanced(grace_period(self.scenario, now, fault));
        match fault {
            Fault::Lie { number } => swarm.lie(number),
            Fault::Depose => swarm.log.elect_soon(&mut swarm.queue),
            Fault::Crash { peer, restart, disk } => swarm.crash(peer, restart, disk),
            Fault::Drain { peer } => return drain(swarm, peer),
            Fault::Leave { peer } => {
                if swarm.nodes[peer].alive {
                    swarm.observation.mark(Mark::Died);
                    swarm.ends(peer, None);
                }
            }
            Fault::Join { peer } => {
                if !swarm.nodes[peer].alive {
                    swarm.nodes[peer].engine.disk.clear();
                    swarm.reborn(peer);
                }
            }
            Fault::Ambush { stage, restart } => swarm.ambush = Some((stage, restart)),
            Fault::Region { region, restart } => {
                let peers = self.scenario.peers.iter().enumerate();
                for (peer, _) in peers.filter(|(_, peer)| peer.region == region) {
                    swarm.crash(peer, restart, false);
                }
            }
            Fault::Break { one, other } => swarm.breaks(one, other),
            Fault::Cut { from, to, both, time } => {
                swarm.observation.mark(Mark::Cut);
                swarm.traffic.network.cut((from, to), now + time);
                if both {
                    swarm.traffic.network.cut((to, from), now + time);
                }
                swarm.breaks(from, to);
            }
            Fault::SlowLink { from, to, delay, time } => {
                swarm.traffic.network.slow((from, to), now + time, delay);
            }
            Fault::SlowPeer { peer, factor, time } => {
                swarm.nodes[peer].engine.slow = (now + time, factor);
            }
            Fault::Disk { peer, time } => swarm.nodes[peer].engine.disk_fails_until = now + time,
            Fault::Pause { peer, time } => pause(swarm, peer, now + time),
        }
        Ok(())
    }

    /// A stalled peer handles the events of the stall, in order.
    pub(super) fn resume(&mut self, index: usize) -> Held {
        let node = &mut self.swarm.nodes[index];
        if node.paused > self.swarm.queue.now() {
            return Ok(());
        }
        for event in std::mem::take(&mut node.delayed) {
            self.happen(event)?;
        }
        if self.swarm.log.has_voter(self.swarm.nodes[index].me.peer) {
            self.swarm.anchor_is_back();
        }
        Ok(())
    }
}

/// Asks a running peer to leave in order.
fn drain(swarm: &mut Swarm<'_>, peer: usize) -> Held {
    let node = &swarm.nodes[peer];
    let is_running = node.alive && node.paused <= swarm.queue.now();
    if is_running { swarm.input(peer, PeerInput::Drain) } else { Ok(()) }
}

/// Stalls a peer until a moment.
fn pause(swarm: &mut Swarm<'_>, peer: usize, until: Moment) {
    let node = &mut swarm.nodes[peer];
    node.paused = node.paused.max(until);
    swarm.queue.at(node.paused, Event::Resume(peer));
    if swarm.log.leader() == Some(node.me) {
        swarm.log.elect_soon(&mut swarm.queue);
    }
}

/// How long a fault may prevent progress.
fn grace_period(scenario: &Scenario, now: Moment, fault: Fault) -> Duration {
    match fault {
        // Too few peers may be alive until others join.
        Fault::Leave { .. } | Fault::Join { .. } => {
            let happen = &scenario.faults.happen;
            let next = happen.get(happen.partition_point(|(at, _)| *at <= now.0));
            next.map_or(Duration::ZERO, |(at, _)| Moment(*at).since(now))
        }
        _ => fault.time(),
    }
}
