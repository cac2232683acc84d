//! Typed events of a run. The progress view, the report, the metrics and the tests read these;
//! nothing parses a log.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use shoal_engine::SwapStats;
use shoal_formats::open_step::OpenStep;
use shoal_formats::own_port::OwnPort;
use shoal_formats::scores::Scores;
use shoal_protocol::ids::{ContentHash, PeerId, RunId, StageSpan};
use shoal_protocol::message::MoveReason;
use shoal_protocol::plain_name::PeerName;

/// An event that this process observed. `--events` writes each one as a line of JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// The process takes part in a run.
    Started {
        /// The run's identifier.
        run: RunId,
        /// Seed of the initial weights and of the order of samples.
        seed: u64,
        /// Pipeline stages.
        stages: u16,
        /// Optimizer updates in the run.
        steps: u64,
        /// Tokens that one step trains on.
        tokens_per_step: u64,
        /// Microbatches that one step trains on; with virtual workers, these.
        microbatches: u32,
        /// Steps that each virtual worker makes in one step of the run, if there are workers.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        worker_steps: Option<u32>,
    },
    /// Other peers can join at this address.
    Listening {
        /// The address of this peer.
        address: String,
    },
    /// The run waits for more peers.
    Waiting {
        /// Stages without a replica.
        stages: Vec<u16>,
        /// Members still missing of the number that was asked for.
        members: usize,
    },
    /// A peer became a member.
    Admitted {
        /// The new member.
        peer: PeerId,
        /// Its name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<PeerName>,
        /// The stages that it hosts.
        span: StageSpan,
    },
    /// This process became a member.
    Joined {
        /// The stages that it hosts.
        span: StageSpan,
    },
    /// The coordinator asked a peer to host other stages. The peer first fetches the state of those that it lacks.
    MoveBegun {
        /// The peer that moves.
        peer: PeerId,
        /// Its name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<PeerName>,
        /// The stages that it hosts.
        from: StageSpan,
        /// The stages that it is to host.
        to: StageSpan,
        /// Why the coordinator moves it.
        reason: MoveReason,
    },
    /// A peer changes its stages at a step that is fixed.
    Moves {
        /// The peer that moves.
        peer: PeerId,
        /// Its name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<PeerName>,
        /// The stages that it hosts before the step.
        from: StageSpan,
        /// The stages that it hosts from the step on.
        to: StageSpan,
        /// The first step there.
        step: u64,
        /// Why the coordinator moves it.
        reason: MoveReason,
    },
    /// A move that had begun is cancelled.
    MoveCancelled {
        /// The peer that stays.
        peer: PeerId,
        /// Its name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<PeerName>,
        /// The stages that it was to host.
        to: StageSpan,
        /// Why it was to move.
        reason: MoveReason,
        /// Why the move is cancelled.
        obstacle: String,
    },
    /// A peer's work was wrong: it is out, and the run goes back to before its work.
    Convicted {
        /// The peer.
        peer: PeerId,
        /// Its name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<PeerName>,
        /// The step of the work.
        step: u64,
        /// The stage of the work.
        stage: u16,
        /// The version that the run goes back to, or further.
        back: u64,
        /// What it did.
        charge: String,
    },
    /// This process hosts other stages.
    Moved {
        /// The stages that it hosted before.
        from: StageSpan,
        /// The stages that it hosts.
        to: StageSpan,
        /// The first step there.
        step: u64,
    },
    /// This process has fetched the weights and takes part in steps.
    Serving {
        /// The version of the weights.
        version: u64,
    },
    /// A step takes long: how far this process is in it.
    LongStep(OpenStep),
    /// A step is committed.
    Committed(StepReport),
    /// A checkpoint is complete.
    Checkpoint {
        /// The version of the weights.
        version: u64,
        /// The checkpoint's folder.
        directory: String,
        /// Hash of the weights.
        hash: ContentHash,
    },
    /// The command of `--on-checkpoint` printed numbers about a checkpoint.
    Scored {
        /// The version of the weights.
        version: u64,
        /// The numbers, by name.
        scores: Scores,
        /// Seconds that the command took.
        seconds: f64,
    },
    /// The command of `--on-checkpoint` gave no numbers for a checkpoint. The run goes on, and so do later scores.
    ScoreFailed {
        /// The version of the weights.
        version: u64,
        /// The reason.
        reason: String,
    },
    /// The run's guard found a step far from those before it.
    Outlier {
        /// The step.
        step: u64,
        /// What is far out, as a label value of `shoal_outlier_steps_total`.
        reason: String,
        /// The part of the learning rate that its update has; 0: it is skipped.
        rate: f64,
        /// The number and its limit, in words.
        text: String,
    },
    /// A bucket has a whole checkpoint.
    Uploaded {
        /// The version of the weights.
        version: u64,
        /// The address of the archive in the bucket.
        archive: String,
    },
    /// A checkpoint could not be uploaded at first. The process tries again until it can, or until a newer one is
    /// there.
    UploadFailed {
        /// The version of the weights.
        version: u64,
        /// The address of the archive in the bucket.
        archive: String,
        /// The reason.
        reason: String,
    },
    /// The run continues from a checkpoint of an archive, in a new history.
    Continued {
        /// The version of the weights.
        version: u64,
        /// The archive.
        archive: String,
    },
    /// A member left, died or was expelled.
    Lost {
        /// The peer.
        peer: PeerId,
        /// Its name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<PeerName>,
        /// The stages that it hosted.
        span: StageSpan,
        /// The cause.
        how: String,
    },
    /// The run returned to a checkpoint because a stage had lost every replica.
    Rewound {
        /// The version of the weights that the run returned to.
        version: u64,
        /// Committed steps that are computed again.
        steps: u64,
    },
    /// This process became the coordinator.
    BecameCoordinator {
        /// Its term.
        term: u64,
        /// Claims that members hold.
        claims: u64,
    },
    /// The number of anchors, the peers that replicate the coordinator's log, changed.
    Anchors {
        /// The new number.
        count: usize,
    },
    /// The run pauses because fewer than a majority of the anchors answer.
    Paused {
        /// Anchors that answer.
        answering: usize,
        /// Anchors in all.
        anchors: usize,
    },
    /// The run pauses because a stage has no replica. It continues from the newest checkpoint that
    /// is found.
    StageLost {
        /// The stages without a replica.
        stages: Vec<u16>,
        /// The version of the newest checkpoint.
        version: u64,
    },
    /// This peer refused a connection. Per second only the first few refusals are reported.
    ConnectionRefused {
        /// The other peer, if it identified itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer: Option<PeerId>,
        /// The remote address, if it is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<SocketAddr>,
        /// The reason, as a label value of `shoal_connections_refused_total`.
        reason: String,
        /// The explanation that was sent to the other peer.
        text: String,
    },
    /// Whether peers that this one never sent to can reach its UDP port.
    OwnPort(OwnPort),
    /// The issuer published a new version of the access list.
    AccessList {
        /// The list's version.
        version: u64,
        /// Banned peers.
        banned: usize,
        /// Revoked tickets.
        revoked: usize,
        /// Peers that the allowlist names.
        allowed: usize,
    },
    /// The log has fewer anchors than tolerate the loss of one.
    FewAnchors {
        /// The number that does.
        wanted: usize,
    },
    /// The coordinator cannot be reached, and this process waits for it.
    CoordinatorUnreachable {
        /// The longest wait.
        wait_seconds: u64,
    },
    /// The coordinator can be reached again.
    CoordinatorReachable,
    /// The run is over, and this process waits for peers that missed the end.
    AwaitsPeers {
        /// How many.
        peers: usize,
        /// The longest wait.
        seconds: u64,
    },
    /// This process leaves the run in order.
    Draining {
        /// The trigger, such as a signal's name.
        source: String,
    },
    /// A peer of a demo was killed, by the demo or from outside.
    Killed {
        /// The peer's number among the demo's processes.
        index: usize,
    },
    /// The run is complete.
    Finished {
        /// Bytes that this peer's data plane sent.
        sent: Traffic,
        /// What this peer's engine swapped.
        swapped: Swapped,
    },
    /// The run cannot continue.
    Stopped {
        /// The reason, and what to do.
        reason: String,
    },
}

