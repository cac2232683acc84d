//! The sums of a stage over the devices of an island.

use std::ops::Range;

use crate::error::Result;
use crate::train::accumulator::Accumulator;

/// The sums of each step that can run at the same time, used in turn.
#[derive(Debug)]
pub(super) enum Sums {
    /// In the machine's memory.
    Joined(Vec<Accumulator>),
    /// On the devices, each with its part, in their order. Those that compute a pass together add to no sum twice.
    Parts(Vec<Vec<Accumulator>>),
}

impl Sums {
    /// Passes the sums of a range of the stage's flat vector to a function: i64, little-endian.
    pub(super) fn read<T>(
        &self,
        turn: usize,
        range: Range<usize>,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        match self {
            Self::Joined(sums) => sums[turn].read(range, read),
            Self::Parts(parts) => {
                let mut all = vec![0i64; range.len()];
                parts[turn].iter().try_for_each(|part| part.add_to(&range, &mut all))?;
                Ok(read(bytemuck::cast_slice(&all)))
            }
        }
    }

    /// Does something with each accumulator of a turn, in order.
    pub(super) fn each<T>(
        &self,
        turn: usize,
        work: impl FnMut(&Accumulator) -> Result<T>,
    ) -> Result<Vec<T>> {
        match self {
            Self::Joined(sums) => sums[turn..=turn].iter().map(work).collect(),
            Self::Parts(parts) => parts[turn].iter().map(work).collect(),
        }
    }

    /// Those that are in the machine's memory for all devices.
    pub(super) fn joined(&self) -> Option<&[Accumulator]> {
        match self {
            Self::Joined(sums) => Some(sums),
            Self::Parts(_) => None,
        }
    }

    /// Clears some of them; devices that have parts clear their own.
    pub(super) fn clear(&self, turns: Range<usize>) -> Result<()> {
        match self {
            Self::Joined(sums) => sums[turns].iter().try_for_each(Accumulator::clear),
            Self::Parts(_) => Ok(()),
        }
    }
}
