//! The word that travels with each token of a microbatch beside its activation: the token to
//! predict, whether it counts, and where documents begin.

/// Number of ids that a label can hold; a manifest's vocabulary is at most this.
pub const VOCABULARY: u32 = 1 << 20;

/// Bit of a position whose target does not count towards the loss.
const IGNORED: u32 = 1 << 31;

/// Bit of a position whose input token begins a document.
const STARTS_DOCUMENT: u32 = 1 << 30;

/// Bit of a position whose target is padding.
const PADDING: u32 = 1 << 29;

/// The label of one position of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// The token that follows; `None` does not count towards the loss.
    pub target: Option<u32>,
    /// Whether the position's own token begins a document. Attention does not cross it.
    pub starts_document: bool,
    /// Whether the token that follows is padding, which never counts.
    pub padding: bool,
}

impl Label {
    /// The label of a position that counts, within a document.
    #[must_use]
    pub fn of(target: u32) -> Self {
        Self { target: Some(target), starts_document: false, padding: false }
    }

    /// The encoding, sent as a little-endian u32.
    ///
    /// # Panics
    /// If the target is no id of any vocabulary.
    #[must_use]
    pub fn to_word(self) -> u32 {
        let target = self.target.unwrap_or(IGNORED);
        assert!(self.target.is_none_or(|target| target < VOCABULARY), "an id of a vocabulary");
        assert!(self.target.is_none() || !self.padding, "padding does not count");
        let flag = |set, bit| if set { bit } else { 0 };
        target | flag(self.starts_document, STARTS_DOCUMENT) | flag(self.padding, PADDING)
    }

    /// Decodes a word. The target may be outside of the run's vocabulary.
    #[must_use]
    pub fn from_word(word: u32) -> Self {
        let target = word & !(IGNORED | STARTS_DOCUMENT | PADDING);
        let padding = word & PADDING != 0;
        Self {
            target: (word & IGNORED == 0 && !padding).then_some(target),
            starts_document: word & STARTS_DOCUMENT != 0,
            padding,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Label;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn labels_read_back(
            target in prop::option::of(0..super::VOCABULARY),
            starts_document: bool,
            padding: bool,
        ) {
            let padding = padding && target.is_none();
            let label = Label { target, starts_document, padding };
            prop_assert_eq!(Label::from_word(label.to_word()), label);
        }

        #[test]
        fn every_word_decodes(word: u32) {
            let label = Label::from_word(word);
            prop_assert!(label.target.is_none() || !label.padding);
        }
    }
}
