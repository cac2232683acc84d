//! All metrics of a peer, in groups. Metrics of the whole run have the same value at every peer,
//! except those that only the coordinator knows.

use prometheus::{Counter, Gauge, Histogram, IntCounter, IntGauge};

use crate::by_device::{OfDevices, TensorMemory};
use crate::by_name::ByName;
use crate::by_stage::{Hosted, OfStages, StagePeers};
use crate::family::Family;
use crate::labels::{
    AuditResult, Direction, Fault, LinkPacking, MoveCause, NodeState, OutlierReason, Path, Phase,
    PortState, Preemption, Queue, Refusal, RefusedConnection, Repeat, RoundFailure, Severity, Swap,
    TrafficKind,
};
use crate::peer_info::PeerInfo;
use crate::table::group;

group! {
    /// Progress of the run, from its commits.
    pub struct Run {
        /// Number of the newest committed step.
        step: IntGauge = "shoal_step";
        /// Planned number of steps of the run.
        planned_steps: IntGauge = "shoal_planned_steps";
        /// Committed steps.
        steps: IntCounter = "shoal_steps_total";
        /// Time of the newest commit, in seconds since 1970.
        last_commit: Gauge = "shoal_last_commit_timestamp_seconds";
        /// Time between two commits.
        step_duration: Histogram = "shoal_step_duration_seconds" from 0.125;
        /// Tokens of all committed steps.
        tokens: IntCounter = "shoal_tokens_total";
        /// Mean training loss of the newest step, in nats per token.
        training_loss: Gauge = "shoal_training_loss";
        /// Mean loss of the newest evaluation on the held-out text, in nats per token.
        held_out_loss: Gauge = "shoal_held_out_loss";
        /// Norm of the newest step's gradient over all stages, before clipping.
        gradient_norm: Gauge = "shoal_gradient_norm";
        /// Steps that the run's guard found far out, and skipped or gave a lower rate.
        outlier_steps: Family<OutlierReason, IntCounter> = "shoal_outlier_steps_total";
        /// Learning rate of the newest step.
        learning_rate: Gauge = "shoal_learning_rate";
        /// Era of the newest step. It grows with each return to a checkpoint.
        era: IntGauge = "shoal_era";
        /// Members of the run.
        members: IntGauge = "shoal_members";
        /// Pipeline stages that one member serves. Its death sends the run back to the newest checkpoint.
        single_replica_stages: IntGauge = "shoal_single_replica_stages";
        /// Anchors that may die before the run pauses.
        spare_anchors: IntGauge = "shoal_spare_anchors";
        /// Duration of the steps since the newest complete checkpoint, which are lost if all peers die.
        work_at_risk: Gauge = "shoal_work_at_risk_seconds";
        /// Members that host a pipeline stage.
        peers: StagePeers = "shoal_peers";
    }
}

group! {
    /// Metrics of the coordinator. On other peers they do not change.
    pub struct Coordination {
        /// Whether this peer is the coordinator: 1 if it is.
        is_coordinator: IntGauge = "shoal_is_coordinator";
        /// Terms of this peer as coordinator.
        terms: IntCounter = "shoal_terms_total";
        /// Anchors (replicas of the run's log) that this anchor knows.
        anchors: IntGauge = "shoal_anchors";
        /// Whether the log is paused because this anchor reaches no majority of the anchors: 1 if it
        /// is.
        log_paused: IntGauge = "shoal_log_paused";
        /// Candidates that were rejected.
        candidates_refused: IntCounter = "shoal_candidates_refused_total";
        /// Members that were lost or left.
        members_lost: IntCounter = "shoal_members_lost_total";
        /// Time from the loss of a member to the next commit.
        recovery_duration: Histogram = "shoal_recovery_duration_seconds" from 0.125;
        /// Returns of the run to a checkpoint.
        rewinds: IntCounter = "shoal_rewinds_total";
        /// Stage changes of members that were begun, by reason.
        moves_begun: Family<MoveCause, IntCounter> = "shoal_moves_begun_total";
        /// Stage changes that were completed, or whose first step is decided, by reason.
        moves_done: Family<MoveCause, IntCounter> = "shoal_moves_done_total";
        /// Stage changes that were cancelled, by reason of the change.
        moves_given_up: Family<MoveCause, IntCounter> = "shoal_moves_given_up_total";
        /// Audits of members' work at a stage in a step, by result.
        audits: Family<AuditResult, IntCounter> = "shoal_audits_total";
        /// Overdue claims that their holders released on request.
        claims_reclaimed: IntCounter = "shoal_claims_reclaimed_total";
        /// Tokens whose work was discarded and repeated. The work of one stage for a token counts as
        /// that stage's share of all stages.
        tokens_repeated: Family<Repeat, Counter> = "shoal_tokens_repeated_total";
        /// Claims on a stage's microbatch that were revoked from lost members.
        microbatches_replayed: IntCounter = "shoal_microbatches_replayed_total";
        /// Completion reports that arrived more than once and were counted once.
        microbatches_duplicated: IntCounter = "shoal_microbatches_duplicated_total";
        /// Committed all-reduces of a stage.
        rounds: IntCounter = "shoal_rounds_total";
        /// All-reduces that failed and were retried.
        rounds_failed: Family<RoundFailure, IntCounter> = "shoal_rounds_failed_total";
        /// All-reduces that continued after the loss of members.
        rounds_mended: IntCounter = "shoal_rounds_mended_total";
        /// Time from the last microbatch of a step until every replica has the gradient.
        all_reduce_duration: Histogram = "shoal_all_reduce_duration_seconds" from 0.001;
    }
}

