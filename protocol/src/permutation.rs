//! A shuffled order without a table.

/// A keyed permutation of `0..size`: a Feistel network (Luby and Rackoff, 1988) over the next
/// larger power of four, followed along its cycles until the value is below `size` (Black and
/// Rogaway, 2002).
#[derive(Debug, Clone)]
pub struct Permutation {
    key: [u8; 32],
    size: u64,
    half_bits: u32,
}

impl Permutation {
    const ROUNDS: u8 = 6;

    /// The permutation of `0..size` that the key selects. A size of 0 counts as 1.
    #[must_use]
    pub fn new(key: [u8; 32], size: u64) -> Self {
        let size = size.max(1);
        let bits = u64::BITS - (size - 1).leading_zeros();
        Self { key, size, half_bits: bits.div_ceil(2).max(1) }
    }

    /// The value at `place`. A place outside `0..size` is taken modulo the size.
    #[must_use]
    pub fn at(&self, place: u64) -> u64 {
        let mut value = self.encipher(place % self.size);
        while value >= self.size {
            value = self.encipher(value);
        }
        value
    }

    /// The place of `value`: the inverse of [`Permutation::at`].
    #[must_use]
    pub fn place_of(&self, value: u64) -> u64 {
        let mut place = self.decipher(value % self.size);
        while place >= self.size {
            place = self.decipher(place);
        }
        place
    }

    fn encipher(&self, value: u64) -> u64 {
        let (mut left, mut right) = (value >> self.half_bits, value & self.mask());
        for round in 0..Self::ROUNDS {
            (left, right) = (right, left ^ self.round(round, right));
        }
        (left << self.half_bits) | right
    }

    fn decipher(&self, value: u64) -> u64 {
        let (mut left, mut right) = (value >> self.half_bits, value & self.mask());
        for round in (0..Self::ROUNDS).rev() {
            (left, right) = (right ^ self.round(round, left), left);
        }
        (left << self.half_bits) | right
    }

    fn mask(&self) -> u64 {
        (1 << self.half_bits) - 1
    }

    fn round(&self, round: u8, half: u64) -> u64 {
        let mut message = [round; 9];
        message[1..].copy_from_slice(&half.to_le_bytes());
        let hash = blake3::keyed_hash(&self.key, &message);
        let mut word = [0; 8];
        word.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(word) & self.mask()
    }
}

#[cfg(test)]
mod tests {
    use super::Permutation;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_place_is_taken_once(key: [u8; 32], size in 1u64..2000) {
            let permutation = Permutation::new(key, size);
            let mut values: Vec<u64> = (0..size).map(|place| permutation.at(place)).collect();
            for (place, value) in values.iter().enumerate() {
                prop_assert_eq!(permutation.place_of(*value), place as u64);
            }
            values.sort_unstable();
            prop_assert!(values.into_iter().eq(0..size));
        }

        #[test]
        fn large_sizes_have_an_inverse(key: [u8; 32], size in 1u64.., place: u64) {
            let permutation = Permutation::new(key, size);
            let value = permutation.at(place % size);
            prop_assert!(value < size);
            prop_assert_eq!(permutation.place_of(value), place % size);
        }
    }

    #[test]
    fn keys_have_different_orders() {
        let order = |key| {
            let permutation = Permutation::new([key; 32], 100);
            (0..100).map(|place| permutation.at(place)).collect::<Vec<_>>()
        };
        assert_ne!(order(0), order(1));
        assert_ne!(order(0), (0..100).collect::<Vec<_>>());
    }
}
