//! What a run of the simulator shows while it goes on.

use std::fmt;

use shoal_protocol::ids::ClaimKey;
use shoal_protocol::message::LogRecord;
use shoal_protocol::units::{Bytes, Moment};

use crate::action::{CoordinatorEvent, PeerLoad};

/// Somebody who watches a run.
pub trait Watch: fmt::Debug {
    /// Something happened. What is shown comes in the order of its moments.
    fn sees(&mut self, now: Moment, seen: Seen<'_>);
}

/// What happened. Peers are named by their place in the scenario.
#[derive(Debug)]
pub enum Seen<'a> {
    /// A life of a peer began.
    Born {
        /// Whose.
        peer: usize,
    },
    /// A life of a peer is over.
    Died {
        /// Whose.
        peer: usize,
    },
    /// A pass began.
    Ran {
        /// Where.
        peer: usize,
        /// Of what.
        key: ClaimKey,
        /// When it ends, if its peer lives on.
        until: Moment,
    },
    /// A microbatch was counted.
    Counted {
        /// By whom.
        peer: usize,
        /// Which, and at which stage.
        key: ClaimKey,
    },
    /// What a peer holds now.
    Holds {
        /// Who.
        peer: usize,
        /// What.
        load: &'a PeerLoad,
    },
    /// Something went on its way, also to the peer itself.
    Sent {
        /// By whom.
        from: usize,
        /// To whom.
        to: usize,
        /// What.
        sort: Sort,
        /// As it would go over the wire.
        size: Bytes,
    },
    /// The coordinator begins to take in what happened, or has: all that it decides it decides in
    /// between.
    Decides {
        /// Whether it begins.
        begins: bool,
    },
    /// The coordinator that leads at the end is let go of, or has been: what it held is free.
    Goes {
        /// Whether it has been.
        gone: bool,
    },
    /// A record is in the log for good.
    Logged(&'a LogRecord),
    /// The coordinator says what people want to know.
    Decided(&'a CoordinatorEvent),
}

/// What goes from one peer to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sort {
    /// A word of the coordinator.
    Told,
    /// A word to the coordinator.
    Reported,
    /// A word between members.
    Said,
    /// An activation or its gradient.
    Tensor,
    /// A piece of an all-reduce.
    Piece,
    /// Files.
    File,
}
