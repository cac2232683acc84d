//! What goes first where the link is the bottleneck.
//!
//! Streams of a higher class are sent before those of a lower one, and wait in the outbox before them.
//! Within a class, tensors go one after the other: who waits for several can begin with the first, where
//! streams that share the link would all arrive at its end. That orders what one connection carries. A
//! chunk goes to a peer that may have nothing to do with what this one computes, over another connection,
//! so chunks also keep away from training by the time that they take of the way out ([`super::upload_limit`]).

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

/// Bits of a stream's priority for its place within its class. Places begin anew after so many; the few
/// that are on their way then go in another order.
const PLACES: u32 = 24;

/// Queues in which tensors wait, each with room of its own.
pub(super) const QUEUES: usize = 3;

/// Tensor messages of a queue on their way at once.
pub(super) const TENSOR_STREAMS: usize = 32;

impl Class {
    /// Which of the queues its tensors wait in; later ones go first. What goes first waits for no room that
    /// something later has.
    pub(super) fn queue(self) -> usize {
        match self {
            Self::Chunk | Self::Round => 0,
            Self::Activation => 1,
            Self::Gradient | Self::Control => 2,
        }
    }

    /// Has a stream wait for its turn: among those of its class, lower places go first.
    pub(super) fn put(self, stream: &SendStream, place: u64) {
        // Fails only for a stream that is already finished, which needs no turn.
        let _ = stream.set_priority(self.priority(place));
    }

    fn priority(self, place: u64) -> i32 {
        let last = (1 << PLACES) - 1;
        ((self as i32) << PLACES) | (last - place % (1 << PLACES)) as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_go_before_places() {
        let order = [
            Class::Control.priority(1 << 30),
            Class::Gradient.priority(0),
            Class::Gradient.priority(1),
            Class::Gradient.priority((1 << PLACES) - 1),
            Class::Activation.priority(0),
            Class::Chunk.priority(7),
        ];
        assert!(order.is_sorted_by(|first, second| first > second), "{order:?}");
        assert_eq!(Class::Round.priority(1 << PLACES), Class::Round.priority(0));
    }
}
