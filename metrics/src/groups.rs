//! Every metric of a peer, by what it is about. What is said of the whole run is the same at every
//! peer, but for what only the one knows that keeps the run.

use prometheus::{Counter, Gauge, Histogram, IntCounter, IntGauge};

use crate::by_stage::{Hosted, StagePeers};
use crate::family::Family;
use crate::labels::{
    Direction, Fault, LinkPacking, MoveCause, NodeState, Path, Phase, PortState, Preemption, Queue,
    Refusal, RefusedConnection, Repeat, RoundFailure, Severity, Swap, TrafficKind,
};
use crate::table::group;

group! {
    /// How far the run is, as its commits say.
    pub struct Run {
        /// Step that this peer works on.
        step: IntGauge = "shoal_step";
        /// Steps that the run is to have.
        planned_steps: IntGauge = "shoal_planned_steps";
        /// Committed steps.
        steps: IntCounter = "shoal_steps_total";
        /// When the newest step was committed, in seconds since 1970.
        last_commit: Gauge = "shoal_last_commit_timestamp_seconds";
        /// Time from one commit to the next.
        step_duration: Histogram = "shoal_step_duration_seconds" from 0.125;
        /// Tokens that committed steps trained on.
        tokens: IntCounter = "shoal_tokens_total";
        /// Mean training loss of the newest step, in nats per token.
        training_loss: Gauge = "shoal_training_loss";
        /// Newest mean loss on the held-out text, in nats per token.
        held_out_loss: Gauge = "shoal_held_out_loss";
        /// Norm of the newest step's gradient over all stages, before clipping.
        gradient_norm: Gauge = "shoal_gradient_norm";
        /// Learning rate of the newest step.
        learning_rate: Gauge = "shoal_learning_rate";
        /// Era of the newest step: how often the run went back to a checkpoint.
        era: IntGauge = "shoal_era";
        /// Members of the run.
        members: IntGauge = "shoal_members";
        /// Members that host a pipeline stage.
        peers: StagePeers = "shoal_peers";
    }
}

group! {
    /// What only the peer knows that keeps the run. Elsewhere these stay as they are.
    pub struct Coordination {
        /// Whether this peer keeps the run.
        is_coordinator: IntGauge = "shoal_is_coordinator";
        /// Terms in which this peer kept the run.
        terms: IntCounter = "shoal_terms_total";
        /// Peers that keep the run's log, as this anchor knows.
        anchors: IntGauge = "shoal_anchors";
        /// Whether too few of the peers that keep the run's log answer this anchor.
        log_paused: IntGauge = "shoal_log_paused";
        /// Candidates that were not admitted.
        candidates_refused: IntCounter = "shoal_candidates_refused_total";
        /// Members that the run lost, or that left.
        members_lost: IntCounter = "shoal_members_lost_total";
        /// From a member's loss to the next commit.
        recovery_duration: Histogram = "shoal_recovery_duration_seconds" from 0.125;
        /// Returns of the whole run to a checkpoint.
        rewinds: IntCounter = "shoal_rewinds_total";
        /// Members that were to change their stage, by why.
        moves_begun: Family<MoveCause, IntCounter> = "shoal_moves_begun_total";
        /// Members that did, or will from a step on that is decided.
        moves_done: Family<MoveCause, IntCounter> = "shoal_moves_done_total";
        /// Members that did not: they are needed where they are, or gone, or the run went back.
        moves_given_up: Family<MoveCause, IntCounter> = "shoal_moves_given_up_total";
        /// Late claims that their holders let go of when asked.
        claims_reclaimed: IntCounter = "shoal_claims_reclaimed_total";
        /// Tokens whose work was thrown away and done again; of what one stage does for a token, the
        /// part that this stage is of all.
        tokens_repeated: Family<Repeat, Counter> = "shoal_tokens_repeated_total";
        /// Work on a stage's microbatch that was taken back from peers who were gone.
        microbatches_replayed: IntCounter = "shoal_microbatches_replayed_total";
        /// Done reports that came again in the swarm and were counted once.
        microbatches_duplicated: IntCounter = "shoal_microbatches_duplicated_total";
        /// All-reduces of a stage that a commit named.
        rounds: IntCounter = "shoal_rounds_total";
        /// All-reduces that came to nothing and were tried again.
        rounds_failed: Family<RoundFailure, IntCounter> = "shoal_rounds_failed_total";
        /// All-reduces that went on without members that were lost, with what there was of them.
        rounds_mended: IntCounter = "shoal_rounds_mended_total";
        /// From when every microbatch of a step was done until every replica had its gradient.
        all_reduce_duration: Histogram = "shoal_all_reduce_duration_seconds" from 0.001;
    }
}

