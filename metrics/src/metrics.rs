//! The metrics and their registry.

use prometheus::{
    Counter, Gauge, Histogram, IntCounter, IntGauge, IntGaugeVec, Registry, TextEncoder,
};

use crate::family::Family;
use crate::labels::{Direction, LinkPacking, Queue, Refusal, TrafficKind};
use crate::registrar::Registrar;

/// Why there are no metrics.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// A metric's name or label is taken or misspelt.
    #[error("a metric cannot be registered: {0}; this is a bug, please report it")]
    Register(#[source] prometheus::Error),
    /// The metrics cannot be written as text.
    #[error("the metrics cannot be written as text: {0}; this is a bug, please report it")]
    Encode(#[source] prometheus::Error),
}

/// Every metric of a peer. All handles are cheap to clone and safe to use from any thread.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    /// The step that this peer works on.
    pub step: IntGauge,
    /// Steps that this peer saw committed.
    pub steps: IntCounter,
    /// Tokens that those steps trained on, in the whole swarm.
    pub tokens: IntCounter,
    /// From one commit to the next, in seconds.
    pub step_duration: Histogram,
    /// Mean training loss of the newest step, in nats per token; not a number before the first.
    pub training_loss: Gauge,
    /// Mean loss on the held-out text, in nats per token; not a number before the first.
    pub held_out_loss: Gauge,
    /// Norm of the newest step's gradient over all stages, before clipping; not a number before.
    pub gradient_norm: Gauge,
    /// Learning rate of the newest step.
    pub learning_rate: Gauge,
    /// Bytes that this peer sent.
    pub sent_bytes: Family<TrafficKind, IntCounter>,
    /// Bytes that this peer received.
    pub received_bytes: Family<TrafficKind, IntCounter>,
    /// Tensors sent to other peers.
    pub tensors: SentTensors,
    /// The connections to other peers.
    pub links: Links,
    /// What peers sent and this one did not use.
    pub refused: Family<Refusal, IntCounter>,
    /// Things that wait at this peer.
    pub queue_length: Family<Queue, IntGauge>,
    /// Activations and gradients that wait here or are in use, in bytes.
    pub in_flight_bytes: IntGauge,
    /// The output logs of this peer.
    pub output_log: OutputLog,
    /// Microbatches that this peer computed, once for each stage and direction.
    pub microbatches: Family<Direction, IntCounter>,
    /// Claims on a stage's microbatch that were taken back from peers who were gone, in the whole swarm.
    pub microbatches_replayed: IntCounter,
    /// Done reports that came again and were counted once, in the whole swarm.
    pub microbatches_duplicated: IntCounter,
    /// Late claims that their holders let go of when asked, where this peer keeps the run.
    pub claims_recalled: IntCounter,
    /// Members that were lost, where this peer keeps the run.
    pub members_lost: IntCounter,
    /// All-reduces that came to nothing and were tried again, where this peer keeps the run.
    pub rounds_aborted: IntCounter,
    /// Terms in which this peer kept the run.
    pub terms: IntCounter,
    /// Returns of the whole run to a checkpoint, where this peer keeps the run.
    pub rewinds: IntCounter,
    /// Parts of checkpoints that this peer could not write, and checkpoints that it could not bring
    /// together.
    pub checkpoint_failures: IntCounter,
    /// Time that this peer's engine was at work, in seconds.
    pub compute_busy: Counter,
    peers: IntGaugeVec,
}

/// What was sent and may be sent again.
#[derive(Debug, Clone)]
pub struct OutputLog {
    /// All of it, in bytes.
    pub bytes: IntGauge,
    /// What of it is on the disk, in bytes.
    pub disk_bytes: IntGauge,
    /// Parts of it that the disk did not take, which stay in memory.
    pub spill_failures: IntCounter,
}

impl OutputLog {
    fn register(r: &Registrar) -> prometheus::Result<Self> {
        Ok(Self {
            bytes: r.gauge("shoal_output_log_bytes", "Output logs of the open steps.")?,
            disk_bytes: r.gauge(
                "shoal_output_log_disk_bytes",
                "Output logs of the open steps that are on the disk.",
            )?,
            spill_failures: r.counter(
                "shoal_spill_failures_total",
                "Parts of output logs that the disk did not take, which stay in memory.",
            )?,
        })
    }
}

/// Tensors sent to other peers, by how they were packed for the link.
#[derive(Debug, Clone)]
pub struct SentTensors {
    /// How many.
    pub count: Family<LinkPacking, IntCounter>,
    /// Their bytes before they were packed.
    pub unpacked_bytes: Family<LinkPacking, IntCounter>,
}

impl SentTensors {
    fn register(r: &Registrar) -> prometheus::Result<Self> {
        Ok(Self {
            count: r.counters(
                "shoal_tensors_sent_total",
                "Tensors sent to other peers, by how they were packed for the link.",
            )?,
            unpacked_bytes: r.counters(
                "shoal_unpacked_bytes_total",
                "Bytes of tensors sent to other peers, before they were packed.",
            )?,
        })
    }
}

/// What the connections to other peers show of the ways there, and the files that went over them.
#[derive(Debug, Clone)]
pub struct Links {
    /// Smoothed round trip of each connection, in seconds, looked at again and again.
    pub rtt: Histogram,
    /// What may be on its way on each connection, in bytes, looked at again and again.
    pub congestion_window: Histogram,
    /// Pieces of files sent.
    pub pieces: Family<LinkPacking, IntCounter>,
    /// Packets sent.
    pub sent_packets: IntCounter,
    /// Packets taken for lost.
    pub lost_packets: IntCounter,
    /// Bytes of those, which are sent a second time.
    pub lost_bytes: IntCounter,
}

