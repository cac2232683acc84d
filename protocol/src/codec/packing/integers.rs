//! 64-bit integers in as few bytes as the largest of their neighbours needs.
//!
//! Sums of gradients in fixed point use the lower five of their eight bytes or so, how many depends on
//! the layer. Format: cut into blocks of [`BLOCK`] integers, of which the last may be shorter; first
//! a byte for each block, the width of its integers in bytes from 0 to 8, then the integers of all
//! blocks in order, each as the lowest bytes of its two's complement, little-endian.

use super::PackingError;

/// Integers that share a width.
pub(super) const BLOCK: usize = 64;

/// Bytes of an integer.
const WORD: usize = 8;

/// Packs whole little-endian integers; none when that does not make them fewer bytes.
pub(super) fn pack(raw: &[u8]) -> Option<Vec<u8>> {
    let words = raw.as_chunks::<WORD>().0;
    let widths: Vec<u8> = words.chunks(BLOCK).map(width_of).collect();
    let length = widths.len() + data_length(&widths, words.len());
    if length >= raw.len() {
        return None;
    }
    // Every integer is written whole, and the next one over what it has too many.
    let mut packed = vec![0; length + WORD];
    packed[..widths.len()].copy_from_slice(&widths);
    let mut at = widths.len();
    for (block, width) in words.chunks(BLOCK).zip(&widths) {
        let width = usize::from(*width);
        let room = &mut packed[at..at + block.len() * width + WORD];
        for (index, word) in block.iter().enumerate() {
            room[index * width..][..WORD].copy_from_slice(word);
        }
        at += block.len() * width;
    }
    packed.truncate(length);
    Some(packed)
}

/// Gives back the integers of `length` bytes.
pub(super) fn unpack(packed: &[u8], length: usize) -> Result<Vec<u8>, PackingError> {
    let count = length / WORD;
    let blocks = count.div_ceil(BLOCK);
    let damaged = |reason: &str| PackingError::Damaged { reason: reason.to_owned() };
    let (widths, data) =
        packed.split_at_checked(blocks).ok_or_else(|| damaged("its widths are cut short"))?;
    if widths.iter().any(|width| usize::from(*width) > WORD) {
        return Err(damaged("an integer has more than eight bytes"));
    }
    let expected = data_length(widths, count);
    if data.len() != expected {
        return Err(PackingError::Length { announced: blocks + expected, given: packed.len() });
    }
    let mut raw = vec![0; length];
    let mut at = 0;
    for (block, width) in raw.as_chunks_mut::<WORD>().0.chunks_mut(BLOCK).zip(widths) {
        let width = usize::from(*width);
        let end = at + block.len() * width;
        match data.get(at..end + WORD) {
            Some(ample) => widen(block, ample, width),
            None => {
                let mut ample = [0; (BLOCK + 1) * WORD];
                ample[..end - at].copy_from_slice(&data[at..end]);
                widen(block, &ample, width);
            }
        }
        at = end;
    }
    Ok(raw)
}

/// Reads integers of so many bytes from data that is eight bytes longer than they are.
fn widen(block: &mut [[u8; WORD]], ample: &[u8], width: usize) {
    if width == 0 {
        return block.fill([0; WORD]);
    }
    let shift = 8 * (WORD - width) as u32;
    for (index, word) in block.iter_mut().enumerate() {
        let read = *ample[index * width..].first_chunk().expect("it is ample");
        *word = (i64::from_le_bytes(read) << shift >> shift).to_le_bytes();
    }
}

/// Bytes of the integers of all blocks.
fn data_length(widths: &[u8], count: usize) -> usize {
    let numbers = |index: usize| BLOCK.min(count - index * BLOCK);
    widths.iter().enumerate().map(|(index, width)| numbers(index) * usize::from(*width)).sum()
}

/// Bytes that hold every integer of a block with its sign.
fn width_of(block: &[[u8; WORD]]) -> u8 {
    // What is left of a number without the repetitions of its sign.
    let used = block.iter().fold(0, |used, word| {
        let word = i64::from_le_bytes(*word);
        used | (word ^ (word >> 63)) as u64
    });
    if used == 0 && block.iter().all(|word| *word == [0; WORD]) {
        return 0;
    }
    (u64::BITS + 1 - used.leading_zeros()).div_ceil(8) as u8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn raw(numbers: &[i64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn the_format() {
        let mut numbers = vec![0; BLOCK];
        numbers.extend([-1, 127, -128]);
        let packed = pack(&raw(&numbers)).expect("smaller");
        assert_eq!(packed, [0, 1, 255, 127, 128]);
        numbers[BLOCK + 1] = 128;
        let packed = pack(&raw(&numbers)).expect("smaller");
        assert_eq!(packed, [0, 2, 255, 255, 128, 0, 128, 255]);
    }

    #[test]
    fn what_needs_every_byte_is_not_packed() {
        assert_eq!(pack(&raw(&[i64::MIN; 100])), None);
        assert_eq!(pack(&raw(&[i64::MAX; 100])), None);
        assert_eq!(pack(&[]), None);
    }

    #[test]
    fn damaged_bytes_are_refused() {
        let packed = pack(&raw(&[-5; 70])).expect("smaller");
        assert_eq!(packed.len(), 2 + 70);
        let refused = |packed: &[u8], length| unpack(packed, length).expect_err("damaged");
        assert!(matches!(refused(&packed[..1], 560), PackingError::Damaged { .. }));
        assert!(matches!(refused(&packed[..71], 560), PackingError::Length { .. }));
        assert!(matches!(refused(&[&packed[..], &[0]].concat(), 560), PackingError::Length { .. }));
        assert!(matches!(refused(&packed, 552), PackingError::Length { .. }));
        let mut wide = packed;
        wide[0] = 9;
        assert!(matches!(refused(&wide, 560), PackingError::Damaged { .. }));
    }

    proptest! {
        #[test]
        fn unpacking_gives_back_what_was_packed(
            numbers in prop::collection::vec((any::<i64>(), 0u32..64), 0..300),
        ) {
            let numbers: Vec<i64> = numbers.into_iter().map(|(number, by)| number >> by).collect();
            let raw = raw(&numbers);
            if let Some(packed) = pack(&raw) {
                prop_assert_eq!(unpack(&packed, raw.len()), Ok(raw));
            }
        }

        #[test]
        fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..200), count in 0usize..300) {
            if let Ok(numbers) = unpack(&noise, 8 * count) {
                prop_assert_eq!(numbers.len(), 8 * count);
            }
        }
    }
}
