//! The text of tokens as they come.

use crate::text::TextCodec;

/// What stands for bytes that are no character, or not yet one.
const REPLACEMENT: char = '\u{fffd}';

/// Decodes tokens one by one into whole characters.
pub(crate) struct TextStream<'a> {
    codec: &'a TextCodec,
    /// The last tokens whose text was returned, and those after them.
    tokens: Vec<u32>,
    /// Number of the former. White space depends on the tokens before.
    returned: usize,
}

impl<'a> TextStream<'a> {
    pub(crate) fn new(codec: &'a TextCodec) -> Self {
        Self { codec, tokens: Vec::new(), returned: 0 }
    }

    /// Adds a token, and returns the text that has become whole: nothing while the last character lacks
    /// bytes.
    ///
    /// # Errors
    /// If the tokenizer does not know the token.
    pub(crate) fn push(&mut self, token: u32) -> anyhow::Result<String> {
        self.tokens.push(token);
        let text = self.held()?;
        if text.is_empty() || text.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        self.tokens.drain(..self.returned);
        self.returned = self.tokens.len();
        Ok(text)
    }

    /// The text that was held back. Invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// If the tokenizer does not know a token.
    pub(crate) fn finish(self) -> anyhow::Result<String> {
        self.held()
    }

    /// The text of the tokens that was not returned.
    fn held(&self) -> anyhow::Result<String> {
        let before = self.codec.decode(&self.tokens[..self.returned])?;
        let all = self.codec.decode(&self.tokens)?;
        let pairs = before.chars().zip(all.chars());
        let same = pairs.take_while(|(one, other)| one == other).map(|(one, _)| one.len_utf8());
        Ok(all[same.sum()..].to_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(bytes: &[u8]) -> Vec<String> {
        let codec = TextCodec::Bytes;
        let mut stream = TextStream::new(&codec);
        let push = |byte: &u8| stream.push(u32::from(*byte)).expect("a byte");
        let mut pieces: Vec<String> = bytes.iter().map(push).collect();
        pieces.push(stream.finish().expect("bytes"));
        pieces
    }

    #[test]
    fn characters_are_held_until_they_are_whole() {
        assert_eq!(pieces("aß€".as_bytes()), ["a", "", "ß", "", "", "€", ""]);
        assert_eq!(pieces(b"\xe2\x82"), ["", "", "\u{fffd}"]);
        assert_eq!(pieces(b"\xffa"), ["", "\u{fffd}a", ""]);
    }

    proptest! {
        #[test]
        fn the_pieces_are_the_text(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(0xe2), Just(0x82), Just(0xac), Just(b'a')], 0..40)
        ) {
            prop_assert_eq!(pieces(&bytes).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
