//! Packs 64-bit integers into as few bytes as the largest of their neighbours needs.
//!
//! Fixed-point sums of gradients use about the lower five of their eight bytes; the number depends
//! on the layer. Format: the integers are divided into blocks of [`BLOCK`], of which the last may
//! be shorter. First comes a byte for each block, the width of its integers in bytes from 0 to 8.
//! Then follow the integers of all blocks in order, each as the lowest bytes of its two's
//! complement, little-endian.

use super::{BLOCK, PackingError, WORD, significant_bits};

/// Calls a function with a width known at compile time, so that the compiler knows every bound of a
/// whole block. Integers of width 0 are all zero, and so is their destination.
macro_rules! of_width {
    ($width:expr, $function:ident($block:expr, $bytes:expr)) => {
        match $width {
            0 => {}
            1 => $function::<1>($block, $bytes),
            2 => $function::<2>($block, $bytes),
            3 => $function::<3>($block, $bytes),
            4 => $function::<4>($block, $bytes),
            5 => $function::<5>($block, $bytes),
            6 => $function::<6>($block, $bytes),
            7 => $function::<7>($block, $bytes),
            _ => $function::<8>($block, $bytes),
        }
    };
}

/// Packs whole little-endian integers; `None` if that does not reduce the bytes.
pub(super) fn pack(raw: &[u8]) -> Option<Vec<u8>> {
    let words = raw.as_chunks::<WORD>().0;
    let widths: Vec<u8> = words.chunks(BLOCK).map(width_of).collect();
    let length = widths.len() + data_length(&widths, words.len());
    if length >= raw.len() {
        return None;
    }
    // Every integer is written whole; the next one overwrites its excess bytes.
    let mut packed = vec![0; length + WORD];
    packed[..widths.len()].copy_from_slice(&widths);
    let mut at = widths.len();
    for (block, width) in words.chunks(BLOCK).zip(&widths) {
        let length = block.len() * usize::from(*width);
        of_width!(*width, narrow(block, &mut packed[at..at + length + WORD]));
        at += length;
    }
    packed.truncate(length);
    Some(packed)
}

/// Unpacks the integers to `length` bytes.
pub(super) fn unpack(packed: &[u8], length: usize) -> Result<Vec<u8>, PackingError> {
    let count = length / WORD;
    let blocks = count.div_ceil(BLOCK);
    let damaged = |reason: &str| PackingError::Damaged { reason: reason.to_owned() };
    let (widths, data) =
        packed.split_at_checked(blocks).ok_or_else(|| damaged("its widths are truncated"))?;
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
        let end = at + block.len() * usize::from(*width);
        match data.get(at..end + WORD) {
            Some(padded) => of_width!(*width, widen(block, padded)),
            None => {
                let mut padded = [0; (BLOCK + 1) * WORD];
                padded[..end - at].copy_from_slice(&data[at..end]);
                of_width!(*width, widen(block, &padded));
            }
        }
        at = end;
    }
    Ok(raw)
}

/// Writes integers of `WIDTH` bytes; `room` must have eight more bytes.
fn narrow<const WIDTH: usize>(block: &[[u8; WORD]], room: &mut [u8]) {
    let write = |block: &[[u8; WORD]], room: &mut [u8]| {
        for (index, word) in block.iter().enumerate() {
            room[index * WIDTH..][..WORD].copy_from_slice(word);
        }
    };
    match <&[_; BLOCK]>::try_from(block) {
        Ok(whole) => write(whole, &mut room[..BLOCK * WIDTH + WORD]),
        Err(_) => write(block, room),
    }
}

/// Reads integers of `WIDTH` bytes; `padded` must have eight more bytes.
fn widen<const WIDTH: usize>(block: &mut [[u8; WORD]], padded: &[u8]) {
    let read = |block: &mut [[u8; WORD]], padded: &[u8]| {
        let shift = 8 * (WORD - WIDTH) as u32;
        for (index, word) in block.iter_mut().enumerate() {
            let read = *padded[index * WIDTH..].first_chunk().expect("it is padded");
            *word = (i64::from_le_bytes(read) << shift >> shift).to_le_bytes();
        }
    };
    match <&mut [_; BLOCK]>::try_from(&mut *block) {
        Ok(whole) => read(whole, &padded[..BLOCK * WIDTH + WORD]),
        Err(_) => read(block, padded),
    }
}

/// Bytes of the integers of all blocks.
fn data_length(widths: &[u8], count: usize) -> usize {
    let numbers = |index: usize| BLOCK.min(count - index * BLOCK);
    widths.iter().enumerate().map(|(index, width)| numbers(index) * usize::from(*width)).sum()
}

/// The width in bytes that holds every integer of a block with its sign.
fn width_of(block: &[[u8; WORD]]) -> u8 {
    significant_bits(block.iter().map(|word| i64::from_le_bytes(*word))).div_ceil(8) as u8
}

#[cfg(test)]
mod tests {
    use super::super::tests::raw;
    use super::*;

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
    fn integers_that_need_all_bytes_are_not_packed() {
        assert_eq!(pack(&raw(&[i64::MIN; 100])), None);
        assert_eq!(pack(&raw(&[i64::MAX; 100])), None);
        assert_eq!(pack(&[]), None);
    }

    #[test]
    fn damaged_bytes_are_rejected() {
        let packed = pack(&raw(&[-5; 70])).expect("smaller");
        assert_eq!(packed.len(), 2 + 70);
        let rejected = |packed: &[u8], length| unpack(packed, length).expect_err("damaged");
        assert!(matches!(rejected(&packed[..1], 560), PackingError::Damaged { .. }));
        assert!(matches!(rejected(&packed[..71], 560), PackingError::Length { .. }));
        assert!(matches!(
            rejected(&[&packed[..], &[0]].concat(), 560),
            PackingError::Length { .. }
        ));
        assert!(matches!(rejected(&packed, 552), PackingError::Length { .. }));
        let mut wide = packed;
        wide[0] = 9;
        assert!(matches!(rejected(&wide, 560), PackingError::Damaged { .. }));
    }
}
