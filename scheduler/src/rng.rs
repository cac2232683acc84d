//! Seeded randomness. Every caller supplies the seed.

use std::ops::RangeInclusive;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Hashes two numbers into one, for orders that look random.
pub(crate) fn mixed(one: u64, other: u64) -> u64 {
    let mixed = (one ^ other).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// A deterministic generator of random numbers.
#[derive(Debug, Clone)]
pub struct Rng(ChaCha8Rng);

impl Rng {
    /// Creates the generator for a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// A random number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A random number in a range.
    pub(crate) fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (start, end) = range.into_inner();
        start + self.number() % (end - start + 1)
    }

    /// True with a probability of `per_mille` thousandths.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.number() % 1000 < per_mille
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0..=choices.len() as u64 - 1) as usize]
    }

    pub(crate) fn up_to(&mut self, most: Duration) -> Duration {
        self.microseconds(0..=most.as_micros() as u64)
    }

    pub(crate) fn microseconds(&mut self, range: RangeInclusive<u64>) -> Duration {
        Duration::from_micros(self.within(range))
    }

    /// Shuffles items uniformly (Fisher and Yates 1938).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.within(0..=last as u64) as usize);
        }
    }
}
