//! A row of tokens, and what its labels are.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::class::Class;

/// A row of N + 1 tokens and their classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The inputs are all tokens but the last, the labels all tokens but the first.
    pub tokens: Vec<u32>,
    /// The class of each token.
    pub classes: Vec<Class>,
    /// A base's log-probabilities of the pair in the row, where they were computed.
    pub reference: Option<PairLogProbs>,
}

/// The log-probabilities of a pair's completions: the chosen and the rejected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairLogProbs([u32; 2]);

impl PairLogProbs {
    /// These numbers; `None` unless they are finite and not positive.
    #[must_use]
    pub fn new(numbers: [f32; 2]) -> Option<Self> {
        Self::of_words(numbers.map(f32::to_bits))
    }

    /// The numbers with these bits; `None` unless they are finite and not positive.
    #[must_use]
    pub fn of_words(words: [u32; 2]) -> Option<Self> {
        shoal_protocol::label::reference_of(words).map(|_| Self(words))
    }

    /// The bits of both numbers, as f32.
    #[must_use]
    pub const fn words(self) -> [u32; 2] {
        self.0
    }

    /// Both numbers.
    #[must_use]
    pub fn numbers(self) -> [f32; 2] {
        self.0.map(f32::from_bits)
    }
}

/// The labels of one or more rows, by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Labels that are targets.
    pub targets: u64,
    /// Labels that are context only, or the first token of a document.
    pub masked: u64,
    /// Labels that are padding.
    pub padded: u64,
}

impl Counts {
    /// All labels; `None` on overflow.
    #[must_use]
    pub fn labels(&self) -> Option<u64> {
        self.targets.checked_add(self.masked)?.checked_add(self.padded)
    }

    /// Adds the labels of another row or shard.
    pub fn add(&mut self, other: &Self) {
        self.targets = self.targets.saturating_add(other.targets);
        self.masked = self.masked.saturating_add(other.masked);
        self.padded = self.padded.saturating_add(other.padded);
    }
}

impl Row {
    /// A row without log-probabilities.
    #[must_use]
    pub const fn new(tokens: Vec<u32>, classes: Vec<Class>) -> Self {
        Self { tokens, classes, reference: None }
    }

    /// The labels of the row, by class.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for class in self.classes.iter().skip(1) {
            match class {
                Class::Target => counts.targets += 1,
                Class::Masked | Class::First => counts.masked += 1,
                Class::Padding => counts.padded += 1,
            }
        }
        counts
    }

    /// The tokens of the chosen and of the rejected sequence; `None` if the row is no pair.
    #[must_use]
    pub fn pair(&self) -> Option<[Range<usize>; 2]> {
        pair_of(&self.classes)
    }

    /// Appends padding up to `length` tokens.
    pub(super) fn pad(&mut self, length: usize, pad: u32) {
        self.tokens.resize(length, pad);
        self.classes.resize(length, Class::Padding);
    }
}

/// The two documents of a pair, each with a target; `None` of other classes.
pub(crate) fn pair_of(classes: &[Class]) -> Option<[Range<usize>; 2]> {
    let end = classes.iter().position(|class| *class == Class::Padding).unwrap_or(classes.len());
    let mut starts = (0..end).filter(|place| classes[*place] == Class::First);
    let (first, second) = (starts.next()?, starts.next()?);
    let pair = [first..second, second..end];
    let has_target = |range: &Range<usize>| classes[range.clone()].contains(&Class::Target);
    (first == 0 && starts.next().is_none() && pair.iter().all(has_target)).then_some(pair)
}