impl RunEvent {
    /// Returns whether the operator must see the event even where no progress view exists.
    #[must_use]
    pub fn is_notice(&self) -> bool {
        matches!(
            self,
            Self::FewAnchors { .. }
                | Self::UploadFailed { .. }
                | Self::ScoreFailed { .. }
                | Self::CoordinatorUnreachable { .. }
                | Self::CoordinatorReachable
                | Self::AwaitsPeers { .. }
                | Self::Draining { .. }
        )
    }
}

/// What a model prefers among the pairs of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PreferenceNumbers {
    /// Share of pairs whose chosen completion has the larger reward.
    pub accuracy: f64,
    /// Mean difference of the rewards of chosen and rejected completions.
    pub margin: f64,
    /// Share of held-out pairs whose chosen completion has the larger reward, if the step evaluated them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_accuracy: Option<f64>,
}

/// One committed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The step's number.
    pub step: u64,
    /// Mean training loss, in nats per token or of pairs.
    pub loss: f64,
    /// Mean loss on the held-out text with the weights that the step read, if the step evaluated it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_loss: Option<f64>,
    /// The rate of the step's update.
    #[serde(default)]
    pub learning_rate: f64,
    /// Norm of the gradient over all stages, before clipping.
    pub gradient_norm: f64,
    /// Tokens of the step's samples, all of which are computed.
    pub tokens: u64,
    /// Tokens that count towards the loss. The rest is context and padding.
    #[serde(default)]
    pub targets: u64,
    /// Tokens that are followed by padding.
    #[serde(default)]
    pub padded: u64,
    /// What the model prefers, in a run on pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferences: Option<PreferenceNumbers>,
    /// Seconds since the previous commit, or since the start of the first step.
    pub seconds: f64,
    /// Seconds of these from the last finished microbatch until every replica held the step's
    /// gradient. Only the coordinator knows this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all_reduce_seconds: Option<f64>,
    /// Price of the members' time since the previous commit, in the currency of `--price`, if a
    /// member has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Training microbatches that the commit's proof covers, over all stages.
    pub counted: u64,
    /// Claims that were revoked because their holders were gone; other replicas did the work again.
    pub replayed: u64,
    /// Done reports that arrived more than once. Each is counted once.
    pub duplicated: u64,
    /// Members at the commit.
    pub peers: usize,
}

impl StepReport {
    /// The step's throughput, over the whole swarm.
    #[must_use]
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }
}

/// Tensors of stages that did not fit into memory, moved to and from the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Swapped {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Seconds for which the engine waited.
    pub waited_seconds: f64,
    /// Bytes of weights copied to the device.
    #[serde(default)]
    pub copied: u64,
    /// Bytes among them that were not there yet when a pass needed them.
    #[serde(default)]
    pub late: u64,
}

impl From<SwapStats> for Swapped {
    fn from(stats: SwapStats) -> Self {
        let SwapStats { read, written, waited, copied, late, .. } = stats;
        Self {
            read: read.0,
            written: written.0,
            waited_seconds: waited.as_secs_f64(),
            copied: copied.0,
            late: late.0,
        }
    }
}

/// Bytes sent, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Control messages.
    pub control: u64,
    /// Activations, gradients and pieces of rounds.
    pub tensor: u64,
    /// Files.
    pub file: u64,
    /// Packets relayed between two other peers.
    pub relay: u64,
}
