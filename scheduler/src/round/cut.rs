//! The division of a stage's vector in a round.

use shoal_protocol::limits;

/// The division of a stage's vector in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundCut {
    /// Elements in one block. Each member's part begins at a multiple of it.
    pub block_elements: usize,
    /// Elements in one piece, at most; a multiple of the block.
    pub piece_elements: usize,
}

impl Default for RoundCut {
    fn default() -> Self {
        Self {
            block_elements: limits::ROUND_BLOCK_ELEMENTS,
            piece_elements: limits::ROUND_PIECE_ELEMENTS,
        }
    }
}