group! {
    /// State and activity of this peer.
    pub struct Node {
        /// Always 1; the labels hold the name of this peer, the end of its id, the island of peers that it is in, and the
        /// model of its GPUs or processor.
        info: PeerInfo = "shoal_peer_info";
        /// State of this peer: 1 for the present state.
        state: Family<NodeState, IntGauge> = "shoal_node_state";
        /// Reachability of this peer's own UDP port for unsolicited packets: 1 for the present
        /// state.
        own_port: Family<PortState, IntGauge> = "shoal_own_port";
        /// Whether this peer hosts a pipeline stage: 1 if it does.
        hosted: Hosted = "shoal_stage_hosted";
        /// Time from the start of an incarnation until it serves in the run.
        join_duration: Histogram = "shoal_join_duration_seconds" from 0.125;
        /// Length of a queue of this peer.
        queue_length: Family<Queue, IntGauge> = "shoal_queue_length";
        /// Microbatches that this peer computed, counted once for each of its stages.
        microbatches: Family<Direction, IntCounter> = "shoal_microbatches_computed_total";
        /// Floating-point operations that the model requires for them; recomputation does not
        /// count.
        flops: Counter = "shoal_flops_total";
        /// Floating-point operations per second of this peer's device in a product of large
        /// matrices, measured at the start.
        peak_flops: Gauge = "shoal_peak_flops_per_second";
        /// Time that this peer's engine was busy; of several devices the mean.
        compute_busy: Counter = "shoal_compute_busy_seconds_total";
        /// Tokens of the busiest expert over the mean of its layer's experts, in this peer's training passes between the two
        /// newest updates of a stage: of the layer where that is most. 1 is balance. Stages without experts have none.
        expert_load: OfStages = "shoal_expert_load";
        /// Mean entropy of the routers' shares of the experts in those passes, in nats: at most the logarithm of the number
        /// of experts.
        router_entropy: OfStages = "shoal_router_entropy";
        /// Duration of a task of this peer's engine.
        phase_duration: Family<Phase, Histogram> = "shoal_phase_duration_seconds" from 0.001;
        /// Requests to this peer to leave in order, by source.
        preemptions: Family<Preemption, IntCounter> = "shoal_preemptions_total";
        /// Messages and data from other peers that this peer rejected.
        refused: Family<Refusal, IntCounter> = "shoal_refused_total";
        /// Warnings and errors that this peer logged, including those below the visible level.
        logged: Family<Severity, IntCounter> = "shoal_log_messages_total";
        /// Violated invariants that this peer detected.
        faults: Family<Fault, IntCounter> = "shoal_faults_total";
    }
}

group! {
    /// Memory of this peer and its use.
    pub struct Memory {
        /// Memory that this peer may use for its stages, without libtorch itself.
        limit_bytes: Gauge = "shoal_memory_limit_bytes";
        /// Memory that the hosted stages need with a full output log and one microbatch in flight.
        needed_bytes: Gauge = "shoal_memory_needed_bytes";
        /// Memory of the stages' tensors after the newest update, and the most that images took, by device; what several devices
        /// share counts for the first.
        tensor_bytes: TensorMemory = "shoal_tensor_memory_bytes";
        /// Bytes of activations and gradients that wait or are in use.
        in_flight_bytes: IntGauge = "shoal_in_flight_bytes";
        /// Bytes of the output logs of the open steps.
        log_bytes: IntGauge = "shoal_output_log_bytes";
        /// Limit of the output logs in memory; the rest is on disk.
        log_limit_bytes: Gauge = "shoal_output_log_limit_bytes";
        /// Bytes of the output logs of the open steps on disk.
        log_disk_bytes: IntGauge = "shoal_output_log_disk_bytes";
        /// Bytes of swapped stages that this peer read from its disk or wrote to it.
        stage_swap_bytes: Family<Swap, IntCounter> = "shoal_stage_swap_bytes_total";
        /// Time that this peer's engine waited for tensors of swapped stages.
        stage_swap_wait: Counter = "shoal_stage_swap_wait_seconds_total";
        /// Bytes of weights that this peer copied to its device for passes.
        stage_copy_bytes: IntCounter = "shoal_stage_copy_bytes_total";
        /// Bytes among them that were not there yet when a pass needed them.
        stage_copy_late_bytes: IntCounter = "shoal_stage_copy_late_bytes_total";
        /// Parts of output logs that could not be written to disk and stay in memory.
        spill_failures: IntCounter = "shoal_spill_failures_total";
    }
}

