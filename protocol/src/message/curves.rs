//! The history of a run's figures, which a peer that joined later lacks.

/// The most points of a curve.
pub const CURVE_POINTS: usize = 512;

/// The curves of a run up to the newest step that the sender knows, oldest points first. They are for people: nothing is
/// decided by them.
#[derive(Debug, Clone, PartialEq, Default, bincode::Encode, bincode::Decode)]
pub struct Curves {
    /// Mean training loss, in nats per token.
    pub loss: Vec<CurvePoint>,
    /// Mean loss on the held-out text, in nats per token.
    pub held_out_loss: Vec<CurvePoint>,
    /// Tokens per second of the whole swarm.
    pub tokens_per_second: Vec<CurvePoint>,
}

/// The mean of some values in a row.
#[derive(Debug, Clone, Copy, PartialEq, bincode::Encode, bincode::Decode)]
pub struct CurvePoint {
    /// The number of committed steps at the first of the values.
    pub first: u64,
    /// The number of committed steps at the last of them.
    pub last: u64,
    /// The number of values.
    pub count: u64,
    /// Their mean.
    pub mean: f32,
}
