//! The bytes of a row.

use shoal_protocol::manifest::TokenWidth;

use crate::class::Class;
use crate::pack::{PairLogProbs, Row};

/// The size and encoding of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Inputs of a row, N; a row has N + 1 tokens.
    pub context: u32,
    /// Size of a token.
    pub width: TokenWidth,
    /// Token ids are below this number.
    pub vocabulary: u32,
    /// Whether a base's log-probabilities of its pair follow a row.
    pub has_reference: bool,
}

/// Bytes of the log-probabilities of a pair.
const REFERENCE_BYTES: usize = 8;

/// Why the bytes of a row are invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// Too few or too many bytes.
    #[error("it has {found} bytes instead of {expected}")]
    Length {
        /// Bytes found.
        found: usize,
        /// Bytes of a row.
        expected: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {place} is {token}, outside the vocabulary of {vocabulary}")]
    Token {
        /// Position in the row.
        place: usize,
        /// The id.
        token: u32,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
    /// A class that cannot be at its place.
    #[error("token {place} is padding before the end of the row, or its first token")]
    Padding {
        /// Position in the row.
        place: usize,
    },
    /// Bits after the last class that are not zero.
    #[error("the bits after its last class are not zero")]
    SpareBits,
    /// Log-probabilities that are none.
    #[error("the log-probabilities of its pair are not finite, or positive")]
    Reference,
}

impl Layout {
    /// The width in which ids of a vocabulary are stored.
    #[must_use]
    pub const fn width_of(vocabulary: u32) -> TokenWidth {
        if vocabulary <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 }
    }

    /// Tokens of a row.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.context as usize + 1
    }

    const fn token_bytes(&self) -> usize {
        self.tokens() * self.width.size()
    }

    const fn class_bytes(&self) -> usize {
        self.tokens().div_ceil(4)
    }

    /// Bytes of a row.
    #[must_use]
    pub const fn row_bytes(&self) -> usize {
        let reference = if self.has_reference { REFERENCE_BYTES } else { 0 };
        self.token_bytes() + self.class_bytes() + reference
    }

    /// Appends the bytes of a row to `bytes`. A row without log-probabilities where the layout has some gets zeros.
    pub fn encode(&self, row: &Row, bytes: &mut Vec<u8>) {
        let width = self.width.size();
        for token in &row.tokens {
            bytes.extend_from_slice(&token.to_le_bytes()[..width]);
        }
        for group in row.classes.chunks(4) {
            let packed = group.iter().rev().fold(0, |byte, class| byte << 2 | u8::from(*class));
            bytes.push(packed);
        }
        if self.has_reference {
            let words = row.reference.map_or([0; 2], PairLogProbs::words);
            bytes.extend(words.into_iter().flat_map(u32::to_le_bytes));
        }
    }

    /// The row with these bytes.
    ///
    /// # Errors
    /// If the length is wrong, an id is outside the vocabulary, or a class cannot be at its place.
    pub fn decode(&self, bytes: &[u8]) -> Result<Row, RowError> {
        if bytes.len() != self.row_bytes() {
            return Err(RowError::Length { found: bytes.len(), expected: self.row_bytes() });
        }
        let (token_bytes, rest) = bytes.split_at(self.token_bytes());
        let (class_bytes, reference) = rest.split_at(self.class_bytes());
        let mut tokens = Vec::with_capacity(self.tokens());
        for (place, stored) in token_bytes.chunks_exact(self.width.size()).enumerate() {
            let mut word = [0; 4];
            word[..stored.len()].copy_from_slice(stored);
            let token = u32::from_le_bytes(word);
            if token >= self.vocabulary {
                return Err(RowError::Token { place, token, vocabulary: self.vocabulary });
            }
            tokens.push(token);
        }
        let mut classes = Vec::with_capacity(self.tokens());
        let mut padding = false;
        for place in 0..self.tokens() {
            let class = Class::from_bits(class_bytes[place / 4] >> (place % 4 * 2));
            let padded = class == Class::Padding;
            if padded && place == 0 || padding && !padded {
                return Err(RowError::Padding { place: place.saturating_sub(1) });
            }
            padding = padded;
            classes.push(class);
        }
        let used = self.tokens() % 4 * 2;
        if used > 0 && class_bytes.last().is_some_and(|last| last >> used != 0) {
            return Err(RowError::SpareBits);
        }
        let reference = match *reference.as_chunks::<4>().0 {
            [chosen, rejected] => {
                let words = [chosen, rejected].map(u32::from_le_bytes);
                Some(PairLogProbs::of_words(words).ok_or(RowError::Reference)?)
            }
            _ => None,
        };
        Ok(Row { tokens, classes, reference })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_survive(
            row in prop::collection::vec((0u32..70_000, 0u8..3), 2..40),
            padded in 0usize..10,
            wide: bool,
            reference in prop::option::of([-1e4f32..=0.0, -1e4f32..=0.0]),
        ) {
            let vocabulary = if wide { 70_000 } else { 1000 };
            let mut tokens: Vec<u32> = row.iter().map(|(token, _)| token % vocabulary).collect();
            let mut classes: Vec<Class> =
                row.iter().map(|(_, class)| Class::from_bits(*class)).collect();
            tokens.extend(vec![0; padded]);
            classes.extend(vec![Class::Padding; padded]);
            let context = tokens.len() as u32 - 1;
            let (width, has_reference) = (Layout::width_of(vocabulary), reference.is_some());
            let layout = Layout { context, width, vocabulary, has_reference };
            let reference = reference.and_then(PairLogProbs::new);
            let row = Row { tokens, classes, reference };
            let mut bytes = Vec::new();
            layout.encode(&row, &mut bytes);
            prop_assert_eq!(bytes.len(), layout.row_bytes());
            prop_assert_eq!(layout.decode(&bytes), Ok(row));
        }

        #[test]
        fn foreign_bytes_are_an_error_or_a_row(
            bytes: Vec<u8>, context in 1u32..20, has_reference: bool, filler: u8,
        ) {
            let width = TokenWidth::U16;
            let layout = Layout { context, width, vocabulary: 30_000, has_reference };
            let _ = layout.decode(&bytes);
            let mut bytes = bytes;
            bytes.resize(layout.row_bytes(), filler);
            if let Ok(row) = layout.decode(&bytes) {
                let mut again = Vec::new();
                layout.encode(&row, &mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }

    #[test]
    fn invalid_rows_are_named() {
        let width = TokenWidth::U16;
        let layout = Layout { context: 2, width, vocabulary: 10, has_reference: false };
        let row = |tokens: [u8; 3], classes: u8| {
            let [a, b, c] = tokens;
            layout.decode(&[a, 0, b, 0, c, 0, classes])
        };
        assert!(row([1, 2, 3], 0b00_01_01_10).is_ok());
        let token = RowError::Token { place: 1, token: 10, vocabulary: 10 };
        assert_eq!(row([1, 10, 3], 0), Err(token));
        assert_eq!(row([1, 2, 3], 0b01_11_00), Err(RowError::Padding { place: 1 }));
        assert_eq!(row([1, 2, 3], 0b11), Err(RowError::Padding { place: 0 }));
        assert_eq!(row([1, 2, 3], 0b01_00_00_00), Err(RowError::SpareBits));
        let length = RowError::Length { found: 1, expected: 7 };
        assert_eq!(layout.decode(&[0]), Err(length));
        let layout = Layout { has_reference: true, ..layout };
        let row = |chosen: f32| {
            let reference = [chosen, -1.0].map(f32::to_le_bytes).concat();
            layout.decode(&[&[1, 0, 2, 0, 3, 0, 0][..], &reference].concat())
        };
        assert!(row(-2.0).is_ok());
        for chosen in [1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(row(chosen), Err(RowError::Reference));
        }
    }
}
