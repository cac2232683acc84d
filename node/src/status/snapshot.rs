//! The snapshot itself, as it travels as JSON.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
#[cfg(any(test, fuzzing))]
use shoal_protocol::decoder::Decoder;
use shoal_protocol::ids::{ContentHash, Incarnation, PeerId, RunId, Stage, StageSpan};
use shoal_protocol::message::MoveReason;

use crate::reachability::OwnPort;

/// What a node knows of its run at one moment. Amounts are in base units: seconds and bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Of the program.
    pub version: String,
    /// When this was so, in milliseconds since 1970.
    pub at_ms: u64,
    /// The node itself.
    pub node: NodeStatus,
    /// The run; none before the node knows which.
    pub run: Option<RunStatus>,
    /// Who takes part, in order of members.
    pub members: Vec<MemberStatus>,
    /// The newest numbers of the training.
    pub training: TrainingStatus,
    /// How they came to be.
    pub curves: Curves,
    /// What happened of late, oldest first.
    pub events: Vec<StatusEvent>,
}

/// What a node is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It is no member yet.
    #[default]
    Joining,
    /// It is a member and has no weights yet.
    CatchingUp,
    /// It is a member that hosts nothing.
    Watching,
    /// It takes part.
    Serving,
    /// It takes part, and the run stands still.
    Paused,
    /// It leaves in order.
    Draining,
    /// Its part in the run is over.
    Over,
}

impl NodeState {
    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::CatchingUp => "catching up",
            Self::Watching => "watching",
            Self::Serving => "serving",
            Self::Paused => "paused",
            Self::Draining => "draining",
            Self::Over => "over",
        }
    }
}

/// The node itself.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Who it is; none before it is known.
    pub peer: Option<PeerId>,
    /// Its life.
    pub incarnation: Incarnation,
    /// What it is at.
    pub state: NodeState,
    /// Why, where there is more to say.
    pub why: Option<String>,
    /// Whether it does for the run what it is there for.
    pub ready: bool,
    /// What it hosts; none before it is admitted.
    pub stages: Option<StageSpan>,
    /// Memory that it may use.
    pub memory_limit_bytes: Option<u64>,
    /// Memory that its process uses.
    pub resident_bytes: Option<u64>,
    /// How its own UDP port stands to others.
    #[serde(default)]
    pub own_port: OwnPort,
    /// What it holds for the open steps.
    pub load: LoadStatus,
    /// What it sent.
    pub sent: TrafficStatus,
    /// What it received.
    pub received: TrafficStatus,
}

/// What a node holds for the open steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LoadStatus {
    /// Microbatches that it has taken on.
    pub accepted: u64,
    /// Offers that wait for room.
    pub waiting: u64,
    /// Tasks that its engine has.
    pub computing: u64,
    /// Activations and gradients that wait or are in use.
    pub in_flight_bytes: u64,
    /// What it sent and may have to send again.
    pub logged_bytes: u64,
    /// What of that is on the disk.
    pub logged_on_disk_bytes: u64,
    /// Memory for what it sent and may have to send again.
    pub log_memory_bytes: u64,
}

/// Bytes by what they were for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TrafficStatus {
    /// Messages.
    pub control_bytes: u64,
    /// Activations, gradients and pieces of rounds.
    pub tensor_bytes: u64,
    /// Files.
    pub file_bytes: u64,
}

/// A run, as far as it is known where this was asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Its name.
    pub id: RunId,
    /// Pipeline stages.
    pub stages: u16,
    /// Optimizer updates in all.
    pub steps: u64,
    /// Updates done: the version of the weights.
    pub version: u64,
    /// Grows with each return to a checkpoint.
    pub era: u32,
    /// The office of who keeps the run.
    pub term: u64,
    /// Who keeps it, as far as is known.
    pub coordinator: Option<PeerId>,
    /// Tokens that one step trains on.
    pub tokens_per_step: u64,
    /// Microbatches of one step.
    pub microbatches: u32,
    /// The newest complete checkpoint.
    pub checkpoint: Option<CheckpointStatus>,
}

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointStatus {
    /// The version of its weights.
    pub version: u64,
    /// Hash of its weights, where it was brought together here.
    pub hash: Option<ContentHash>,
}

/// The newest numbers of the training; none before there are any.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TrainingStatus {
    /// The step that they are of.
    pub step: Option<u64>,
    /// Mean training loss, in nats per token.
    pub loss: Option<f64>,
    /// Newest mean loss on the held-out text.
    pub held_out_loss: Option<f64>,
    /// Norm of the gradient over all stages, before clipping.
    pub gradient_norm: Option<f64>,
    /// What the whole swarm trains on, a moving average.
    pub tokens_per_second: Option<f64>,
    /// What a step takes, a moving average.
    pub seconds_per_step: Option<f64>,
    /// When the newest step was committed, in milliseconds since 1970.
    pub committed_at_ms: Option<u64>,
}

