//! Updates of the metrics by the driver.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use shoal_engine::{DeviceChoice, Footprint, PassFlops, StageRouting, SwapStats, pass_flops};
use shoal_formats::own_port::{Mapping, OwnPort};
use shoal_formats::scores::Scores;
use shoal_metrics::{
    AuditResult, Direction, Fault, Label, LinkPacking, Metrics, MoveCause, NodeState,
    OutlierReason, Path, PeerState, Phase, PortState, Preemption, Queue, Refusal,
    RefusedConnection, Repeat, RoundFailure, Swap, TensorKind, TrafficKind,
};
use shoal_protocol::history::History;
use shoal_protocol::ids::{ClaimKey, Era, Member, PeerId, Stage, Step};
use shoal_protocol::manifest::{Manifest, Outlier};
use shoal_protocol::message::{MemberRecord, MoveReason, View};
use shoal_protocol::net::admission::Reason;
use shoal_protocol::net::transport::{Flow, Traffic, Transport};
use shoal_protocol::plain_name::{IslandName, PeerName};
use shoal_protocol::units::Bytes;
use shoal_scheduler::action::{self, AuditOutcome, CoordinatorEvent, PeerLoad, TaskResult};

use super::anchor_role::AnchorRole;
use super::payload::LogUse;
use crate::events::StepReport;
use crate::gpus;
use crate::status::SurvivalStatus;

/// Digits of a run's id in labels, enough to distinguish runs.
const NAME_LENGTH: usize = 16;

/// Time between two observations of the connections.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The metrics of this process, and the counts that were added to them before.
#[derive(Debug)]
pub(crate) struct MetricsUpdate {
    metrics: Metrics,
    /// Floating-point operations of passes over one microbatch, by stage.
    flops: Vec<PassFlops>,
    traffic: Traffic,
    spill_failures: u64,
    /// The number of passes that run at the same time.
    passes_at_once: usize,
    /// What the engine has swapped.
    swapped: SwapStats,
    looked: Option<Instant>,
    /// The beginning of this life, until the peer serves.
    joining: Option<Instant>,
    /// The loss of a member, until the next commit.
    lost: Option<Instant>,
}

impl MetricsUpdate {
    /// Names the run, and sets the state that is in the local log.
    pub(crate) fn new(
        metrics: Metrics,
        manifest: &Manifest,
        passes_at_once: usize,
        history: Option<&History>,
    ) -> Self {
        metrics.name_run(format!("{:.NAME_LENGTH$}", manifest.run_id().to_string()));
        metrics.run.planned_steps.set(gauge(manifest.training.steps));
        metrics.checkpoints.interval.set(gauge(manifest.checkpoint.every));
        metrics.node.state.choose(NodeState::Joining);
        metrics.node.own_port.choose(PortState::Unknown);
        let update = Self {
            metrics,
            flops: manifest.stages().map(|stage| pass_flops(manifest, stage)).collect(),
            traffic: Traffic::default(),
            spill_failures: 0,
            passes_at_once,
            swapped: SwapStats::default(),
            looked: None,
            joining: Some(Instant::now()),
            lost: None,
        };
        if let Some(history) = history {
            update.resumed(history);
        }
        update
    }

    /// Sets the labels that name this peer.
    pub(crate) fn known_as(
        &self,
        peer: PeerId,
        name: Option<&PeerName>,
        island: Option<&IslandName>,
        devices: &[DeviceChoice],
    ) {
        let name = name.map_or("", PeerName::as_str);
        let island = island.map_or("", IslandName::as_str);
        self.metrics.node.info.set(name, &peer.short(), island, &gpus::names(devices));
    }

    /// Sets the limits of the machine.
    pub(crate) fn budget(&self, memory: Option<Bytes>, log_memory: Bytes, peak_flops: Option<f64>) {
        if let Some(memory) = memory {
            self.metrics.memory.limit_bytes.set(memory.0 as f64);
        }
        self.metrics.memory.log_limit_bytes.set(log_memory.0 as f64);
        if let Some(peak) = peak_flops {
            self.metrics.node.peak_flops.set(peak);
        }
    }

    /// Sets the memory that the hosted stages take.
    pub(crate) fn memory_needed(&self, needed: Bytes) {
        self.metrics.memory.needed_bytes.set(needed.0 as f64);
    }

