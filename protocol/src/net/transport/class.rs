//! What goes first where the link is the bottleneck.
//!
//! Streams of a higher class are sent before those of a lower one, and wait in the outbox before them.
//! That orders what one connection carries. A chunk goes to a peer that may have nothing to do with
//! what this one computes, over another connection, so chunks also keep away from training by the time
//! that they take of the way out ([`super::uplink`]).

use quinn::SendStream;

/// What something on its way is for; the later ones here go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Pieces of files: nobody who trains waits for them.
    Chunk,
    /// Parts and results of all-reduces: they end a step, which has ended its passes by then.
    Round,
    /// What starts new work.
    Activation,
    /// What ends work under way and frees its room.
    Gradient,
    /// Messages: few bytes, which decide what is done with all others.
    Control,
}

impl Class {
    /// Has a stream wait for its turn.
    pub(super) fn put(self, stream: &SendStream) {
        // Fails only for a stream that is already finished, which needs no turn.
        let _ = stream.set_priority(self as i32);
    }
}
