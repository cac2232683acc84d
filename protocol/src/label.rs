//! The word that travels with each token of a microbatch beside its activation: the token to
//! predict, whether it counts, and where documents begin.

use std::ops::Range;

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

/// The positions of a row that are the chosen and the rejected sequence of a pair: two documents, each with a target,
/// and perhaps one of padding without any. `None` of other rows.
#[must_use]
pub fn pair_of(labels: &[Label]) -> Option<[Range<usize>; 2]> {
    let mut starts = labels.iter().enumerate().skip(1).filter(|(_, label)| label.starts_document);
    let second = starts.next()?.0;
    let end = starts.next().map_or(labels.len(), |(place, _)| place);
    let pair = [0..second, second..end];
    let has_target = |range: Range<usize>| labels[range].iter().any(|label| label.target.is_some());
    let is_pair = pair.iter().cloned().all(has_target);
    (is_pair && starts.next().is_none() && !has_target(end..labels.len())).then_some(pair)
}

/// The log-probabilities of a reference, of a pair's chosen and rejected completion, in the words behind its labels.
/// `None` of other words than those of finite numbers that are not positive.
#[must_use]
pub fn reference_of(words: [u32; 2]) -> Option<[f32; 2]> {
    let numbers = words.map(f32::from_bits);
    numbers.iter().all(|number| number.is_finite() && *number <= 0.0).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::{Label, pair_of, reference_of};
    use proptest::prelude::*;

    #[test]
    fn a_pair_is_two_documents_with_targets() {
        let word = |text: char| Label {
            target: matches!(text, 't' | 'T').then_some(1),
            starts_document: matches!(text, 'M' | 'T'),
            padding: false,
        };
        let pair = |text: &str| pair_of(&text.chars().map(word).collect::<Vec<_>>());
        assert_eq!(pair("MttMmt"), Some([0..3, 3..6]));
        assert_eq!(pair("MttTmMmm"), Some([0..3, 3..5]));
        for other in ["", "M", "Mtt", "MmmMtt", "MttMmm", "MttMttMt", "MtMtMmMm"] {
            assert_eq!(pair(other), None, "{other}");
        }
    }

    #[test]
    fn a_reference_is_finite_and_not_positive() {
        let words = |numbers: [f32; 2]| reference_of(numbers.map(f32::to_bits));
        assert_eq!(words([-1.5, 0.0]), Some([-1.5, 0.0]));
        for other in [f32::NAN, f32::NEG_INFINITY, 0.5] {
            assert_eq!(words([-1.0, other]), None);
        }
    }

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
