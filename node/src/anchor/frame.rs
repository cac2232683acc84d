//! Pieces of a file that show whether they are whole.
//!
//! Each is `length (u32) | first 8 bytes of its BLAKE3 | bytes`, little-endian, and was on the disk
//! before the next was begun. So a process that dies while it writes leaves at most one that is not
//! whole, the last: it was nobody's yet, and is cut off. A wrong one that others follow is damage.

/// Bytes before each piece: its length and its check.
pub(super) const HEAD: usize = 12;

/// The bytes with their head.
///
/// # Panics
/// When they are 4 GiB or more, which no piece is.
pub(super) fn seal(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("a piece is far smaller");
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&blake3::hash(body).as_bytes()[..8]);
    bytes.extend_from_slice(body);
    bytes
}

/// The pieces in a file and how many bytes they take up; what follows is torn.
///
/// # Errors
/// The place of a wrong piece that is not the last.
pub(super) fn read_all(bytes: &[u8], cap: usize) -> Result<(Vec<&[u8]>, usize), usize> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some(body) = piece_at(bytes, at, cap) {
        pieces.push(body);
        at += HEAD + body.len();
    }
    // A wrong length says nothing of where the next one begins, so it may be anywhere.
    let others_follow = (at + 1..bytes.len()).any(|later| piece_at(bytes, later, cap).is_some());
    if others_follow { Err(at) } else { Ok((pieces, at)) }
}

/// The piece that begins here, if it is whole and right. None is empty.
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
    fn what_is_cut_at_any_byte_keeps_what_was_whole() {
        let (bytes, ends) = written();
        for end in 0..=bytes.len() {
            let (pieces, whole) = read_all(&bytes[..end], CAP).expect("torn at most");
            let kept = ends.iter().filter(|whole| **whole <= end).count() - 1;
            assert_eq!((pieces.len(), whole), (kept, ends[kept]));
        }
    }

    #[test]
    fn a_changed_byte_before_the_last_piece_is_damage_wherever_it_is() {
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