group! {
    /// What this peer is, and what it does.
    pub struct Node {
        /// What this peer is doing: 1 for the state that it is in.
        state: Family<NodeState, IntGauge> = "shoal_node_state";
        /// How this peer's own UDP port stands to those whom it never sent to: 1 for what it is.
        own_port: Family<PortState, IntGauge> = "shoal_own_port";
        /// Whether this peer hosts a pipeline stage.
        hosted: Hosted = "shoal_stage_hosted";
        /// From the start of a life in the run until it serves.
        join_duration: Histogram = "shoal_join_duration_seconds" from 0.125;
        /// Things that wait at this peer.
        queue_length: Family<Queue, IntGauge> = "shoal_queue_length";
        /// Microbatches that this peer computed, once for each of its stages.
        microbatches: Family<Direction, IntCounter> = "shoal_microbatches_computed_total";
        /// Floating-point operations that the model asks for in those; what is recomputed is not
        /// counted.
        flops: Counter = "shoal_flops_total";
        /// Floating-point operations per second of this peer's device in a product of large matrices,
        /// measured when it started.
        peak_flops: Gauge = "shoal_peak_flops_per_second";
        /// Time that this peer's engine was at work.
        compute_busy: Counter = "shoal_compute_busy_seconds_total";
        /// Time that one task of this peer's engine took.
        phase_duration: Family<Phase, Histogram> = "shoal_phase_duration_seconds" from 0.001;
        /// How often this peer was told to leave in order, by what told it.
        preemptions: Family<Preemption, IntCounter> = "shoal_preemptions_total";
        /// What peers sent and this one did not use.
        refused: Family<Refusal, IntCounter> = "shoal_refused_total";
        /// Warnings and errors that this peer logged, those that were not to be shown included.
        logged: Family<Severity, IntCounter> = "shoal_log_messages_total";
        /// What this peer found that must not be.
        faults: Family<Fault, IntCounter> = "shoal_faults_total";
    }
}

group! {
    /// The memory of this peer, and what is in it.
    pub struct Memory {
        /// Memory that this peer may use for its stages, libtorch itself not counted.
        limit_bytes: Gauge = "shoal_memory_limit_bytes";
        /// Memory that the hosted stages take with a full output log and one microbatch in flight.
        needed_bytes: Gauge = "shoal_memory_needed_bytes";
        /// Activations and gradients that wait or are in use.
        in_flight_bytes: IntGauge = "shoal_in_flight_bytes";
        /// Output logs of the open steps.
        log_bytes: IntGauge = "shoal_output_log_bytes";
        /// What of output logs may be in memory; the rest is on the disk.
        log_limit_bytes: Gauge = "shoal_output_log_limit_bytes";
        /// Output logs of the open steps that are on the disk.
        log_disk_bytes: IntGauge = "shoal_output_log_disk_bytes";
        /// Parts of output logs that the disk did not take, which stay in memory.
        spill_failures: IntCounter = "shoal_spill_failures_total";
    }
}

