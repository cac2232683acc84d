//! The labels whose values are known beforehand.

/// A label with all of its values.
pub trait Label: Copy + Eq + Sized + 'static {
    /// Its name in the exposition.
    const NAME: &'static str;
    /// Every value, each once.
    const ALL: &'static [Self];
    /// Its value in the exposition.
    fn value(self) -> &'static str;
}

/// What bytes on the network are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrafficKind {
    /// Control messages.
    Control,
    /// Activations, gradients and pieces of rounds.
    Tensor,
    /// Files.
    Blob,
}

impl Label for TrafficKind {
    const NAME: &'static str = "kind";
    const ALL: &'static [Self] = &[Self::Control, Self::Tensor, Self::Blob];

    fn value(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Tensor => "tensor",
            Self::Blob => "blob",
        }
    }
}

/// A queue of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// Microbatches accepted and not yet given back.
    Accepted,
    /// Offers that wait for room.
    Offers,
    /// Tasks given to the engine and not yet done.
    Compute,
}

impl Label for Queue {
    const NAME: &'static str = "queue";
    const ALL: &'static [Self] = &[Self::Accepted, Self::Offers, Self::Compute];

    fn value(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Offers => "offers",
            Self::Compute => "compute",
        }
    }
}

/// Which way a microbatch goes through a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From its input to its output.
    Forward,
    /// From its output's gradient to its input's.
    Backward,
}

impl Label for Direction {
    const NAME: &'static str = "direction";
    const ALL: &'static [Self] = &[Self::Forward, Self::Backward];

    fn value(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}
