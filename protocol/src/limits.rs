//! Size and time limits. Nothing larger is allocated for any peer or file.

use std::time::Duration;

use crate::units::Bytes;

/// Version of the whole protocol between peers; peers of different versions do not connect.
pub const PROTOCOL_VERSION: u32 = 31;

/// Updates that may be missing from the weights that a step reads.
pub const STALENESS: u8 = 4;

/// The size of one encoded control message.
pub const CONTROL_MESSAGE: Bytes = Bytes(256 << 10);

/// One tensor on the wire without its header. Larger tensors travel in pieces.
pub const TENSOR: Bytes = Bytes::mebi(256);

/// The tensors of one message if the receiver does not know the run's manifest, which gives their
/// size.
pub const TENSOR_MESSAGE: Bytes = Bytes::mebi(64);

/// Tensors of one class in flight from one peer to another; further sends wait.
pub const SEND_QUEUE: Bytes = Bytes::mebi(32);

/// Tensors from one peer that the receiver has in memory, complete or not, before it reads more of
/// them. Equals the send queues of the three classes, plus one more queue of one class. So
/// incomplete tensors never block the reading of a complete one that would wait for them.
pub const RECEIVE_ROOM: Bytes = Bytes(4 * SEND_QUEUE.0);

/// Tensors of all peers that are no members, complete or not: those of a member that this peer has yet to hear of.
pub const GUEST_ROOM: Bytes = Bytes::mebi(1);

/// Control messages queued for all peers that are no members.
pub const GUEST_QUEUE_BYTES: Bytes = Bytes::mebi(16);

/// A message with tensors of which no part arrives for this long is given up, and its connection with it.
pub const TENSOR_SILENCE: Duration = Duration::from_secs(40);

/// Control messages queued for one peer; above it the connection counts as stuck and is closed.
pub const CONTROL_QUEUE: usize = 4096;

/// Total size of the control messages queued for one peer.
pub const CONTROL_QUEUE_BYTES: Bytes = Bytes::mebi(64);

/// Dimensions of a tensor on the wire.
pub const TENSOR_RANK: usize = 4;

/// Passes of a virtual worker between two meetings.
pub const INNER_PASSES: u32 = 1 << 16;

/// Microbatches of one step, held-out ones included.
pub const MICROBATCHES: u32 = 1 << 16;

/// The same in a run with audits, each of whose orders lists the inputs of a member's microbatches in one message.
pub const AUDITED_MICROBATCHES: u32 = 1 << 11;

/// Complete checkpoints that a run keeps.
pub const CHECKPOINTS: u32 = 64;

/// Tokens of a vocabulary.
pub const VOCABULARY: u32 = 1 << 20;

/// Width of a model.
pub const HIDDEN: u32 = 1 << 16;

/// Layers of a model.
pub const LAYERS: u32 = 1024;

/// Heads of a layer.
pub const HEADS: u32 = 1024;

/// Inner width of a layer's feed-forward part.
pub const INTERMEDIATE: u32 = 1 << 18;

/// Experts of a layer.
pub const EXPERTS: u32 = 1024;

/// Width of a head.
pub const HEAD_SIZE: u32 = 1 << 12;

/// Stages of one run.
pub const STAGES: u16 = 1024;

/// Slices of a layer's matrices.
pub const SLICES: u16 = 64;

/// Members of one run.
pub const MEMBERS: usize = 1 << 14;

/// Members in one message or one record of the log. With all their addresses they fit into a
/// control message.
pub const CHANGED_MEMBERS: usize = 512;

/// Addresses that one member may announce.
pub const MEMBER_ADDRESSES: usize = 8;

/// Links to other peers whose measurements a peer reports.
pub const LINK_ESTIMATES: usize = 16;

/// Members whose round-trip times a newcomer measures before it is assigned a stage.
pub const PROBED_MEMBERS: usize = 8;

/// A run's manifest as TOML or on the wire.
pub const MANIFEST: Bytes = Bytes(64 << 10);

/// Data sets that a run mixes.
pub const MIXTURE_SOURCES: usize = 64;

/// Changes of a mixture in a run.
pub const MIXTURE_PHASES: usize = 64;

/// The index of prepared data.
pub const DATA_INDEX: Bytes = Bytes::mebi(64);

/// The description of a checkpoint: its run, and each file's size and hash.
pub const CHECKPOINT_DESCRIPTION: Bytes = Bytes::mebi(4);

/// The index of the weights that a run starts from.
pub const BASE_INDEX: Bytes = Bytes::mebi(4);

/// Elements of one piece of an all-reduce: 512 KiB of sums. The receiver sums pieces while others
/// travel.
pub const ROUND_PIECE_ELEMENTS: usize = 1 << 16;

/// Elements of a stage's vector that are hashed together once a round delivers them. Parts and
/// pieces begin at multiples of this.
pub const ROUND_BLOCK_ELEMENTS: usize = 1 << 12;

/// One piece of a file fetched by its hash.
pub const FILE_PIECE: Bytes = Bytes::mebi(1);

/// One file fetched by its hash.
pub const FILE: Bytes = Bytes::mebi(64 << 10);

/// Time to reach a peer and to agree on version and run.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection without traffic for this long is broken; keep-alives are sent three times as often.
pub const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// The same for a connection that loses packets, at most.
pub const LOSSY_CONNECTION_TIMEOUT: Duration = Duration::from_secs(20);