group! {
    /// Metrics of the machine, read at each scrape. Those of devices are NaN without NVML.
    pub struct Machine {
        /// Memory of the machine, or the limit of the container if that is lower.
        memory_bytes: Gauge = "shoal_host_memory_bytes";
        /// Memory of the machine or container that is available.
        memory_available_bytes: Gauge = "shoal_host_memory_available_bytes";
        /// Memory that the machine swapped in or out since its start.
        swapped_bytes: Family<Swap, IntCounter> = "shoal_host_swapped_bytes_total";
        /// Size of the file system of this peer's data directory.
        disk_bytes: Gauge = "shoal_disk_bytes";
        /// Free part of the file system of this peer's data directory.
        disk_available_bytes: Gauge = "shoal_disk_available_bytes";
        /// Memory of each device of this peer.
        device_memory_bytes: OfDevices = "shoal_device_memory_bytes";
        /// Memory of the device in use, by all processes.
        device_memory_used_bytes: OfDevices = "shoal_device_memory_used_bytes";
        /// Recent fraction of the time that the device was busy.
        device_utilization: OfDevices = "shoal_device_utilization_ratio";
        /// Power consumption of the device, in watts.
        device_power: OfDevices = "shoal_device_power_watts";
        /// Temperature of the device, in degrees Celsius.
        device_temperature: OfDevices = "shoal_device_temperature_celsius";
    }
}

group! {
    /// Connections to other peers and their traffic.
    pub struct Links {
        /// Connections to other peers, by path.
        connections: Family<Path, IntGauge> = "shoal_connections";
        /// Connections that were refused before any message.
        turned: Family<RefusedConnection, IntCounter> = "shoal_connections_refused_total";
        /// Smoothed round-trip time of the connections to other peers, sampled every second.
        rtt: Histogram = "shoal_link_rtt_seconds" from 0.000_125;
        /// Measured rate of tensors to other members, sampled every second.
        rate: Histogram = "shoal_link_rate_bytes_per_second" from 131_072.0;
        /// Congestion window of a connection, sampled every second.
        congestion_window: Histogram = "shoal_link_congestion_window_bytes" from 16_384.0;
        /// Bytes sent to other peers.
        sent_bytes: Family<TrafficKind, IntCounter> = "shoal_sent_bytes_total";
        /// Bytes received from other peers.
        received_bytes: Family<TrafficKind, IntCounter> = "shoal_received_bytes_total";
        /// Tensors sent to other peers, by packing.
        tensors: Family<LinkPacking, IntCounter> = "shoal_tensors_sent_total";
        /// Bytes of tensors sent to other peers, before packing.
        unpacked_bytes: Family<LinkPacking, IntCounter> = "shoal_unpacked_bytes_total";
        /// Bytes of tensors sent to other peers, after packing.
        packed_bytes: Family<LinkPacking, IntCounter> = "shoal_packed_bytes_total";
        /// Pieces of files sent to other peers, by packing.
        pieces: Family<LinkPacking, IntCounter> = "shoal_pieces_sent_total";
        /// QUIC packets sent.
        sent_packets: IntCounter = "shoal_link_packets_total";
        /// QUIC packets sent and declared lost.
        lost_packets: IntCounter = "shoal_link_lost_packets_total";
        /// Bytes of QUIC packets declared lost, nearly all of which were sent again.
        lost_bytes: IntCounter = "shoal_link_lost_bytes_total";
    }
}

group! {
    /// Checkpoints of the run.
    pub struct Checkpoints {
        /// Steps between checkpoints; 0 if there is only one at the end.
        interval: IntGauge = "shoal_checkpoint_interval_steps";
        /// Version of the newest complete checkpoint that this peer knows.
        step: IntGauge = "shoal_checkpoint_step";
        /// Time when this peer learned of the newest complete checkpoint, in seconds since 1970.
        time: Gauge = "shoal_last_checkpoint_timestamp_seconds";
        /// Time to write one stage of a checkpoint or snapshot on this peer.
        write_duration: Histogram = "shoal_checkpoint_write_duration_seconds" from 0.001;
        /// Parts of checkpoints that were not written, and checkpoints that were not assembled.
        failures: IntCounter = "shoal_checkpoint_failures_total";
        /// Failed attempts to upload a checkpoint to the bucket of this peer.
        upload_failures: IntCounter = "shoal_checkpoint_upload_failures_total";
        /// Scores of the newest checkpoint that this peer scored with the command of `--on-checkpoint`, by their name.
        scores: ByName = "shoal_checkpoint_score";
        /// Version of that checkpoint.
        scored_step: IntGauge = "shoal_checkpoint_scored_step";
        /// Checkpoints for which that command gave no scores.
        score_failures: IntCounter = "shoal_checkpoint_score_failures_total";
    }
}
