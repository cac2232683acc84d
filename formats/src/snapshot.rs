//! The status snapshot and its JSON form.

use std::net::SocketAddr;
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};
#[cfg(any(test, fuzzing))]
use shoal_protocol::decoder::Decoder;
use shoal_protocol::ids::{ContentHash, Incarnation, PeerId, RunId, StageSpan};
use shoal_protocol::message::MoveReason;
use shoal_protocol::plain_name::{IslandName, PeerName};
use shoal_protocol::units::Price;

use crate::open_step::OpenStep;
use crate::own_port::OwnPort;
use crate::scores::Scores;
use crate::words::title;

/// A node's knowledge of its run at one moment. Amounts are in base units: seconds and bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The program's version.
    pub version: String,
    /// When the snapshot was taken, in milliseconds since 1970.
    pub at_ms: u64,
    /// The node itself.
    pub node: NodeStatus,
    /// The run, once the node knows it.
    pub run: Option<RunStatus>,
    /// The members, in order of peer and incarnation.
    pub members: Vec<MemberStatus>,
    /// The newest training figures.
    pub training: TrainingStatus,
    /// The deaths that the run survives, while it trains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survival: Option<SurvivalStatus>,
    /// The cost of the run, if a member has a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<CostStatus>,
    /// The scores of the newest checkpoint that this node scored (`--on-checkpoint`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scored: Option<ScoredStatus>,
    /// The history of the training figures.
    pub curves: Curves,
    /// Recent events, oldest first.
    pub events: Vec<StatusEvent>,
}

/// A node's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// It is not a member yet.
    #[default]
    Joining,
    /// It is a member and fetches the weights.
    CatchingUp,
    /// It is a member without a stage.
    Watching,
    /// It takes part in steps.
    Serving,
    /// It would take part, but the run is paused.
    Paused,
    /// It leaves in order.
    Draining,
    /// It has left the run, or the run has ended.
    Over,
}

impl NodeState {
    /// The state's name in text output.
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
    /// Its identifier, once it is known.
    pub peer: Option<PeerId>,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Its state.
    pub state: NodeState,
    /// The cause of the state, if there is more to say.
    pub why: Option<String>,
    /// Whether it serves the role that it has in the run.
    pub ready: bool,
    /// The stages that it hosts, once it is admitted.
    pub stages: Option<StageSpan>,
    /// Limit of its memory, in bytes.
    pub memory_limit_bytes: Option<u64>,
    /// Resident memory of its process, in bytes.
    pub resident_bytes: Option<u64>,
    /// Whether other peers can reach its UDP port.
    #[serde(default)]
    pub own_port: OwnPort,
    /// The oldest open step of which it has done a microbatch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_step: Option<OpenStep>,
    /// Its load from the open steps.
    pub load: LoadStatus,
    /// Bytes sent.
    pub sent: TrafficStatus,
    /// Bytes received.
    pub received: TrafficStatus,
}

/// A node's load from the open steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LoadStatus {
    /// Microbatches that it has accepted.
    pub accepted: u64,
    /// Offers that wait until there is memory for them.
    pub waiting: u64,
    /// Tasks in its engine.
    pub computing: u64,
    /// Bytes of activations and gradients that are queued or in use.
    pub in_flight_bytes: u64,
    /// Bytes of the output log: tensors that were sent and may have to be sent again.
    pub logged_bytes: u64,
    /// Bytes of the output log that were spilled to disk.
    pub logged_on_disk_bytes: u64,
    /// Memory reserved for the output log, in bytes.
    pub log_memory_bytes: u64,
}

/// Bytes by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TrafficStatus {
    /// Control messages.
    pub control_bytes: u64,
    /// Activations, gradients and pieces of rounds.
    pub tensor_bytes: u64,
    /// Files.
    pub file_bytes: u64,
}

/// A run, as far as this node knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Its identifier.
    pub id: RunId,
    /// Pipeline stages.
    pub stages: u16,
    /// Optimizer updates in the whole run.
    pub steps: u64,
    /// Optimizer updates done, which is the version of the weights.
    pub version: u64,
    /// The era. It grows with each return to a checkpoint.
    pub era: u32,
    /// The coordinator's term.
    pub term: u64,
    /// The coordinator, if it is known.
    pub coordinator: Option<PeerId>,
    /// Tokens that one step trains on.
    pub tokens_per_step: u64,
    /// Microbatches that one step trains on.
    pub microbatches: u32,
    /// The newest complete checkpoint.
    pub checkpoint: Option<CheckpointStatus>,
    /// The version that the run goes back to if all peers die: the newest complete checkpoint's, or else the first.
    /// Absent while this node does not know it.
    #[serde(default)]
    pub saved: Option<u64>,
    /// Whether there are checkpoints before the end of the run.
    #[serde(default)]
    pub saves: bool,
}

/// A complete checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointStatus {
    /// The version of the weights.
    pub version: u64,
    /// Hash of the weights, if this node assembled the checkpoint.
    pub hash: Option<ContentHash>,
}

/// The deaths that a run survives.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SurvivalStatus {
    /// Whether the run goes on, and not from a checkpoint, after the death of any one peer.
    pub any_one_peer: bool,
    /// Stages that no member serves.
    pub uncovered_stages: Vec<u16>,
    /// Stages that one member serves.
    pub single_replica_stages: Vec<u16>,
    /// Anchors that may die before the run pauses.
    pub spare_anchors: usize,
    /// Committed steps that are lost if all peers die now. Absent while this node does not know the newest checkpoint.
    pub steps_at_risk: Option<u64>,
    /// Their duration, by the newest steps.
    pub seconds_at_risk: Option<f64>,
    /// The same as a sentence.
    pub text: String,
    /// The measures that would make the run survive more; empty if there are none.
    pub advice: String,
}

