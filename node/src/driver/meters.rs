//! What the driver tells Prometheus.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use shoal_engine::forward_flops;
use shoal_metrics::{
    Direction, Fault, Label, LinkPacking, Metrics, MoveCause, NodeState, Path, PeerState, Phase,
    PortState, Preemption, Queue, Refusal, RefusedConnection, Repeat, RoundFailure, TrafficKind,
};
use shoal_protocol::history::History;
use shoal_protocol::ids::{ClaimKey, Era, Member, Step};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::{MemberRecord, MoveReason, View};
use shoal_protocol::net::admission::Reason;
use shoal_protocol::net::transport::{Flow, Traffic, Transport};
use shoal_protocol::units::Bytes;
use shoal_scheduler::action::{self, CoordinatorEvent, PeerLoad, TaskResult};

use super::payload::LogUse;
use crate::events::StepReport;
use crate::status::{Mapping, OwnPort};

/// Digits of a run's id that name it in labels: enough to tell runs apart.
const NAME_LENGTH: usize = 16;

/// How often the connections are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The metrics of this process, and what was counted before.
#[derive(Debug)]
pub(crate) struct Meters {
    metrics: Metrics,
    /// Floating-point operations of each stage's forward pass over one microbatch.
    flops: Vec<f64>,
    traffic: Traffic,
    spill_failures: u64,
    looked: Option<Instant>,
    /// When this life began, until it serves.
    joining: Option<Instant>,
    /// When a member was lost, until the next commit.
    lost: Option<Instant>,
}

impl Meters {
    /// At the beginning of a life in a run, of which the log says so much.
    pub(crate) fn new(metrics: Metrics, manifest: &Manifest, history: Option<&History>) -> Self {
        metrics.name_run(format!("{:.NAME_LENGTH$}", manifest.run_id().to_string()));
        metrics.run.planned_steps.set(gauge(manifest.training.steps));
        metrics.checkpoints.interval.set(gauge(manifest.checkpoint.every));
        metrics.node.state.choose(NodeState::Joining);
        metrics.node.own_port.choose(PortState::Unknown);
        let meters = Self {
            metrics,
            flops: manifest.stages().map(|stage| forward_flops(manifest, stage)).collect(),
            traffic: Traffic::default(),
            spill_failures: 0,
            looked: None,
            joining: Some(Instant::now()),
            lost: None,
        };
        if let Some(history) = history {
            meters.stood(history);
        }
        meters
    }

    /// What the machine can give.
    pub(crate) fn room(&self, memory: Option<Bytes>, log_memory: Bytes, peak_flops: Option<f64>) {
        if let Some(memory) = memory {
            self.metrics.memory.limit_bytes.set(memory.0 as f64);
        }
        self.metrics.memory.log_limit_bytes.set(log_memory.0 as f64);
        if let Some(peak) = peak_flops {
            self.metrics.node.peak_flops.set(peak);
        }
    }

    /// What the hosted stages take of it.
    pub(crate) fn hosts(&self, needed: Bytes) {
        self.metrics.memory.needed_bytes.set(needed.0 as f64);
    }

    /// How the run stands, as the log has it.
    pub(crate) fn stood(&self, history: &History) {
        self.stands(history.version);
        if let Some((version, _)) = history.checkpoints.last_key_value() {
            self.metrics.checkpoints.step.set(gauge(version.0));
        }
    }

    /// The version of the weights, where no commit of this life's told of it.
    pub(crate) fn stands(&self, version: Step) {
        self.metrics.run.step.set(gauge(version.0));
    }

    /// What it is doing from now on.
    pub(crate) fn is(&self, state: NodeState) {
        self.metrics.node.state.choose(state);
    }

    /// How the peer's own port stands from now on.
    pub(crate) fn own_port(&self, port: &OwnPort) {
        self.metrics.node.own_port.choose(match port {
            OwnPort::Unknown => PortState::Unknown,
            OwnPort::Open { .. } => PortState::Open,
            OwnPort::Firewall { .. } => PortState::Firewall,
            OwnPort::Router { mapping: Mapping::ByDestination, .. } => PortState::SymmetricRouter,
            OwnPort::Router { .. } => PortState::Router,
        });
    }

