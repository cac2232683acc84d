//! What the driver sees of the run, for whoever watches.

use std::time::{Duration, Instant};

use shoal_protocol::message::MemberRecord;
use shoal_protocol::net::transport::{Flow, Traffic, Transport};

use super::Driver;
use super::keeper::PATIENCE;
use crate::progress;
use crate::status::{
    CheckpointStatus, LinkStatus, LoadStatus, MemberState, MemberStatus, MoveStatus, NodeState,
    NodeStatus, RunStatus, Sight, StatusWatch, TrafficStatus,
};

/// How often the driver looks around. Changes of the membership are told at once.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// For so long the screen says nothing of a keeper that is out of reach: of several anchors another one
/// takes over sooner.
const UNSAID: Duration = Duration::from_secs(5);

/// Tells the board what is seen, now and then.
#[derive(Debug)]
pub(super) struct Lookout {
    board: StatusWatch,
    /// When it was told last, and of which membership.
    told: Option<(Instant, u64)>,
    /// Whether the screen says that the keeper cannot be reached.
    misses: bool,
}

impl Lookout {
    pub(super) fn new(board: StatusWatch) -> Self {
        Self { board, told: None, misses: false }
    }

    /// A step of the run that this peer keeps began.
    pub(super) fn opened(&self) {
        self.board.opened();
    }
}

/// Who was seen is seen no more when the driver is gone, however it went.
impl Drop for Lookout {
    fn drop(&mut self) {
        self.board.look_away();
    }
}

impl Driver<'_> {
    /// Looks around, if it is time to.
    pub(super) fn look(&mut self) {
        let view = self.view.number;
        let is_news = |(told, of): (Instant, u64)| of != view || told.elapsed() >= LOOK_EVERY;
        if self.lookout.told.is_none_or(is_news) {
            self.lookout.told = Some((Instant::now(), view));
            self.lookout.board.see(self.sight());
            self.say_whether_the_keeper_is_missed();
        }
    }

    /// Who looks at the screen of a peer that waits reads why.
    fn say_whether_the_keeper_is_missed(&mut self) {
        let waits = self.coordinator.missed_for().is_some_and(|missed| missed >= UNSAID);
        if std::mem::replace(&mut self.lookout.misses, waits) == waits {
            return;
        }
        if waits {
            progress::say(&format!(
                "the peer that keeps the run cannot be reached: waits for it, at most {} minutes; \
                 where it is gone, type its `shoal start` again, with the same --data-dir",
                PATIENCE.as_secs() / 60
            ));
        } else {
            progress::say("the run is kept again");
        }
    }

    fn sight(&self) -> Sight {
        let coordinator = self.coordinator.member().map(|member| member.peer);
        let training = &self.manifest.training;
        let checkpoint = self.newest.as_ref();
        Sight {
            node: self.node_status(),
            run: Some(RunStatus {
                id: self.manifest.run_id(),
                stages: training.stages,
                steps: training.steps,
                version: self.peer.version().0,
                era: self.era.0,
                term: self.coordinator.term().0,
                coordinator,
                tokens_per_step: self.manifest.tokens_per_step(),
                microbatches: training.microbatches,
                checkpoint: checkpoint
                    .map(|(version, _)| CheckpointStatus { version: version.0, hash: None }),
            }),
            view: self.view.number,
            members: self.view.members.iter().map(|record| self.member_status(record)).collect(),
        }
    }

    fn node_status(&self) -> NodeStatus {
        let (load, log) = (self.peer.load(), self.payloads.log_use());
        let traffic = self.links.as_ref().map(|links| links.transport.traffic());
        let (sent, received) = traffic.map_or_else(Default::default, flows);
        let (state, why) = self.node_state();
        let own = self.view.record(self.me);
        let room = &self.workshop.room;
        NodeStatus {
            peer: Some(self.me.peer),
            incarnation: self.me.incarnation,
            state,
            why,
            ready: own.is_some_and(|record| record.serving),
            stages: own.map(|record| record.span),
            own_port: self.own_port.found(),
            memory_limit_bytes: room.memory().map(|memory| memory.0),
            resident_bytes: None,
            load: LoadStatus {
                accepted: load.accepted.values().sum::<usize>() as u64,
                waiting: load.waiting.values().sum::<usize>() as u64,
                computing: load.computing as u64,
                in_flight_bytes: load.in_flight.0,
                logged_bytes: load.logged.0,
                logged_on_disk_bytes: log.on_disk.0,
                log_memory_bytes: room.log_memory().0,
            },
            sent,
            received,
        }
    }

    /// What the node is at, as far as its membership tells, and why it stands still.
    fn node_state(&self) -> (NodeState, Option<String>) {
        let Some(own) = self.view.record(self.me) else { return (NodeState::Joining, None) };
        if !own.serving {
            return (NodeState::CatchingUp, None);
        }
        let serves = |stage| {
            let mut members = self.view.members.iter();
            members.any(|record| record.serving && record.span.contains(stage))
        };
        let lacking = self.manifest.stages().find(|stage| !serves(*stage));
        let why = if self.coordinator.patience_ends().is_some() {
            Some("who keeps the run cannot be reached".to_owned())
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
        let links = self.links.as_ref().filter(|_| member != self.me);
        MemberStatus {
            peer: member.peer,
            incarnation: member.incarnation,
            stages: record.span,
            state,
            moves: record.moves.map(|moves| MoveStatus { to: moves.to, reason: moves.reason }),
            coordinator: self.coordinator.member() == Some(member),
            anchor: record.duties.anchor,
            archive: record.duties.archive,
            own: member == self.me,
            addresses: record.addresses.clone(),
            link: links.and_then(|links| link(&links.transport, record)),
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

/// What was sent, and what was received.
fn flows(traffic: Traffic) -> (TrafficStatus, TrafficStatus) {
    let by_kind = |of: fn(Flow) -> u64| TrafficStatus {
        control_bytes: of(traffic.control),
        tensor_bytes: of(traffic.tensor),
        file_bytes: of(traffic.file),
    };
    (by_kind(|flow| flow.sent.0), by_kind(|flow| flow.received.0))
}
