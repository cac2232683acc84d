//! Packs 64-bit integers into as few bits as the largest of their neighbours needs, above the zeros that all of them
//! end with.
//!
//! Smaller and slower than whole bytes. Sums of numbers that were rounded to a few bits, each block to multiples of
//! a power of two, take little more than these bits. Format: the integers are divided into blocks of [`BLOCK`], of
//! which the last may be shorter. First come two bytes for each block: the zeros that its integers end with, and
//! the width in bits of what is above them. Then follow the blocks in order, each in whole bytes: the integers
//! without their zeros, as the lowest bits of their two's complement, little-endian.

use super::{BLOCK, PackingError, WORD, significant_bits};

/// How the integers of a block are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    zeros: u32,
    width: u32,
}

impl Shape {
    /// The shape for these integers.
    fn of(block: &[[u8; WORD]]) -> Self {
        let words = || block.iter().map(|word| i64::from_le_bytes(*word));
        let any = words().fold(0, |any, word| any | word);
        if any == 0 {
            return Self { zeros: 0, width: 0 };
        }
        let zeros = any.trailing_zeros();
        Self { zeros, width: significant_bits(words().map(|word| word >> zeros)) }
    }

    /// Bytes of so many integers.
    const fn bytes(self, integers: usize) -> usize {
        (integers * self.width as usize).div_ceil(8)
    }

    const fn mask(self) -> u64 {
        if self.width == 0 { 0 } else { u64::MAX >> (u64::BITS - self.width) }
    }
}

/// Packs whole little-endian integers; `None` if that does not reduce the bytes.
pub(super) fn pack(raw: &[u8]) -> Option<Vec<u8>> {
    let words = raw.as_chunks::<WORD>().0;
    let shapes: Vec<Shape> = words.chunks(BLOCK).map(Shape::of).collect();
    let blocks = || words.chunks(BLOCK).zip(&shapes);
    let length: usize = blocks().map(|(block, shape)| 2 + shape.bytes(block.len())).sum();
    if length >= raw.len() {
        return None;
    }
    let mut packed = Vec::with_capacity(length + WORD);
    packed.extend(shapes.iter().flat_map(|shape| [shape.zeros as u8, shape.width as u8]));
    for (block, shape) in blocks() {
        let end = packed.len() + shape.bytes(block.len());
        let (mut bits, mut filled) = (0u128, 0);
        for word in block {
            let word = (i64::from_le_bytes(*word) >> shape.zeros) as u64 & shape.mask();
            bits |= u128::from(word) << filled;
            filled += shape.width;
            if filled >= u64::BITS {
                packed.extend_from_slice(&(bits as u64).to_le_bytes());
                bits >>= u64::BITS;
                filled -= u64::BITS;
            }
        }
        packed.extend_from_slice(&(bits as u64).to_le_bytes());
        packed.truncate(end);
    }
    Some(packed)
}

/// Unpacks the integers to `length` bytes.
pub(super) fn unpack(packed: &[u8], length: usize) -> Result<Vec<u8>, PackingError> {
    let count = length / WORD;
    let blocks = count.div_ceil(BLOCK);
    let damaged = |reason: &str| PackingError::Damaged { reason: reason.to_owned() };
    let (shapes, data) =
        packed.split_at_checked(2 * blocks).ok_or_else(|| damaged("its widths are truncated"))?;
    let shapes = shapes.as_chunks::<2>().0.iter();
    let shapes: Vec<Shape> = shapes
        .map(|[zeros, width]| Shape { zeros: (*zeros).into(), width: (*width).into() })
        .collect();
    let is_too_wide =
        |shape: &Shape| shape.zeros >= u64::BITS || shape.zeros + shape.width > u64::BITS;
    if shapes.iter().any(is_too_wide) {
        return Err(damaged("an integer has more than 64 bits"));
    }
    let numbers = |index: usize| BLOCK.min(count - index * BLOCK);
    let sizes = shapes.iter().enumerate().map(|(index, shape)| shape.bytes(numbers(index)));
    let expected: usize = sizes.sum();
    if data.len() != expected {
        return Err(PackingError::Length { announced: 2 * blocks + expected, given: packed.len() });
    }
    let mut raw = vec![0; length];
    let mut rest = data;
    for (block, shape) in raw.as_chunks_mut::<WORD>().0.chunks_mut(BLOCK).zip(&shapes) {
        let (of_block, after) = rest.split_at(shape.bytes(block.len()));
        rest = after;
        // A window of 16 bytes holds any integer, wherever its first bit is in a byte.
        let mut padded = [0; BLOCK * WORD + 16];
        padded[..of_block.len()].copy_from_slice(of_block);
        let mut at = 0;
        for word in block {
            let window = padded[at / 8..].first_chunk().expect("it is padded");
            let bits = (u128::from_le_bytes(*window) >> (at % 8)) as u64 & shape.mask();
            let unused = u64::BITS - shape.width.max(1);
            *word = ((bits << unused) as i64 >> unused << shape.zeros).to_le_bytes();
            at += shape.width as usize;
        }
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::super::tests::raw;
    use super::*;

    #[test]
    fn the_format() {
        let mut numbers = vec![0; BLOCK];
        numbers.extend([-1 << 20, 3 << 20, -4 << 20]);
        let packed = pack(&raw(&numbers)).expect("smaller");
        // From the lowest bit on: 111, 011, 100.
        assert_eq!(packed, [0, 0, 20, 3, 0b0001_1111, 1]);
        assert_eq!(unpack(&packed, 8 * numbers.len()), Ok(raw(&numbers)));
    }

    #[test]
    fn integers_that_need_all_bits_are_not_packed() {
        assert_eq!(pack(&raw(&[i64::MAX, i64::MIN, 1])), None);
        assert_eq!(pack(&[]), None);
        let packed = pack(&raw(&[i64::MIN; 3])).expect("one bit above 63 zeros");
        assert_eq!(unpack(&packed, 24), Ok(raw(&[i64::MIN; 3])));
    }

    #[test]
    fn damaged_bytes_are_rejected() {
        let packed = pack(&raw(&[-5; 70])).expect("smaller");
        assert_eq!(packed.len(), 4 + 4 * 64 / 8 + 3);
        let rejected = |packed: &[u8], length| unpack(packed, length).expect_err("damaged");
        assert!(matches!(rejected(&packed[..3], 560), PackingError::Damaged { .. }));
        assert!(matches!(rejected(&packed[..38], 560), PackingError::Length { .. }));
        let longer = [&packed[..], &[0]].concat();
        assert!(matches!(rejected(&longer, 560), PackingError::Length { .. }));
        assert!(matches!(rejected(&packed, 544), PackingError::Length { .. }));
        let mut wide = packed;
        wide[1] = 65;
        assert!(matches!(rejected(&wide, 560), PackingError::Damaged { .. }));
        let empty = [64, 0];
        assert!(matches!(rejected(&empty, 8), PackingError::Damaged { .. }));
    }
}