impl Links {
    fn register(r: &Registrar) -> prometheus::Result<Self> {
        Ok(Self {
            // An eighth of a millisecond to two seconds.
            rtt: r.doubling(
                "shoal_link_rtt_seconds",
                "Smoothed round trip of the connections to other peers, each looked at every second.",
                0.000_125,
            )?,
            // 16 KiB to 256 MiB.
            congestion_window: r.doubling(
                "shoal_link_congestion_window_bytes",
                "What may be on its way on a connection at once, each looked at every second.",
                16_384.0,
            )?,
            pieces: r.counters(
                "shoal_pieces_sent_total",
                "Pieces of files sent to other peers, by how they were packed for the link.",
            )?,
            sent_packets: r.counter("shoal_link_packets_total", "QUIC packets sent.")?,
            lost_packets: r
                .counter("shoal_link_lost_packets_total", "QUIC packets sent and taken for lost.")?,
            lost_bytes: r.counter(
                "shoal_link_lost_bytes_total",
                "Bytes of QUIC packets taken for lost, nearly all of them sent a second time.",
            )?,
        })
    }
}

impl Metrics {
    /// Every metric at its start, in a registry of their own.
    ///
    /// # Errors
    /// [`MetricsError::Register`] where two metrics clash, which is a bug.
    pub fn new() -> Result<Self, MetricsError> {
        Self::register().map_err(MetricsError::Register)
    }

    fn register() -> prometheus::Result<Self> {
        let r = Registrar::new()?;
        Ok(Self {
            step: r.gauge("shoal_step", "Step that this peer works on.")?,
            steps: r.counter("shoal_steps_total", "Committed steps.")?,
            tokens: r.counter("shoal_tokens_total", "Tokens that committed steps trained on.")?,
            step_duration: r
                .duration("shoal_step_duration_seconds", "Time from one commit to the next.")?,
            training_loss: r.unknown(
                "shoal_training_loss",
                "Mean training loss of the newest step, in nats per token.",
            )?,
            held_out_loss: r.unknown(
                "shoal_held_out_loss",
                "Newest mean loss on the held-out text, in nats per token.",
            )?,
            gradient_norm: r.unknown(
                "shoal_gradient_norm",
                "Norm of the newest step's gradient over all stages, before clipping.",
            )?,
            learning_rate: r.unknown("shoal_learning_rate", "Learning rate of the newest step.")?,
            sent_bytes: r.counters("shoal_sent_bytes_total", "Bytes sent to other peers.")?,
            received_bytes: r
                .counters("shoal_received_bytes_total", "Bytes received from other peers.")?,
            tensors: SentTensors::register(&r)?,
            links: Links::register(&r)?,
            refused: r.counters(
                "shoal_refused_total",
                "Messages and tensors from other peers that were not used.",
            )?,
            queue_length: r.gauges("shoal_queue_length", "Things that wait at this peer.")?,
            in_flight_bytes: r.gauge(
                "shoal_in_flight_bytes",
                "Activations and gradients that wait or are in use.",
            )?,
            output_log: OutputLog::register(&r)?,
            microbatches: r.counters(
                "shoal_microbatches_computed_total",
                "Microbatches that this peer computed, once for each of its stages.",
            )?,
            microbatches_replayed: r.counter(
                "shoal_microbatches_replayed_total",
                "Work on a stage's microbatch that was taken back from peers who were gone.",
            )?,
            microbatches_duplicated: r.counter(
                "shoal_microbatches_duplicated_total",
                "Done reports that came again in the swarm and were counted once.",
            )?,
            claims_recalled: r.counter(
                "shoal_claims_recalled_total",
                "Late claims that their holders let go of when asked.",
            )?,
            members_lost: r.counter("shoal_members_lost_total", "Members that the run lost.")?,
            rounds_aborted: r.counter(
                "shoal_rounds_aborted_total",
                "All-reduces that came to nothing and were tried again.",
            )?,
            terms: r.counter("shoal_terms_total", "Terms in which this peer kept the run.")?,
            rewinds: r
                .counter("shoal_rewinds_total", "Returns of the whole run to a checkpoint.")?,
            checkpoint_failures: r.counter(
                "shoal_checkpoint_failures_total",
                "Parts of checkpoints not written, and checkpoints not brought together.",
            )?,
            compute_busy: r.seconds(
                "shoal_compute_busy_seconds_total",
                "Time that this peer's engine was at work.",
            )?,
            peers: r.by_stage("shoal_peers", "Members that host a pipeline stage.")?,
            registry: r.into_registry(),
        })
    }

    /// Says how many members host each stage; the first number is that of stage 0.
    pub fn set_peers(&self, by_stage: impl IntoIterator<Item = usize>) {
        for (stage, peers) in by_stage.into_iter().enumerate() {
            let peers = i64::try_from(peers).unwrap_or(i64::MAX);
            self.peers.with_label_values(&[&stage.to_string()]).set(peers);
        }
    }

    /// Everything in Prometheus' text format, to be served as [`Self::CONTENT_TYPE`].
    ///
    /// # Errors
    /// [`MetricsError::Encode`] where a metric has no name or type, which is a bug.
    pub fn encode(&self) -> Result<String, MetricsError> {
        TextEncoder::new().encode_to_string(&self.registry.gather()).map_err(MetricsError::Encode)
    }

    /// The content type of what [`Self::encode`] gives.
    pub const CONTENT_TYPE: &'static str = prometheus::TEXT_FORMAT;
}