/// The newest training figures; absent before the first commit.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TrainingStatus {
    /// The number of committed steps, which is the number of the newest one.
    pub step: Option<u64>,
    /// Mean training loss, in nats per token.
    pub loss: Option<f64>,
    /// Newest mean loss on the held-out text, in nats per token.
    pub held_out_loss: Option<f64>,
    /// Norm of the gradient over all stages, before clipping.
    pub gradient_norm: Option<f64>,
    /// Throughput of the whole swarm, as a moving average.
    pub tokens_per_second: Option<f64>,
    /// Duration of a step, as a moving average.
    pub seconds_per_step: Option<f64>,
    /// When the newest step was committed, in milliseconds since 1970.
    pub committed_at_ms: Option<u64>,
    /// Duration of the steps until the run is over, by the newest ones.
    #[serde(default)]
    pub seconds_left: Option<f64>,
}

/// The scores of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScoredStatus {
    /// The version of the weights.
    pub version: u64,
    /// The numbers that the command of `--on-checkpoint` printed.
    pub scores: Scores,
}

/// The cost of a run in the currency of `--price`, since this node first saw a member with a price.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct CostStatus {
    /// The members' prices for an hour.
    pub per_hour: f64,
    /// Price of the members' time up to the newest step.
    pub total: f64,
    /// Tokens trained on for a unit of currency; absent while nothing was paid.
    pub tokens_per_currency_unit: Option<f64>,
}

/// One member of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Its identifier.
    pub peer: PeerId,
    /// Its name, for people, if it has one. Several members may have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<PeerName>,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// The stages that it hosts; empty for an observer.
    pub stages: StageSpan,
    /// The number of its devices.
    #[serde(default = "one_device")]
    pub devices: NonZeroU16,
    /// Its state.
    pub state: MemberState,
    /// The stage that it moves to, while it moves.
    #[serde(default)]
    pub moves: Option<MoveStatus>,
    /// Whether it is the coordinator.
    pub coordinator: bool,
    /// Whether it is eligible to replicate the coordinator's log.
    pub anchor: bool,
    /// Whether it stores whole checkpoints.
    pub archive: bool,
    /// Whether it is the node that took this snapshot.
    pub own: bool,
    /// The price of its machine for an hour, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// The name of the island of peers that it is in, if it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub island: Option<IslandName>,
    /// Its listen addresses.
    pub addresses: Vec<SocketAddr>,
    /// This node's connection to it, if there is one.
    pub link: Option<LinkStatus>,
}

/// Snapshots of earlier versions know of one device.
fn one_device() -> NonZeroU16 {
    NonZeroU16::MIN
}

/// A member's move to other stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStatus {
    /// The stages that it moves to.
    pub to: StageSpan,
    /// Why the coordinator moves it.
    pub reason: MoveReason,
}

/// A member's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// It takes part in steps.
    Serving,
    /// It fetches the weights.
    CatchingUp,
    /// It hosts no stage.
    Watching,
}

impl MemberState {
    /// The state's name in text output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::CatchingUp => "catching up",
            Self::Watching => "watching",
        }
    }

    /// A symbol for the state, so that states differ in shape and not in colour alone.
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
    /// Whether another peer relays it.
    #[serde(default)]
    pub relayed: bool,
    /// The smoothed round trip, in seconds.
    pub round_trip_seconds: f64,
    /// Measured throughput, in bytes per second.
    pub bytes_per_second: Option<f64>,
    /// The congestion window, in bytes.
    pub window_bytes: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// Packets declared lost.
    pub lost_packets: u64,
}

/// The history of the training figures.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Curves {
    /// Mean training loss, in nats per token.
    pub loss: Vec<Point>,
    /// Mean loss on the held-out text, in nats per token.
    pub held_out_loss: Vec<Point>,
    /// Tokens per second of the whole swarm.
    pub tokens_per_second: Vec<Point>,
}

/// A number of committed steps and a value. In a long curve the value is a mean over the steps up to this one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point(pub u64, pub f64);

/// An event of the run, as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEvent {
    /// When this node noticed it, in milliseconds since 1970.
    pub at_ms: u64,
    /// Whether it is good or bad for the run.
    pub tone: Tone,
    /// The text: one line without control characters.
    pub text: String,
}

/// Whether an event is good or bad for the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tone {
    /// Neutral information.
    Plain,
    /// An improvement.
    Good,
    /// A deterioration.
    Bad,
}

impl MemberStatus {
    /// Its name and the end of its identifier.
    #[must_use]
    pub fn title(&self) -> String {
        title(self.peer, self.name.as_ref())
    }
}

impl Status {
    /// The name and the end of the identifier of a peer, the latter alone if it is no member.
    #[must_use]
    pub fn title_of(&self, peer: PeerId) -> String {
        let member = self.members.iter().find(|member| member.peer == peer);
        member.map_or_else(|| peer.short(), MemberStatus::title)
    }

    /// Parses a status from JSON.
    ///
    /// # Errors
    /// If the bytes are not a status in JSON.
    pub fn parse(bytes: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(bytes)
    }

    /// The status as JSON.
    ///
    /// # Errors
    /// Never in practice: every field is plain data.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

/// How the decoder of a node's status is tested.
#[cfg(any(test, fuzzing))]
pub const DECODER: Decoder = Decoder {
    name: "status",
    examples: || vec![EXAMPLE.as_bytes().to_vec()],
    check: |bytes| {
        let Ok(status) = Status::parse(bytes) else { return };
        let written = status.to_json().expect("a parsed status serializes");
        Status::parse(written.as_bytes()).expect("a serialized status parses");
    },
};

/// The status of an observer in a run of one stage.
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
