//! What happens in a run, as typed events: the progress view, the report, the metrics and the tests
//! all read these, and nothing reads a log.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use shoal_protocol::ids::{ContentHash, PeerId, RunId, StageSpan};
use shoal_protocol::message::MoveReason;

use crate::reachability::OwnPort;

/// Something that happened, as this process saw it. With `--events` each is one line of JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// The process takes part in a run.
    Started {
        /// Name of the run.
        run: RunId,
        /// Decides initial weights and the order of samples.
        seed: u64,
        /// Pipeline stages.
        stages: u16,
        /// Optimizer updates in the run.
        steps: u64,
        /// Tokens that one step trains on.
        tokens_per_step: u64,
        /// Microbatches that one step trains on.
        microbatches: u32,
    },
    /// Others can join at this address.
    Listening {
        /// What they type after `shoal join`.
        address: String,
    },
    /// The run waits for more peers.
    Waiting {
        /// Stages that nobody hosts yet.
        stages: Vec<u16>,
        /// Further members that were asked for.
        members: usize,
    },
    /// A peer became a member.
    Admitted {
        /// Who.
        peer: PeerId,
        /// The stages it hosts.
        span: StageSpan,
    },
    /// This process became a member.
    Joined {
        /// The stages it hosts.
        span: StageSpan,
    },
    /// A peer is to host another stage in place of its own, and fetches that first.
    MoveBegun {
        /// Who.
        peer: PeerId,
        /// What it hosts.
        from: StageSpan,
        /// What it is to.
        to: u16,
        /// Why.
        reason: MoveReason,
    },
    /// A peer hosts another stage from a step on.
    Moves {
        /// Who.
        peer: PeerId,
        /// What it hosts until then.
        from: StageSpan,
        /// What it hosts then.
        to: u16,
        /// The step.
        step: u64,
        /// Why.
        reason: MoveReason,
    },
    /// A peer does not move after all.
    MoveCancelled {
        /// Who.
        peer: PeerId,
        /// The stage that it does not go to.
        to: u16,
        /// Why it was to.
        reason: MoveReason,
        /// What came between.
        obstacle: String,
    },
    /// This process hosts another stage from now on.
    Moved {
        /// What it hosted.
        from: StageSpan,
        /// What it hosts.
        to: u16,
        /// The first step.
        step: u64,
    },
    /// This process holds the weights of the others and takes part from now on.
    Serving {
        /// The version of the weights.
        version: u64,
    },
    /// A step is committed.
    Committed(StepReport),
    /// A checkpoint is complete.
    Checkpoint {
        /// The version of the weights.
        version: u64,
        /// Its folder.
        directory: String,
        /// Hash of its weights.
        hash: ContentHash,
    },
    /// A member is gone.
    Lost {
        /// Who.
        peer: PeerId,
        /// What it hosted.
        span: StageSpan,
        /// How that showed.
        how: String,
    },
    /// Every replica of a stage was gone: the run goes back to a checkpoint.
    Rewound {
        /// The version of the weights that it goes back to.
        version: u64,
        /// The committed steps that are computed again.
        steps: u64,
    },
    /// This process keeps the run from now on.
    BecameCoordinator {
        /// Its term of office.
        term: u64,
        /// Claims that members held.
        claims: u64,
    },
    /// So many peers keep the run's log from now on.
    Anchors {
        /// How many.
        count: usize,
    },
    /// Too few of the peers that keep the log answer: the run pauses.
    Paused {
        /// How many answer.
        answering: usize,
        /// How many there are.
        anchors: usize,
    },
    /// A stage is lost: the run pauses until its newest checkpoint is found, or an older one.
    StageLost {
        /// The stages without a replica.
        stages: Vec<u16>,
        /// The version of the newest checkpoint.
        version: u64,
    },
    /// A connection was refused. Of many in one second only the first few are told of.
    ConnectionRefused {
        /// Who, if that came out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer: Option<PeerId>,
        /// Where from, as far as is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        address: Option<SocketAddr>,
        /// Why, as `shoal_connections_refused_total` names it.
        reason: String,
        /// In words, as the refused was told.
        text: String,
    },
    /// It came out how this peer's own UDP port stands to those whom it never sent to.
    OwnPort(OwnPort),
    /// The run's warden said anew who is banned and who is let in.
    AccessList {
        /// Which edition.
        version: u64,
        /// Banned peers.
        banned: usize,
        /// Revoked tickets.
        revoked: usize,
        /// Peers that are let in by name.
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
    /// The run is over, and this process waits for anchors that missed the end.
    AwaitsAnchors {
        /// How many.
        anchors: usize,
        /// The longest wait.
        seconds: u64,
    },
    /// This process leaves in order.
    Draining {
        /// What asked it to.
        source: String,
    },
    /// A peer of a demo was killed, by the demo or by somebody else.
    Killed {
        /// Its number among the processes of a demo.
        index: usize,
    },
    /// The run is over.
    Finished {
        /// What this peer's data plane sent, in bytes.
        sent: Traffic,
    },
    /// The run cannot go on.
    Stopped {
        /// Why, and what to do.
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
                | Self::CoordinatorUnreachable { .. }
                | Self::CoordinatorReachable
                | Self::AwaitsAnchors { .. }
                | Self::Draining { .. }
        )
    }
}

/// One committed step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Which.
    pub step: u64,
    /// Mean training loss, in nats per token.
    pub loss: f64,
    /// Mean loss on the held-out text, of the weights that the step read, where it was looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_out_loss: Option<f64>,
    /// Norm of the gradient over all stages, before clipping.
    pub gradient_norm: f64,
    /// Tokens trained on.
    pub tokens: u64,
    /// From the commit before (or the start of the first step) to this one.
    pub seconds: f64,
    /// Of these, from when every microbatch was done until every replica held the step's gradient;
    /// only who keeps the run knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all_reduce_seconds: Option<f64>,
    /// Training microbatches that the commit's proof covers, over all stages.
    pub counted: u64,
    /// Claims on a stage's microbatch that were taken back from peers who were gone, whose work
    /// others did again.
    pub replayed: u64,
    /// Done reports that came again and were counted once.
    pub duplicated: u64,
    /// Members when it was committed.
    pub peers: usize,
}

/// Bytes sent by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Control messages.
    pub control: u64,
    /// Activations, gradients and pieces of rounds.
    pub tensor: u64,
    /// Files.
    pub file: u64,
    /// Packets passed on between two others.
    pub relay: u64,
}
