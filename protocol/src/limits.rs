//! The caps. Whatever a peer or a file says, nothing larger is allocated for it.

use std::time::Duration;

use crate::units::Bytes;

/// Version of everything that peers say to each other; peers of different versions do not talk.
pub const PROTOCOL_VERSION: u32 = 9;

/// One encoded control message.
pub const CONTROL_MESSAGE: Bytes = Bytes(256 << 10);

/// One tensor on the wire, header not counted. Larger ones travel in pieces.
pub const TENSOR: Bytes = Bytes::mebi(256);

/// The tensors of one message where the run is not known, whose manifest says how large they are.
pub const TENSOR_MESSAGE: Bytes = Bytes::mebi(64);

/// Tensors of a class that one peer may have on the way to another before sending more of them waits.
pub const SEND_QUEUE: Bytes = Bytes::mebi(32);

/// Tensors of one peer that another reads, or has read and not taken over, before it reads on: as many as may be
/// on their way of the three classes, and once more of one. Those that are half here so never keep one from being
/// read that is here and would wait for them.
pub const RECEIVE_ROOM: Bytes = Bytes(4 * SEND_QUEUE.0);

/// Control messages waiting for one peer before the connection counts as stuck and is closed.
pub const CONTROL_QUEUE: usize = 4096;

/// What those may have together.
pub const CONTROL_QUEUE_BYTES: Bytes = Bytes::mebi(64);

/// Dimensions of a tensor on the wire.
pub const TENSOR_RANK: usize = 4;

/// Microbatches of one step, held-out ones included.
pub const MICROBATCHES: u32 = 1 << 16;

/// Complete checkpoints that a run keeps.
pub const CHECKPOINTS: u32 = 64;

/// Stages of one run.
pub const STAGES: u16 = 1024;

/// Members of one run.
pub const MEMBERS: usize = 1 << 14;

/// Members that one message, or one record of the log, is about at most: with all their addresses they
/// stay under the cap of a control message.
pub const CHANGED_MEMBERS: usize = 512;

/// Addresses that one member may announce.
pub const MEMBER_ADDRESSES: usize = 8;

/// Links to others of which a peer says what it measured.
pub const WAYS: usize = 16;

/// Members that a newcomer looks at before it is given a stage.
pub const LANDMARKS: usize = 8;

/// A run's manifest as TOML or on the wire.
pub const MANIFEST: Bytes = Bytes(64 << 10);

/// Elements of one piece of an all-reduce: 512 KiB of sums. Pieces are summed while others travel.
pub const ROUND_PIECE_ELEMENTS: usize = 1 << 16;

/// Elements of a stage's vector that are measured together once a round brought them: parts and pieces
/// begin at multiples of this.
pub const ROUND_BLOCK_ELEMENTS: usize = 1 << 12;

/// One piece of a file fetched by its hash.
pub const BLOB_PIECE: Bytes = Bytes::mebi(1);

/// One file fetched by its hash.
pub const BLOB: Bytes = Bytes::mebi(64 << 10);

/// Reaching a peer and agreeing on version and run.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection that stays silent for this long is broken; keep-alives go out three times as often.
pub const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
