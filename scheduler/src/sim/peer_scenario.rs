//! One peer of a simulated swarm: what it hosts, how fast it is, and its clock.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::time::Duration;

use shoal_protocol::ids::Stage;
use shoal_protocol::message::{StageChoice, StageRoom};
use shoal_protocol::plain_name::IslandName;
use shoal_protocol::units::Moment;

use super::tiers::TierScenario;
use crate::peer::PeerLimits;

/// A peer's clock, which may be off.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Its reading at the start of the run.
    pub ahead: Duration,
    /// Its ticks per thousand true ones.
    pub rate: u32,
}

impl Default for Clock {
    fn default() -> Self {
        Self { ahead: Duration::ZERO, rate: 1000 }
    }
}

impl Clock {
    /// Its reading at a moment.
    pub(super) fn reads(self, now: Moment) -> Moment {
        Moment(self.ahead + now.0 * self.rate / 1000)
    }

    /// The first moment with this reading.
    pub(super) fn when(self, reads: Moment) -> Moment {
        let counted = reads.0.saturating_sub(self.ahead).as_nanos() * 1000;
        let nanoseconds = counted.div_ceil(u128::from(self.rate));
        Moment(Duration::from_nanos(u64::try_from(nanoseconds).expect("runs are short")))
    }
}

/// One peer.
#[derive(Debug, Clone)]
pub struct PeerScenario {
    /// The stages that it asks for.
    pub choice: StageChoice,
    /// The stages that fit into its memory.
    pub fits: BTreeSet<Stage>,
    /// The stages that it can host at once, if the coordinator chooses them.
    pub room: StageRoom,
    /// The number of stages in a row that the coordinator may choose for it at most.
    pub longest: u16,
    /// Limits on the work that it accepts.
    pub limits: PeerLimits,
    /// Its start time; `None` waits for a [`Fault::Join`](super::Fault::Join).
    pub start: Option<Duration>,
    /// Durations of its tasks.
    pub compute: ComputeScenario,
    /// The number of its devices; one where stages are swapped.
    pub devices: NonZeroU16,
    /// Whether they divide its stages.
    pub divides_stages: bool,
    /// Its device, if that holds only some of its stages at a time. Its limits say so too.
    pub tiers: Option<TierScenario>,
    /// The name of its island.
    pub island: Option<IslandName>,
    /// Whether it archives every checkpoint.
    pub archive: bool,
    /// Its region.
    pub region: usize,
    /// Its clock.
    pub clock: Clock,
}

/// Durations of a peer's tasks.
#[derive(Debug, Clone)]
pub struct ComputeScenario {
    /// A forward pass of one stage.
    pub forward: Duration,
    /// A backward pass of one stage.
    pub backward: Duration,
    /// Whether the second half of a backward pass, its weights' gradients, comes with their addition, at stages that
    /// return a gradient.
    pub splits: bool,
    /// Any other task.
    pub other: Duration,
    /// Maximum random extension of each pass, in thousandths.
    pub jitter_per_mille: u64,
}
