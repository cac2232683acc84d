//! The class of a token: its part in the loss.

use serde::{Deserialize, Serialize};

/// The part of a token in the loss. A row stores two bits for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
#[repr(u8)]
pub enum Class {
    /// Context only: the token is never a target.
    Masked = 0,
    /// A target of the token before it.
    Target = 1,
    /// The first token of a document: never a target, since the token before it belongs to another
    /// document.
    First = 2,
    /// Filler at the end of a row.
    Padding = 3,
}

impl Class {
    /// All classes, by number.
    pub const ALL: [Self; 4] = [Self::Masked, Self::Target, Self::First, Self::Padding];

    /// The class with the number in the lowest two bits.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Masked,
            1 => Self::Target,
            2 => Self::First,
            _ => Self::Padding,
        }
    }
}

impl From<Class> for u8 {
    fn from(class: Class) -> Self {
        class as Self
    }
}

/// The error of a number that is no class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no class of a token: it must be 0 to 3")]
pub struct ClassError(u8);

impl TryFrom<u8> for Class {
    type Error = ClassError;

    fn try_from(number: u8) -> Result<Self, ClassError> {
        if number < 4 { Ok(Self::from_bits(number)) } else { Err(ClassError(number)) }
    }
}
