//! What the driver tells Prometheus.

use std::time::{Duration, Instant};

use shoal_metrics::{Direction, LinkPacking, Metrics, Queue, Refusal, TrafficKind};
use shoal_protocol::manifest::Manifest;
use shoal_protocol::message::View;
use shoal_protocol::net::transport::{Flow, Traffic, Transport};
use shoal_scheduler::action::{CoordinatorEvent, PeerLoad, TaskResult};

use super::payload::LogUse;
use crate::events::StepReport;

/// How often the connections are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The metrics of this process, and what was counted before.
#[derive(Debug)]
pub(crate) struct Meters {
    metrics: Metrics,
    traffic: Traffic,
    spill_failures: u64,
    looked: Option<Instant>,
}

impl Meters {
    pub(crate) fn new(metrics: Metrics) -> Self {
        Self { metrics, traffic: Traffic::default(), spill_failures: 0, looked: None }
    }

    /// The engine finished a task.
    pub(crate) fn computed(&self, result: &TaskResult, busy: Duration) {
        self.metrics.compute_busy.inc_by(busy.as_secs_f64());
        if matches!(result, TaskResult::NotStored { .. }) {
            self.metrics.checkpoint_failures.inc();
        }
        let direction = match result {
            TaskResult::Forwarded { .. } => Direction::Forward,
            TaskResult::Returned { .. } => Direction::Backward,
            TaskResult::NotRestored { .. } => return self.refused(Refusal::Checkpoint),
            _ => return,
        };
        self.metrics.microbatches.of(direction).inc();
    }

    /// Something befell the run that this peer keeps.
    pub(crate) fn befell(&self, event: &CoordinatorEvent) {
        match event {
            CoordinatorEvent::Lost { .. } => self.metrics.members_lost.inc(),
            CoordinatorEvent::ClaimRefused { .. } => self.refused(Refusal::Claim),
            CoordinatorEvent::Recalled { .. } => self.metrics.claims_recalled.inc(),
            CoordinatorEvent::RoundsAborted { rounds, .. } => {
                self.metrics.rounds_aborted.inc_by(*rounds as u64);
            }
            CoordinatorEvent::TookOver { .. } => self.metrics.terms.inc(),
            CoordinatorEvent::Rewound { .. } => self.metrics.rewinds.inc(),
            CoordinatorEvent::CheckpointAbandoned { .. } => self.metrics.checkpoint_failures.inc(),
            _ => {}
        }
    }

    /// A checkpoint could not be brought together here.
    pub(crate) fn checkpoint_failed(&self) {
        self.metrics.checkpoint_failures.inc();
    }

    /// Something that a peer sent is not used.
    pub(crate) fn refused(&self, reason: Refusal) {
        self.metrics.refused.of(reason).inc();
    }

    /// A step is committed.
    pub(crate) fn committed(&self, report: &StepReport, manifest: &Manifest) {
        let metrics = &self.metrics;
        metrics.step.set(gauge(report.step.saturating_add(1)));
        metrics.steps.inc();
        metrics.tokens.inc_by(report.tokens);
        metrics.step_duration.observe(report.seconds);
        metrics.training_loss.set(report.loss);
        metrics.gradient_norm.set(report.gradient_norm);
        let step = shoal_protocol::ids::Step(report.step);
        metrics.learning_rate.set(shoal_engine::learning_rate(manifest, step));
        metrics.microbatches_duplicated.inc_by(report.duplicated);
        metrics.microbatches_replayed.inc_by(report.replayed);
        if let Some(loss) = report.held_out_loss {
            metrics.held_out_loss.set(loss);
        }
    }

    /// The membership changed.
    pub(crate) fn members(&self, view: &View, manifest: &Manifest) {
        self.metrics.set_peers(
            manifest.stages().map(|stage| {
                view.members.iter().filter(|record| record.span.contains(stage)).count()
            }),
        );
    }

    /// What the peer holds now.
    pub(crate) fn load(&mut self, load: &PeerLoad, log: LogUse) {
        let metrics = &self.metrics;
        let queue = |queue: Queue, length: usize| {
            metrics.queue_length.of(queue).set(gauge(length as u64));
        };
        queue(Queue::Accepted, load.accepted.values().sum());
        queue(Queue::Offers, load.waiting.values().sum());
        queue(Queue::Compute, load.computing);
        metrics.in_flight_bytes.set(gauge(load.in_flight.0));
        metrics.output_log.bytes.set(gauge(load.logged.0));
        metrics.output_log.disk_bytes.set(gauge(log.on_disk.0));
        metrics.output_log.spill_failures.inc_by(log.failures - self.spill_failures);
        self.spill_failures = log.failures;
    }

    /// What went over the links so far, and now and then what the connections show.
    pub(crate) fn links(&mut self, transport: &Transport) {
        let metrics = &self.metrics;
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY) {
            self.looked = Some(Instant::now());
            for way in transport.ways() {
                metrics.links.rtt.observe(way.round_trip.as_secs_f64());
                metrics.links.congestion_window.observe(way.window.0 as f64);
            }
        }
        let traffic = transport.traffic();
        let (packets, before) = (traffic.packets, self.traffic.packets);
        metrics.links.sent_packets.inc_by(packets.sent - before.sent);
        metrics.links.lost_packets.inc_by(packets.lost - before.lost);
        metrics.links.lost_bytes.inc_by((packets.lost_bytes - before.lost_bytes).0);
        let (pieces, before) = (traffic.pieces, self.traffic.pieces);
        metrics.links.pieces.of(LinkPacking::None).inc_by(pieces.raw - before.raw);
        metrics.links.pieces.of(LinkPacking::Zstd).inc_by(pieces.zstd - before.zstd);
        let count = |kind: TrafficKind, now: Flow, before: Flow| {
            metrics.sent_bytes.of(kind).inc_by((now.sent - before.sent).0);
            metrics.received_bytes.of(kind).inc_by((now.received - before.received).0);
        };
        count(TrafficKind::Control, traffic.control, self.traffic.control);
        count(TrafficKind::Tensor, traffic.tensor, self.traffic.tensor);
        count(TrafficKind::Blob, traffic.blob, self.traffic.blob);
        count(TrafficKind::Relay, traffic.relay, self.traffic.relay);
        let wrong_files = traffic.wrong_files - self.traffic.wrong_files;
        metrics.refused.of(Refusal::File).inc_by(wrong_files);
        self.traffic = traffic;
    }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
