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
    /// Packets passed on between peers that have no way to each other.
    Relay,
}

impl Label for TrafficKind {
    const NAME: &'static str = "kind";
    const ALL: &'static [Self] = &[Self::Control, Self::Tensor, Self::Blob, Self::Relay];

    fn value(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Tensor => "tensor",
            Self::Blob => "blob",
            Self::Relay => "relay",
        }
    }
}

/// How a tensor was packed for its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkPacking {
    /// Not at all.
    None,
    /// By zstd, without loss.
    Zstd,
    /// Integers without the bytes that only repeat their sign.
    Integers,
}

impl Label for LinkPacking {
    const NAME: &'static str = "packing";
    const ALL: &'static [Self] = &[Self::None, Self::Zstd, Self::Integers];

    fn value(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zstd => "zstd",
            Self::Integers => "integers",
        }
    }
}

/// Why something that a peer sent was not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It makes no sense: no correct peer sends it.
    Malformed,
    /// It is from or to a life that is over.
    OtherLife,
    /// It is from before or after a rewind of the run.
    OtherEra,
    /// It is from a coordinator whose term is over.
    PastTerm,
    /// It is for, or from, a coordinator that is none.
    NoCoordinator,
    /// It is about a claim that its sender does not hold.
    Claim,
    /// It is a file whose bytes have another hash than was asked for.
    File,
    /// It is a checkpoint, or a part of one, that is another run's or damaged.
    Checkpoint,
}

impl Label for Refusal {
    const NAME: &'static str = "reason";
    const ALL: &'static [Self] = &[
        Self::Malformed,
        Self::OtherLife,
        Self::OtherEra,
        Self::PastTerm,
        Self::NoCoordinator,
        Self::Claim,
        Self::File,
        Self::Checkpoint,
    ];

    fn value(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::OtherLife => "other_life",
            Self::OtherEra => "other_era",
            Self::PastTerm => "past_term",
            Self::NoCoordinator => "no_coordinator",
            Self::Claim => "claim",
            Self::File => "file",
            Self::Checkpoint => "checkpoint",
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
