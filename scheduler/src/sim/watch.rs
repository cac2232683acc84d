//! Observations of a run of the simulator while it proceeds.

use std::fmt;

use shoal_protocol::ids::ClaimKey;
use shoal_protocol::message::LogRecord;
use shoal_protocol::units::{Bytes, Moment};

use crate::action::{CoordinatorEvent, PeerLoad};

/// An observer of a run.
pub trait Watch: fmt::Debug {
    /// Receives an observation. Observations come in the order of their times.
    fn sees(&mut self, now: Moment, seen: Seen<'_>);
}

/// An observation. Peers are identified by their index in the scenario.
#[derive(Debug)]
pub enum Seen<'a> {
    /// An incarnation of a peer started.
    Born {
        /// The peer.
        peer: usize,
    },
    /// An incarnation of a peer ended.
    Died {
        /// The peer.
        peer: usize,
    },
    /// A pass began.
    Ran {
        /// The peer.
        peer: usize,
        /// The work item.
        key: ClaimKey,
        /// When the pass ends, if its peer survives.
        until: Moment,
    },
    /// A microbatch's gradient was counted.
    Counted {
        /// The peer that counted it.
        peer: usize,
        /// The work item.
        key: ClaimKey,
    },
    /// A peer's resource use changed.
    Holds {
        /// The peer.
        peer: usize,
        /// Its present resource use.
        load: &'a PeerLoad,
    },
    /// Data was sent, possibly by a peer to itself.
    Sent {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// The kind of data.
        sort: Sort,
        /// Its size on the wire.
        size: Bytes,
    },
    /// The coordinator begins or finishes the handling of an input. All its decisions fall between.
    Decides {
        /// Whether it begins.
        begins: bool,
    },
    /// The leading coordinator is dropped at the end of the run; afterwards its memory is free.
    Goes {
        /// Whether it has been dropped.
        gone: bool,
    },
    /// A record became durable.
    Logged(&'a LogRecord),
    /// The coordinator emitted an event.
    Decided(&'a CoordinatorEvent),
}

/// Kinds of data between peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sort {
    /// A message from the coordinator.
    Told,
    /// A message to the coordinator.
    Reported,
    /// A message between members.
    Said,
    /// An activation or its gradient.
    Tensor,
    /// A piece of an all-reduce.
    Piece,
    /// Files.
    File,
}