    /// Sets the state of the run as the log has it.
    pub(crate) fn resumed(&self, history: &History) {
        self.version(history.version);
        if let Some((version, _)) = history.checkpoints.last_key_value() {
            self.metrics.checkpoints.step.set(gauge(version.0));
        }
    }

    /// Sets the version of the weights; commits do so themselves.
    pub(crate) fn version(&self, version: Step) {
        self.metrics.run.step.set(gauge(version.0));
    }

    /// Sets the state of the node.
    pub(crate) fn is(&self, state: NodeState) {
        self.metrics.node.state.choose(state);
    }

    /// Sets the reachability of the peer's own port.
    pub(crate) fn own_port(&self, port: &OwnPort) {
        self.metrics.node.own_port.choose(match port {
            OwnPort::Unknown => PortState::Unknown,
            OwnPort::Open { .. } => PortState::Open,
            OwnPort::Firewall { .. } => PortState::Firewall,
            OwnPort::Router { mapping: Mapping::ByDestination, .. } => PortState::SymmetricRouter,
            OwnPort::Router { .. } => PortState::Router,
        });
    }

    /// Counts a request to leave.
    pub(crate) fn preempted(&self, source: Preemption) {
        self.metrics.node.preemptions.of(source).inc();
    }

    /// Sets the refused connections so far, by reason.
    pub(crate) fn turned_away(&self, counts: &BTreeMap<Reason, u64>) {
        for (reason, count) in counts {
            let counter = self.metrics.links.turned.of(label_of(*reason));
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }

    /// Returns the label of a reason.
    pub(crate) fn name_of(&self, reason: Reason) -> &'static str {
        label_of(reason).value()
    }

    /// Ends this life. Unless the run is over for this peer, another life begins by searching it.
    pub(crate) fn over(&self) {
        let state = &self.metrics.node.state;
        if [NodeState::Draining, NodeState::Finished].iter().all(|end| state.of(*end).get() == 0) {
            state.choose(NodeState::Searching);
        }
        self.coordinating(false, 0, false);
    }