    /// It was told to leave.
    pub(crate) fn preempted(&self, told_by: Preemption) {
        self.metrics.node.preemptions.of(told_by).inc();
    }

    /// So many connections were refused so far, by reason.
    pub(crate) fn turned_away(&self, counts: &BTreeMap<Reason, u64>) {
        for (reason, count) in counts {
            let counter = self.metrics.links.turned.of(label_of(*reason));
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }

    /// What a reason is called.
    pub(crate) fn name_of(&self, reason: Reason) -> &'static str {
        label_of(reason).value()
    }

    /// This life is over. Unless that is the end, another one begins by a search for the run.
    pub(crate) fn over(&self) {
        let state = &self.metrics.node.state;
        if [NodeState::Draining, NodeState::Finished].iter().all(|end| state.of(*end).get() == 0) {
            state.choose(NodeState::Searching);
        }
        self.office(false, 0, false);
    }

    /// The engine finished a task.
    pub(crate) fn computed(&self, result: &TaskResult, busy: Duration) {
        let node = &self.metrics.node;
        let seconds = busy.as_secs_f64();
        let pass = |direction: Direction, key: &ClaimKey, times: f64| {
            node.microbatches.of(direction).inc();
            node.flops.inc_by(times * self.flops[usize::from(key.stage.0)]);
        };
        let phase = match result {
            TaskResult::Forwarded { key, .. } => {
                pass(Direction::Forward, key, 1.0);
                Phase::Forward
            }
            TaskResult::Returned { key, .. } => {
                // The gradients of its input and of its weights.
                pass(Direction::Backward, key, 2.0);
                Phase::Backward
            }
            TaskResult::Accumulated { .. } => Phase::Accumulate,
            TaskResult::Exported { .. }
            | TaskResult::Reduced { .. }
            | TaskResult::Installed { .. }
            | TaskResult::Summarised { .. } => Phase::Reduce,
            TaskResult::Applied { .. } => Phase::Apply,
            TaskResult::Restored { .. } => Phase::Restore,
            TaskResult::NotRestored { .. } => return self.refused(Refusal::Checkpoint),
            // Written beside the engine.
            TaskResult::Stored { .. } => {
                return self.metrics.checkpoints.write_duration.observe(seconds);
            }
            TaskResult::NotStored { .. } => return self.metrics.checkpoints.failures.inc(),
            TaskResult::Discarded { .. }
            | TaskResult::Left { .. }
            | TaskResult::Diverged { .. } => return,
        };
        node.compute_busy.inc_by(seconds);
        node.phase_duration.of(phase).observe(seconds);
    }

    /// Something befell the run that this peer keeps.
    pub(crate) fn befell(&mut self, event: &CoordinatorEvent, manifest: &Manifest) {
        let keeping = &self.metrics.keeping;
        let repeated = |reason: Repeat, tokens: u64, stages: u16| {
            keeping.tokens_repeated.of(reason).inc_by(tokens as f64 / f64::from(stages));
        };
        let training = &manifest.training;
        let microbatch = manifest.tokens_per_step() / u64::from(training.microbatches);
        match event {
            CoordinatorEvent::Lost { .. } => {
                keeping.members_lost.inc();
                self.lost.get_or_insert_with(Instant::now);
            }
            CoordinatorEvent::NotAdmitted { .. } => keeping.candidates_refused.inc(),
            CoordinatorEvent::ClaimRefused { .. } => self.refused(Refusal::Claim),
            CoordinatorEvent::Revoked { claims, .. } => {
                repeated(Repeat::Lost, claims * microbatch, training.stages);
            }
            CoordinatorEvent::Reclaimed { .. } => {
                keeping.claims_reclaimed.inc();
                repeated(Repeat::Late, microbatch, training.stages);
            }
            CoordinatorEvent::RoundsAborted { rounds, late, .. } => {
                let reason = if *late { RoundFailure::Late } else { RoundFailure::MemberLost };
                keeping.rounds_failed.of(reason).inc_by(*rounds as u64);
            }
            CoordinatorEvent::RoundMended { .. } => keeping.rounds_mended.inc(),
            CoordinatorEvent::Committed { books, .. } => {
                keeping.rounds.inc_by(training.stages.into());
                keeping.all_reduce_duration.observe(books.all_reduce.as_secs_f64());
                if let Some(lost) = self.lost.take() {
                    keeping.recovery_duration.observe(lost.elapsed().as_secs_f64());
                }
            }
            CoordinatorEvent::BecameCoordinator { .. } => keeping.terms.inc(),
            CoordinatorEvent::MoveBegun { reason, .. } => {
                keeping.moves_begun.of(cause(*reason)).inc();
            }
            CoordinatorEvent::Moves { reason, .. } => keeping.moves_done.of(cause(*reason)).inc(),
            CoordinatorEvent::MoveCancelled { reason, .. } => {
                keeping.moves_given_up.of(cause(*reason)).inc();
            }
            CoordinatorEvent::Rewound { steps, .. } => {
                keeping.rewinds.inc();
                repeated(Repeat::Rewind, steps * manifest.tokens_per_step(), 1);
            }
            CoordinatorEvent::CheckpointAbandoned { .. } => self.metrics.checkpoints.failures.inc(),
            _ => {}
        }
    }

