//! The hashes of a file's pieces, which determine the hash of the file.
//!
//! BLAKE3 is a tree over chunks of 1024 bytes, and a piece of 1 MiB is a whole subtree of it
//! (O'Connor et al., BLAKE3, section 2.1). So a peer that knows the hash of a file can check a list
//! of its pieces' hashes, and then every piece alone, from any sender and in any order.

use blake3::hazmat::{
    HasherExt, Mode, left_subtree_len, merge_subtrees_non_root, merge_subtrees_root,
};

use crate::ids::ContentHash;
use crate::limits;

/// Bytes of one hash.
pub const HASH: usize = 32;

/// The hashes of all pieces of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PieceHashes {
    hashes: Vec<[u8; HASH]>,
}

/// The number of pieces of a file of `length` bytes; at least one.
#[must_use]
pub fn pieces(length: u64) -> u64 {
    length.div_ceil(limits::FILE_PIECE.0).max(1)
}

/// Position and length of a piece of a file of `length` bytes.
#[must_use]
pub fn piece_at(length: u64, index: u64) -> (u64, usize) {
    let position = index * limits::FILE_PIECE.0;
    (position, limits::FILE_PIECE.0.min(length - position) as usize)
}

/// The hash of one piece of a file of `length` bytes.
///
/// # Panics
/// If the file has no such piece.
#[must_use]
pub fn piece_hash(length: u64, index: u64, piece: &[u8]) -> [u8; HASH] {
    assert!(index < pieces(length), "a file has no piece behind its end");
    let mut hasher = blake3::Hasher::new();
    if pieces(length) == 1 {
        return *hasher.update(piece).finalize().as_bytes();
    }
    hasher.set_input_offset(index * limits::FILE_PIECE.0).update(piece).finalize_non_root()
}

impl PieceHashes {
    /// Checks a list of piece hashes against the hash of the file.
    #[must_use]
    pub fn checked(hash: ContentHash, length: u64, hashes: Vec<[u8; HASH]>) -> Option<Self> {
        let whole = hashes.len() as u64 == pieces(length) && root(&hashes, length) == hash.0;
        whole.then_some(Self { hashes })
    }

    /// Whether these bytes are piece `index` of the file.
    #[must_use]
    pub fn holds(&self, length: u64, index: u64, piece: &[u8]) -> bool {
        let known = usize::try_from(index).ok().and_then(|index| self.hashes.get(index));
        known.is_some_and(|known| *known == piece_hash(length, index, piece))
    }
}

fn root(hashes: &[[u8; HASH]], length: u64) -> [u8; HASH] {
    let Some((left, right)) = halves(hashes, length) else { return hashes[0] };
    *merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).as_bytes()
}

fn subtree((hashes, length): (&[[u8; HASH]], u64)) -> [u8; HASH] {
    let Some((left, right)) = halves(hashes, length) else { return hashes[0] };
    merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
}

type Half<'a> = (&'a [[u8; HASH]], u64);

/// The two halves of a subtree, each with its length in bytes; `None` for a single piece.
fn halves(hashes: &[[u8; HASH]], length: u64) -> Option<(Half<'_>, Half<'_>)> {
    if hashes.len() < 2 {
        return None;
    }
    let left = left_subtree_len(length);
    let (first, second) = hashes.split_at((left / limits::FILE_PIECE.0) as usize);
    Some(((first, left), (second, length - left)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = limits::FILE_PIECE.0 as usize;

    fn file(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }

    fn hashes(file: &[u8]) -> Vec<[u8; HASH]> {
        let length = file.len() as u64;
        let piece = |index: u64| {
            let start = index as usize * PIECE;
            piece_hash(length, index, &file[start..file.len().min(start + PIECE)])
        };
        (0..pieces(length)).map(piece).collect()
    }

    #[test]
    fn piece_hashes_combine_to_the_hash_of_the_file() {
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE, 5 * PIECE + 17] {
            let file = file(length);
            let hash = ContentHash::of(&file);
            let known = PieceHashes::checked(hash, length as u64, hashes(&file));
            let known = known.unwrap_or_else(|| panic!("{length} bytes"));
            for (index, piece) in (0..).zip(file.chunks(PIECE)) {
                assert!(known.holds(length as u64, index, piece));
                let mut other = piece.to_vec();
                other[0] ^= 1;
                assert!(!known.holds(length as u64, index, &other));
            }
        }
    }

    #[test]
    fn a_wrong_list_of_piece_hashes_is_rejected() {
        let file = file(3 * PIECE + 5);
        let (hash, length) = (ContentHash::of(&file), file.len() as u64);
        let right = hashes(&file);
        let rejected =
            |hashes: Vec<[u8; HASH]>| PieceHashes::checked(hash, length, hashes).is_none();
        assert!(!rejected(right.clone()));
        assert!(rejected(right[..3].to_vec()));
        assert!(rejected([&right[..], &right[..1]].concat()));
        assert!(rejected(Vec::new()));
        let mut swapped = right.clone();
        swapped.swap(0, 1);
        assert!(rejected(swapped));
        let known = PieceHashes::checked(hash, length, right).expect("right");
        assert!(!known.holds(length, 0, &file[PIECE..2 * PIECE]), "another piece of it");
        assert!(PieceHashes::checked(ContentHash::of(b"other"), length, hashes(&file)).is_none());
    }
}