/// One member of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Who.
    pub peer: PeerId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// What it hosts; nothing of who watches.
    pub stages: StageSpan,
    /// What it is at.
    pub state: MemberState,
    /// Where it goes from there, if it is on its way.
    #[serde(default)]
    pub moves: Option<MoveStatus>,
    /// Whether it keeps the run.
    pub coordinator: bool,
    /// Whether it would keep the run's log.
    pub anchor: bool,
    /// Whether it keeps checkpoints whole.
    pub archive: bool,
    /// Whether it is the node that says this.
    pub own: bool,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
    /// The link from here to there, where there is one.
    pub link: Option<LinkStatus>,
}

/// A member's way to another stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStatus {
    /// Which.
    pub to: Stage,
    /// Why.
    pub reason: MoveReason,
}

/// What a member is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// It takes part.
    Serving,
    /// It has no weights yet.
    CatchingUp,
    /// It hosts nothing.
    Watching,
}

impl MemberState {
    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::CatchingUp => "catching up",
            Self::Watching => "watching",
        }
    }

    /// A sign for it: states differ in shape, not in colour alone.
    #[must_use]
    pub fn sign(self) -> char {
        match self {
            Self::Serving => '●',
            Self::CatchingUp => '◐',
            Self::Watching => '○',
        }
    }
}

/// A connection to another member.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct LinkStatus {
    /// Whether it leads through another peer.
    #[serde(default)]
    pub relayed: bool,
    /// The smoothed round trip.
    pub round_trip_seconds: f64,
    /// What it was measured to carry.
    pub bytes_per_second: Option<f64>,
    /// What may be on its way at once.
    pub window_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets taken for lost.
    pub lost_packets: u64,
}

/// How the training went.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Curves {
    /// Mean training loss.
    pub loss: Vec<Point>,
    /// Mean loss on the held-out text.
    pub held_out_loss: Vec<Point>,
    /// Tokens per second.
    pub tokens_per_second: Vec<Point>,
}

/// A step and a value. Of a long curve it is the mean up to that step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point(pub u64, pub f64);

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEvent {
    /// When it was noticed, in milliseconds since 1970.
    pub at_ms: u64,
    /// How it is to be taken.
    pub tone: Tone,
    /// What, for people: one line without control characters.
    pub text: String,
}

/// How something is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tone {
    /// Good to know.
    Plain,
    /// Better than before.
    Good,
    /// Worse than before.
    Bad,
}

impl Status {
    /// Reads what a node says.
    ///
    /// # Errors
    /// When it is no status.
    pub(crate) fn parse(bytes: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(bytes)
    }

    /// What a node says.
    ///
    /// # Errors
    /// Never: it is plain data.
    pub(crate) fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

/// How the answer of a node is tried.
#[cfg(any(test, fuzzing))]
pub(crate) const DECODER: Decoder = Decoder {
    name: "status",
    examples: || vec![EXAMPLE.as_bytes().to_vec()],
    check: |bytes| {
        let Ok(status) = Status::parse(bytes) else { return };
        let written = status.to_json().expect("what was read can be written");
        Status::parse(written.as_bytes()).expect("what was written can be read");
    },
};

/// The status of a peer that watches a run of one stage.
#[cfg(any(test, fuzzing))]
const EXAMPLE: &str = r#"{"version":"0.1.0","at_ms":9,"node":{"peer":null,"incarnation":2,"state":"watching",
"why":null,"ready":true,"stages":[],"memory_limit_bytes":null,"resident_bytes":5,
"load":{"accepted":0,"waiting":0,"computing":0,"in_flight_bytes":0,"logged_bytes":0,
"logged_on_disk_bytes":0,"log_memory_bytes":0},
"sent":{"control_bytes":1,"tensor_bytes":0,"file_bytes":0},
"received":{"control_bytes":1,"tensor_bytes":0,"file_bytes":0}},"run":null,"members":[],
"training":{"step":3,"loss":2.5,"held_out_loss":null,"gradient_norm":1.0,"tokens_per_second":null,
"seconds_per_step":null,"committed_at_ms":8},
"curves":{"loss":[[3,2.5]],"held_out_loss":[],"tokens_per_second":[]},
"events":[{"at_ms":7,"tone":"bad","text":"x is gone"}]}"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_a_status() {
        let status = Status::parse(EXAMPLE.as_bytes()).expect("a status");
        assert_eq!(status.curves.loss, [Point(3, 2.5)]);
    }
}