    /// This peer found what must not be.
    pub(crate) fn fault(&self, fault: &action::Fault) {
        let label = match fault {
            action::Fault::AccumulatorDiffers { .. } => Fault::Accumulator,
            action::Fault::ProofDiffers { .. } => Fault::Proof,
            action::Fault::ResultDiffers { .. } => Fault::Result,
            action::Fault::Nonsense { .. } => Fault::Nonsense,
        };
        self.metrics.node.faults.of(label).inc();
    }

    /// Who keeps the run, and how its log is kept.
    pub(crate) fn office(&self, is_coordinator: bool, anchors: usize, log_paused: bool) {
        self.metrics.keeping.is_coordinator.set(is_coordinator.into());
        self.metrics.keeping.anchors.set(gauge(anchors as u64));
        self.metrics.keeping.log_paused.set(log_paused.into());
    }

    /// A checkpoint is complete.
    pub(crate) fn checkpoint_completed(&self, version: Step) {
        self.metrics.checkpoints.step.set(gauge(version.0));
        self.metrics.checkpoints.time.set(since_1970());
    }

    /// A checkpoint could not be brought together here.
    pub(crate) fn checkpoint_failed(&self) {
        self.metrics.checkpoints.failures.inc();
    }

    /// Something that a peer sent is not used.
    pub(crate) fn refused(&self, reason: Refusal) {
        self.metrics.node.refused.of(reason).inc();
    }

    /// A step is committed.
    pub(crate) fn committed(&self, era: Era, report: &StepReport, manifest: &Manifest) {
        let run = &self.metrics.run;
        run.step.set(gauge(report.step.saturating_add(1)));
        run.era.set(era.0.into());
        run.steps.inc();
        run.last_commit.set(since_1970());
        run.tokens.inc_by(report.tokens);
        run.step_duration.observe(report.seconds);
        run.training_loss.set(report.loss);
        run.gradient_norm.set(report.gradient_norm);
        run.learning_rate.set(shoal_engine::learning_rate(manifest, Step(report.step)));
        self.metrics.keeping.microbatches_duplicated.inc_by(report.duplicated);
        self.metrics.keeping.microbatches_replayed.inc_by(report.replayed);
        if let Some(loss) = report.held_out_loss {
            run.held_out_loss.set(loss);
        }
    }

    /// The membership changed.
    pub(crate) fn members(&mut self, view: &View, me: Member, manifest: &Manifest) {
        let run = &self.metrics.run;
        run.members.set(gauge(view.members.len() as u64));
        let mine = view.record(me);
        for stage in manifest.stages() {
            let hosts = |record: &&MemberRecord| record.span.contains(stage);
            for (state, serving) in [(PeerState::Serving, true), (PeerState::Joining, false)] {
                let hosting = view.members.iter().map(AsRef::as_ref).filter(hosts);
                let count = hosting.filter(|record| record.serving == serving).count();
                run.peers.set(stage.0, state, count);
            }
            self.metrics.node.hosted.set(stage.0, mine.as_ref().is_some_and(hosts));
        }
        if view.serves(me)
            && let Some(began) = self.joining.take()
        {
            self.metrics.node.join_duration.observe(began.elapsed().as_secs_f64());
            self.is(NodeState::Serving);
        }
    }