    /// Counts a result of the engine.
    pub(crate) fn computed(&self, result: &TaskResult, busy: Duration) {
        let node = &self.metrics.node;
        let seconds = busy.as_secs_f64();
        let pass = |direction: Direction, key: &ClaimKey| {
            node.microbatches.of(direction).inc();
            let flops = self.flops[usize::from(key.stage.0)];
            node.flops.inc_by(match direction {
                Direction::Forward => flops.forward,
                Direction::Backward => flops.backward,
            });
        };
        let phase = match result {
            TaskResult::Forwarded { key, .. } => {
                pass(Direction::Forward, key);
                Phase::Forward
            }
            TaskResult::Returned { key, .. } => {
                pass(Direction::Backward, key);
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
            // The engine's thread did not wait for these.
            TaskResult::Stored { .. } => {
                return self.metrics.checkpoints.write_duration.observe(seconds);
            }
            TaskResult::NotStored { .. } => return self.metrics.checkpoints.failures.inc(),
            TaskResult::SumsPrinted { .. } => Phase::Reduce,
            TaskResult::Discarded { .. }
            | TaskResult::SumsMoved { .. }
            | TaskResult::Left { .. }
            | TaskResult::Diverged { .. } => return,
        };
        let at_a_time = match phase {
            Phase::Forward | Phase::Backward | Phase::Accumulate => self.passes_at_once,
            _ => 1,
        };
        node.compute_busy.inc_by(seconds / at_a_time as f64);
        node.phase_duration.of(phase).observe(seconds);
    }

    /// Counts what the engine swapped for a task.
    pub(crate) fn swapped(&mut self, more: SwapStats) {
        self.swapped += more;
        let memory = &self.metrics.memory;
        memory.stage_swap_bytes.of(Swap::In).inc_by(more.read.0);
        memory.stage_swap_bytes.of(Swap::Out).inc_by(more.written.0);
        memory.stage_swap_wait.inc_by(more.waited.as_secs_f64());
        memory.stage_copy_bytes.inc_by(more.copied.0);
        memory.stage_copy_late_bytes.inc_by(more.late.0);
    }

    /// Sets what each of the engine's devices has.
    pub(crate) fn devices_have(&self, all: &[Footprint]) {
        let metric = &self.metrics.memory.tensor_bytes;
        for (device, one) in all.iter().enumerate() {
            let Footprint { weights, frozen, optimizer, sums, images, workers } = *one;
            metric.set(device, TensorKind::Weights, weights.0);
            metric.set(device, TensorKind::Frozen, frozen.0);
            metric.set(device, TensorKind::Optimizer, optimizer.0);
            metric.set(device, TensorKind::Sums, sums.0);
            metric.set(device, TensorKind::Images, images.0);
            metric.set(device, TensorKind::Workers, workers.0);
        }
    }

    /// Sets how busy the experts of a stage were, if it has some.
    pub(crate) fn routed(&self, stage: Stage, routing: &StageRouting) {
        let node = &self.metrics.node;
        if let (Some(load), Some(entropy)) = (routing.load(), routing.entropy()) {
            node.expert_load.set(stage.0, load);
            node.router_entropy.set(stage.0, entropy);
        }
    }

    /// Returns what the engine has swapped.
    pub(crate) fn swap_stats(&self) -> SwapStats {
        self.swapped
    }

    /// Counts an event of the local coordinator.
    pub(crate) fn coordinator_event(&mut self, event: &CoordinatorEvent, manifest: &Manifest) {
        let coordination = &self.metrics.coordination;
        let repeated = |reason: Repeat, tokens: u64, stages: u16| {
            coordination.tokens_repeated.of(reason).inc_by(tokens as f64 / f64::from(stages));
        };
        let training = &manifest.training;
        let microbatch = manifest.tokens_per_step() / u64::from(training.microbatches);
        match event {
            CoordinatorEvent::Lost { .. } => {
                coordination.members_lost.inc();
                self.lost.get_or_insert_with(Instant::now);
            }
            CoordinatorEvent::NotAdmitted { .. } => coordination.candidates_refused.inc(),
            CoordinatorEvent::ClaimRefused { .. } => self.refused(Refusal::Claim),
            CoordinatorEvent::Revoked { claims, .. } => {
                repeated(Repeat::Lost, claims * microbatch, training.stages);
            }
            CoordinatorEvent::Reclaimed { .. } => {
                coordination.claims_reclaimed.inc();
                repeated(Repeat::Late, microbatch, training.stages);
            }
            CoordinatorEvent::RoundsAborted { rounds, late, .. } => {
                let reason = if *late { RoundFailure::Late } else { RoundFailure::MemberLost };
                coordination.rounds_failed.of(reason).inc_by(*rounds as u64);
            }
            CoordinatorEvent::RoundForged { .. } => {
                coordination.rounds_failed.of(RoundFailure::Forged).inc();
            }
            CoordinatorEvent::RoundMended { .. } => coordination.rounds_mended.inc(),
            CoordinatorEvent::Committed { counts, .. } => {
                coordination.rounds.inc_by(training.stages.into());
                coordination.all_reduce_duration.observe(counts.all_reduce.as_secs_f64());
                if let Some(lost) = self.lost.take() {
                    coordination.recovery_duration.observe(lost.elapsed().as_secs_f64());
                }
            }
            CoordinatorEvent::BecameCoordinator { .. } => coordination.terms.inc(),
            CoordinatorEvent::MoveBegun { reason, .. } => {
                coordination.moves_begun.of(cause(*reason)).inc();
            }
            CoordinatorEvent::Moves { reason, .. } => {
                coordination.moves_done.of(cause(*reason)).inc()
            }
            CoordinatorEvent::Audited { outcome, .. } => {
                let result = match outcome {
                    AuditOutcome::Sound => AuditResult::Sound,
                    AuditOutcome::NotAudited => AuditResult::NotAudited,
                };
                coordination.audits.of(result).inc();
            }
            CoordinatorEvent::Convicted(_) => coordination.audits.of(AuditResult::Wrong).inc(),
            CoordinatorEvent::MoveCancelled { reason, .. } => {
                coordination.moves_given_up.of(cause(*reason)).inc();
            }
            CoordinatorEvent::Rewound { steps, .. } => {
                coordination.rewinds.inc();
                repeated(Repeat::Rewind, steps * manifest.tokens_per_step(), 1);
            }
            CoordinatorEvent::CheckpointAbandoned { .. } => self.metrics.checkpoints.failures.inc(),
            _ => {}
        }
    }

    /// Counts a violated invariant that this peer found.
    pub(crate) fn fault(&self, fault: &action::Fault) {
        let label = match fault {
            action::Fault::AccumulatorDiffers { .. } => Fault::Accumulator,
            action::Fault::ProofDiffers { .. } => Fault::Proof,
            action::Fault::ResultDiffers { .. } => Fault::Result,
            action::Fault::UnexpectedMessage { .. } => Fault::UnexpectedMessage,
        };
        self.metrics.node.faults.of(label).inc();
    }

    /// Sets the part of this peer in coordinating the run.
    pub(super) fn anchor_role(&self, role: &AnchorRole) {
        self.coordinating(role.coordinator().is_some(), role.voters().len(), role.is_paused());
    }

    fn coordinating(&self, coordinates: bool, anchors: usize, log_paused: bool) {
        self.metrics.coordination.is_coordinator.set(coordinates.into());
        self.metrics.coordination.anchors.set(gauge(anchors as u64));
        self.metrics.coordination.log_paused.set(log_paused.into());
    }

    /// Sets the newest complete checkpoint.
    pub(crate) fn checkpoint_completed(&self, version: Step) {
        self.metrics.checkpoints.step.set(gauge(version.0));
        self.metrics.checkpoints.time.set(since_1970());
    }

    /// Counts a failed attempt to upload a checkpoint.
    pub(crate) fn upload_failed(&self) {
        self.metrics.checkpoints.upload_failures.inc();
    }

    /// Sets the scores of a checkpoint.
    pub(crate) fn scored(&self, version: u64, scores: &Scores) {
        let checkpoints = &self.metrics.checkpoints;
        checkpoints.scores.set(scores.iter().map(|(name, score)| (name.as_str(), *score)));
        checkpoints.scored_step.set(gauge(version));
    }

    /// Counts a checkpoint without scores.
    pub(crate) fn score_failed(&self) {
        self.metrics.checkpoints.score_failures.inc();
    }

    /// Counts a checkpoint that could not be archived.
    pub(crate) fn checkpoint_failed(&self) {
        self.metrics.checkpoints.failures.inc();
    }

    /// Counts an unusable message or file of a peer.
    pub(crate) fn refused(&self, reason: Refusal) {
        self.metrics.node.refused.of(reason).inc();
    }

    /// Counts a committed step.
    pub(crate) fn committed(&self, era: Era, report: &StepReport) {
        let run = &self.metrics.run;
        run.step.set(gauge(report.step.saturating_add(1)));
        run.era.set(era.0.into());
        run.steps.inc();
        run.last_commit.set(since_1970());
        run.tokens.inc_by(report.tokens);
        run.step_duration.observe(report.seconds);
        run.training_loss.set(report.loss);
        run.gradient_norm.set(report.gradient_norm);
        run.learning_rate.set(report.learning_rate);
        self.metrics.coordination.microbatches_duplicated.inc_by(report.duplicated);
        self.metrics.coordination.microbatches_replayed.inc_by(report.replayed);
        if let Some(loss) = report.held_out_loss {
            run.held_out_loss.set(loss);
        }
    }

    /// Counts a step that the run's guard found far out.
    pub(crate) fn outlier(&self, outlier: &Outlier) {
        let reason = match outlier {
            Outlier::NotFinite { .. } => OutlierReason::NotFinite,
            Outlier::Loss { .. } => OutlierReason::Loss,
            Outlier::GradientNorm { .. } => OutlierReason::GradientNorm,
        };
        self.metrics.run.outlier_steps.of(reason).inc();
    }

    /// Sets the membership.
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

    /// Sets the figures of the deaths that the run survives. A complete run has nothing to lose.
    pub(crate) fn survival(&self, survival: Option<&SurvivalStatus>) {
        let run = &self.metrics.run;
        let Some(survival) = survival else {
            run.single_replica_stages.set(0);
            return run.work_at_risk.set(0.0);
        };
        run.single_replica_stages.set(gauge(survival.single_replica_stages.len() as u64));
        run.spare_anchors.set(gauge(survival.spare_anchors as u64));
        run.work_at_risk.set(survival.seconds_at_risk.unwrap_or(f64::NAN));
    }

    /// Sets the load of the peer.
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

    /// Counts traffic, and observes round trips and rates of the connections once a second.
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
        MoveReason::Span => MoveCause::Span,
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
