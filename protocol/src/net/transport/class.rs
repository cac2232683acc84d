//! Priorities of streams on one connection.
//!
//! Streams of a higher class are sent before those of a lower one, and leave the send queue first.
//! Within a class, tensors are sent one after the other, so that a receiver of several can begin
//! with the first. Streams that shared the link would all arrive at the end.
//!
//! Priorities order only the traffic of one connection. Chunks and training traffic often use
//! different connections, so the share of chunks in the upload capacity is limited as well
//! ([`super::upload_limit`]).

use quinn::SendStream;

/// The purpose of a stream, from the lowest to the highest priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Pieces of files; training does not wait for them.
    Chunk,
    /// Parts and results of all-reduce rounds. They end a step, whose passes are complete by then.
    Round,
    /// Activations, which start new work.
    Activation,
    /// Activation gradients, which complete work in progress and free its memory.
    Gradient,
    /// Control messages: few bytes, which decide about all other work.
    Control,
}

/// Bits of a stream's priority for its place within its class. Places wrap around; the few streams
/// in flight at that time are sent in another order.
const PLACES: u32 = 24;

/// Number of tensor queues, each with its own limit.
pub(super) const QUEUES: usize = 3;

/// Tensor messages of a queue on their way at once.
pub(super) const TENSOR_STREAMS: usize = 32;

impl Class {
    /// The queue of the class's tensors; later queues are sent first. An urgent queue never waits
    /// for the room of a less urgent one.
    pub(super) fn queue(self) -> usize {
        match self {
            Self::Chunk | Self::Round => 0,
            Self::Activation => 1,
            Self::Gradient | Self::Control => 2,
        }
    }

    /// Sets the priority of a stream: within its class, lower places are sent first.
    pub(super) fn prioritize(self, stream: &SendStream, place: u64) {
        // Fails only for a finished stream, which needs no priority.
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
    fn classes_take_precedence_over_places() {
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
