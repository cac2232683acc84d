//! The status of a running driver, collected from its components.

use shoal_protocol::message::MemberRecord;
use shoal_protocol::net::transport::{Flow, Traffic, Transport};
use shoal_scheduler::peer::Peer;

use super::checkpoint_shelf::CheckpointShelf;
use super::context::Context;
use super::coordination::Coordination;
use super::engine_host::EngineHost;
use super::peer_network::PeerNetwork;
use crate::status::{
    CheckpointStatus, LinkStatus, LoadStatus, MemberState, MemberStatus, MoveStatus, NodeState,
    NodeStatus, Observation, RunStatus, TrafficStatus,
};

/// The components that the status shows.
pub(super) struct Sources<'a> {
    pub(super) context: &'a Context,
    pub(super) peer: &'a Peer,
    pub(super) engine: &'a EngineHost,
    pub(super) network: &'a PeerNetwork,
    pub(super) coordination: &'a Coordination,
    pub(super) checkpoints: &'a CheckpointShelf,
}

impl Sources<'_> {
    /// Collects the status as it is.
    pub(super) fn snapshot(&self) -> Observation {
        let manifest = &self.context.manifest;
        let view = self.coordination.view();
        let stamp = self.coordination.stamp();
        Observation {
            node: self.node_status(),
            run: Some(RunStatus {
                id: manifest.run_id(),
                stages: manifest.training.stages,
                steps: manifest.training.steps,
                version: self.peer.version().0,
                era: stamp.era.0,
                term: stamp.term.0,
                coordinator: self.coordination.contact().coordinator().map(|member| member.peer),
                tokens_per_step: manifest.tokens_per_step(),
                microbatches: manifest.training.microbatches,
                checkpoint: self
                    .checkpoints
                    .newest()
                    .map(|(version, _)| CheckpointStatus { version: version.0, hash: None }),
                saved: self.saved(),
                saves: manifest.checkpoint.every > 0 || manifest.checkpoint.interval > 0,
            }),
            view: view.number,
            members: view.members.iter().map(|record| self.member_status(record)).collect(),
        }
    }

    /// Returns the version that the run goes back to if all peers die; `None` if this peer has heard of no checkpoint
    /// and has no log.
    fn saved(&self) -> Option<u64> {
        if let Some((version, _)) = self.checkpoints.newest() {
            return Some(version.0);
        }
        let newest = self.coordination.newest_logged_checkpoint().map(|(version, _)| version);
        let first = || self.context.manifest.first_version();
        let logged =
            self.coordination.anchor_role().history().map(|_| newest.unwrap_or_else(first));
        logged.map(|version| version.0)
    }

    fn node_status(&self) -> NodeStatus {
        let (load, log) = (self.peer.load(), self.engine.payloads().log_use());
        let traffic = self.context.transport.as_ref().map(Transport::traffic);
        let (sent, received) = traffic.map_or_else(Default::default, flows);
        let (state, why) = self.node_state();
        let own = self.coordination.view().record(self.context.me);
        let budget = self.engine.budget();
        NodeStatus {
            peer: Some(self.context.me.peer),
            incarnation: self.context.me.incarnation,
            state,
            why,
            ready: own.is_some_and(|record| record.serving),
            stages: own.map(|record| record.span),
            own_port: self.network.own_port(),
            memory_limit_bytes: budget.memory().map(|memory| memory.0),
            resident_bytes: None,
            open_step: None,
            load: LoadStatus {
                accepted: load.accepted.values().sum::<usize>() as u64,
                waiting: load.waiting.values().sum::<usize>() as u64,
                computing: load.computing as u64,
                in_flight_bytes: load.in_flight.0,
                logged_bytes: load.logged.0,
                logged_on_disk_bytes: log.on_disk.0,
                log_memory_bytes: budget.log_memory().0,
            },
            sent,
            received,
        }
    }

    /// Returns the state of the node as its membership shows it, and the reason for a pause.
    fn node_state(&self) -> (NodeState, Option<String>) {
        let view = self.coordination.view();
        let Some(own) = view.record(self.context.me) else { return (NodeState::Joining, None) };
        if !own.serving {
            return (NodeState::CatchingUp, None);
        }
        let serves = |stage| {
            let mut members = view.members.iter();
            members.any(|record| record.serving && record.span.contains(stage))
        };
        let lacking = self.context.manifest.stages().find(|stage| !serves(*stage));
        let why = if self.coordination.contact().wait_ends().is_some() {
            Some("the coordinator cannot be reached".to_owned())
        } else {
            lacking.map(|stage| format!("nobody serves stage {stage}"))
        };
        match why {
            Some(why) => (NodeState::Paused, Some(why)),
            None if own.span.is_empty() => (NodeState::Watching, None),
            None => (NodeState::Serving, None),
        }
    }

    fn member_status(&self, record: &MemberRecord) -> MemberStatus {
        let member = record.member;
        let state = if record.span.is_empty() {
            MemberState::Watching
        } else if record.serving {
            MemberState::Serving
        } else {
            MemberState::CatchingUp
        };
        let own = member == self.context.me;
        let transport = self.context.transport.as_ref().filter(|_| !own);
        MemberStatus {
            peer: member.peer,
            name: record.name.clone(),
            incarnation: member.incarnation,
            stages: record.span,
            devices: record.devices.saturating_mul(record.devices_per_pass),
            state,
            moves: record.moves.map(|moves| MoveStatus { to: moves.to, reason: moves.reason }),
            coordinator: self.coordination.contact().coordinator() == Some(member),
            anchor: record.duties.anchor,
            archive: record.duties.archive,
            own,
            price: record.price,
            island: record.island.clone(),
            addresses: record.addresses.clone(),
            link: transport.and_then(|transport| link(transport, record)),
        }
    }
}

fn link(transport: &Transport, record: &MemberRecord) -> Option<LinkStatus> {
    let way = transport.path_to(record.member.peer)?;
    Some(LinkStatus {
        relayed: way.relayed,
        round_trip_seconds: way.round_trip.as_secs_f64(),
        bytes_per_second: transport.rate_to(record.member.peer),
        window_bytes: way.window.0,
        sent_packets: way.packets.sent,
        lost_packets: way.packets.lost,
    })
}

/// Returns the bytes sent and the bytes received, by kind.
fn flows(traffic: Traffic) -> (TrafficStatus, TrafficStatus) {
    let by_kind = |of: fn(Flow) -> u64| TrafficStatus {
        control_bytes: of(traffic.control),
        tensor_bytes: of(traffic.tensor),
        file_bytes: of(traffic.file),
    };
    (by_kind(|flow| flow.sent.0), by_kind(|flow| flow.received.0))
}