group! {
    /// The machine, looked at when it is asked for. What is of the device is NaN where NVML knows none.
    pub struct Machine {
        /// Memory of the machine, or of the container if that has less.
        memory_bytes: Gauge = "shoal_host_memory_bytes";
        /// What of it could still be given out.
        memory_available_bytes: Gauge = "shoal_host_memory_available_bytes";
        /// Memory of the machine that was moved to or from the disk since it started.
        swapped_bytes: Family<Swap, IntCounter> = "shoal_host_swapped_bytes_total";
        /// Memory of the device.
        device_memory_bytes: Gauge = "shoal_device_memory_bytes";
        /// What of it is in use, by whomever.
        device_memory_used_bytes: Gauge = "shoal_device_memory_used_bytes";
        /// Part of the time in which the device had something to do, lately.
        device_utilization: Gauge = "shoal_device_utilization_ratio";
        /// What the device takes in, in watts.
        device_power: Gauge = "shoal_device_power_watts";
        /// How hot the device is.
        device_temperature: Gauge = "shoal_device_temperature_celsius";
    }
}

group! {
    /// The connections to other peers, and what went over them.
    pub struct Links {
        /// Connections to other peers, by how they lead there.
        connections: Family<Path, IntGauge> = "shoal_connections";
        /// Connections that were refused before anything was said on them.
        turned: Family<RefusedConnection, IntCounter> = "shoal_connections_refused_total";
        /// Smoothed round trip of the connections to other peers, each looked at every second.
        rtt: Histogram = "shoal_link_rtt_seconds" from 0.000_125;
        /// What other members take of tensors, as measured, each looked at every second.
        rate: Histogram = "shoal_link_rate_bytes_per_second" from 131_072.0;
        /// What may be on its way on a connection at once, each looked at every second.
        congestion_window: Histogram = "shoal_link_congestion_window_bytes" from 16_384.0;
        /// Bytes sent to other peers.
        sent_bytes: Family<TrafficKind, IntCounter> = "shoal_sent_bytes_total";
        /// Bytes received from other peers.
        received_bytes: Family<TrafficKind, IntCounter> = "shoal_received_bytes_total";
        /// Tensors sent to other peers, by how they were packed for the link.
        tensors: Family<LinkPacking, IntCounter> = "shoal_tensors_sent_total";
        /// Bytes of tensors sent to other peers, before they were packed.
        unpacked_bytes: Family<LinkPacking, IntCounter> = "shoal_unpacked_bytes_total";
        /// Bytes of tensors sent to other peers, as they were packed.
        packed_bytes: Family<LinkPacking, IntCounter> = "shoal_packed_bytes_total";
        /// Pieces of files sent to other peers, by how they were packed for the link.
        pieces: Family<LinkPacking, IntCounter> = "shoal_pieces_sent_total";
        /// QUIC packets sent.
        sent_packets: IntCounter = "shoal_link_packets_total";
        /// QUIC packets sent and taken for lost.
        lost_packets: IntCounter = "shoal_link_lost_packets_total";
        /// Bytes of QUIC packets taken for lost, nearly all of them sent a second time.
        lost_bytes: IntCounter = "shoal_link_lost_bytes_total";
    }
}

group! {
    /// Checkpoints.
    pub struct Checkpoints {
        /// Steps from one checkpoint to the next; 0 where only the end is one.
        interval: IntGauge = "shoal_checkpoint_interval_steps";
        /// Version of the newest complete checkpoint that this peer was told of.
        step: IntGauge = "shoal_checkpoint_step";
        /// When this peer was told of it, in seconds since 1970.
        time: Gauge = "shoal_last_checkpoint_timestamp_seconds";
        /// Time that this peer took to write one stage of a checkpoint or snapshot.
        write_duration: Histogram = "shoal_checkpoint_write_duration_seconds" from 0.001;
        /// Parts of checkpoints not written, and checkpoints not brought together.
        failures: IntCounter = "shoal_checkpoint_failures_total";
    }
}
