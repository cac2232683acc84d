//! Pieces of a file with a length and a checksum.
//!
//! Each piece is `length (u32) | first 8 bytes of its BLAKE3 | bytes`, little-endian, and is
//! flushed before the next begins. So a process that dies while it writes leaves at most one torn
//! piece, the last. Nothing relied on that piece yet, and it is truncated. A wrong piece before
//! others is damage.

/// Bytes before each piece: its length and its checksum.
pub const HEAD: usize = 12;

/// A piece with its header.
///
/// # Panics
/// If the piece has 4 GiB or more, which none has.
pub fn seal(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("a piece is far smaller");
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&blake3::hash(body).as_bytes()[..8]);
    bytes.extend_from_slice(body);
    bytes
}

/// The pieces in a file and the bytes that they take up; the bytes after them are torn.
///
/// # Errors
/// The offset of a wrong piece before others.
pub fn read_all(bytes: &[u8], cap: usize) -> Result<(Vec<&[u8]>, usize), usize> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some(body) = piece_at(bytes, at, cap) {
        pieces.push(body);
        at += HEAD + body.len();
    }
    // A wrong length hides where the next piece begins, so every offset is tried.
    let others_follow = (at + 1..bytes.len()).any(|later| piece_at(bytes, later, cap).is_some());
    if others_follow { Err(at) } else { Ok((pieces, at)) }
}

/// The piece at this offset, if it is whole and its checksum fits. No piece is empty.
fn piece_at(bytes: &[u8], at: usize, cap: usize) -> Option<&[u8]> {
    let (head, rest) = bytes.get(at..)?.split_at_checked(HEAD)?;
    let length = u32::from_le_bytes(*head.first_chunk().expect("a head has a length")) as usize;
    if length == 0 || length > cap {
        return None;
    }
    let body = rest.get(..length)?;
    (blake3::hash(body).as_bytes()[..8] == head[4..]).then_some(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: usize = 1 << 16;

    fn written() -> (Vec<u8>, Vec<usize>) {
        let mut bytes = Vec::new();
        let mut ends = vec![0];
        for length in [1, 300, 2, 40] {
            bytes.extend(seal(&vec![length as u8; length]));
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    #[test]
    fn a_file_truncated_at_any_byte_keeps_its_whole_pieces() {
        let (bytes, ends) = written();
        for end in 0..=bytes.len() {
            let (pieces, whole) = read_all(&bytes[..end], CAP).expect("torn at most");
            let kept = ends.iter().filter(|whole| **whole <= end).count() - 1;
            assert_eq!((pieces.len(), whole), (kept, ends[kept]));
        }
    }

    #[test]
    fn a_changed_byte_before_the_last_piece_is_damage() {
        let (bytes, ends) = written();
        let last = ends[ends.len() - 2];
        for place in 0..bytes.len() {
            for flip in [1, 0x80] {
                let mut changed = bytes.clone();
                changed[place] ^= flip;
                let found = read_all(&changed, CAP);
                let piece = ends.iter().rposition(|begin| *begin <= place).expect("the first");
                if place < last {
                    assert_eq!(found, Err(ends[piece]), "byte {place}");
                } else {
                    assert_eq!(found.expect("torn").1, last, "byte {place}");
                }
            }
        }
    }

    #[test]
    fn a_tail_that_never_reached_the_disk_is_torn() {
        let (mut bytes, ends) = written();
        bytes.resize(bytes.len() + 4096, 0);
        assert_eq!(read_all(&bytes, CAP).expect("torn").1, ends[ends.len() - 1]);
    }
}