    /// What the peer holds now.
    pub(crate) fn load(&mut self, load: &PeerLoad, log: LogUse) {
        let metrics = &self.metrics;
        let queue = |queue: Queue, length: usize| {
            metrics.node.queue_length.of(queue).set(gauge(length as u64));
        };
        queue(Queue::Accepted, load.accepted.values().sum());
        queue(Queue::Offers, load.waiting.values().sum());
        queue(Queue::Compute, load.computing);
        metrics.memory.in_flight_bytes.set(gauge(load.in_flight.0));
        metrics.memory.log_bytes.set(gauge(load.logged.0));
        metrics.memory.log_disk_bytes.set(gauge(log.on_disk.0));
        metrics.memory.spill_failures.inc_by(log.failures - self.spill_failures);
        self.spill_failures = log.failures;
    }

    /// What went over the links so far, and now and then what the connections show, and what the other
    /// members were measured to take.
    pub(crate) fn links(&mut self, transport: &Transport, view: &View) {
        let links = &self.metrics.links;
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY) {
            self.looked = Some(Instant::now());
            let link_estimates = transport.paths();
            let relayed = link_estimates.iter().filter(|way| way.relayed).count();
            links.connections.of(Path::Relayed).set(gauge(relayed as u64));
            links.connections.of(Path::Direct).set(gauge((link_estimates.len() - relayed) as u64));
            for way in link_estimates {
                links.rtt.observe(way.round_trip.as_secs_f64());
                links.congestion_window.observe(way.window.0 as f64);
            }
            let others = view.members.iter().map(|record| record.member.peer);
            for rate in others.filter_map(|peer| transport.rate_to(peer)) {
                links.rate.observe(rate);
            }
        }
        let traffic = transport.traffic();
        let (packets, before) = (traffic.packets, self.traffic.packets);
        links.sent_packets.inc_by(packets.sent - before.sent);
        links.lost_packets.inc_by(packets.lost - before.lost);
        links.lost_bytes.inc_by((packets.lost_bytes - before.lost_bytes).0);
        let (pieces, before) = (traffic.pieces, self.traffic.pieces);
        links.pieces.of(LinkPacking::None).inc_by(pieces.raw - before.raw);
        links.pieces.of(LinkPacking::Zstd).inc_by(pieces.zstd - before.zstd);
        let count = |kind: TrafficKind, now: Flow, before: Flow| {
            links.sent_bytes.of(kind).inc_by((now.sent - before.sent).0);
            links.received_bytes.of(kind).inc_by((now.received - before.received).0);
        };
        count(TrafficKind::Control, traffic.control, self.traffic.control);
        count(TrafficKind::Tensor, traffic.tensor, self.traffic.tensor);
        count(TrafficKind::File, traffic.file, self.traffic.file);
        count(TrafficKind::Relay, traffic.relay, self.traffic.relay);
        let wrong_files = traffic.wrong_files - self.traffic.wrong_files;
        self.metrics.node.refused.of(Refusal::File).inc_by(wrong_files);
        self.traffic = traffic;
    }
}

fn since_1970() -> f64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn cause(reason: MoveReason) -> MoveCause {
    match reason {
        MoveReason::StageLost => MoveCause::StageLost,
        MoveReason::MembersGone => MoveCause::MembersGone,
        MoveReason::Uneven => MoveCause::Uneven,
        MoveReason::Nearer => MoveCause::Nearer,
        MoveReason::Trial => MoveCause::Trial,
    }
}

fn label_of(reason: Reason) -> RefusedConnection {
    match reason {
        Reason::NoCertificate => RefusedConnection::NoCertificate,
        Reason::Expired => RefusedConnection::Expired,
        Reason::Clock => RefusedConnection::Clock,
        Reason::UsedUp => RefusedConnection::UsedUp,
        Reason::Revoked => RefusedConnection::Revoked,
        Reason::Banned => RefusedConnection::Banned,
        Reason::OtherPeer => RefusedConnection::OtherPeer,
        Reason::Forged => RefusedConnection::Forged,
        Reason::OtherRun => RefusedConnection::OtherRun,
        Reason::Version => RefusedConnection::Version,
        Reason::Malformed => RefusedConnection::Malformed,
        Reason::Slow => RefusedConnection::Slow,
        Reason::Flood => RefusedConnection::Flood,
        Reason::Other => RefusedConnection::Other,
    }
}
