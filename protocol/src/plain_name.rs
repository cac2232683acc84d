//! Short plain texts by which people know things.

use std::fmt;
use std::str::FromStr;

/// A text of 1 to [`LONGEST`] characters: ASCII letters, digits, `.`, `_` and `-`. It is safe in a terminal, a web page, a
/// file name and a label of a metric.
#[derive(
    Debug,
    Clone,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    bincode::Encode,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(into = "String", try_from = "String")]
struct PlainName(String);

/// The most characters of a name.
pub const LONGEST: usize = 32;

/// Why a text is no name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a name has 1 to 32 letters (a-z, A-Z), digits, dots, hyphens or underscores")]
pub struct InvalidName;

fn is_plain(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "._-".contains(letter)
}

impl FromStr for PlainName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let valid = (1..=LONGEST).contains(&text.len()) && text.chars().all(is_plain);
        valid.then(|| Self(text.to_owned())).ok_or(InvalidName)
    }
}

impl TryFrom<String> for PlainName {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PlainName> for String {
    fn from(name: PlainName) -> Self {
        name.0
    }
}

/// Rejects texts that are no names. A longer one is refused before it is read.
impl<C> bincode::Decode<C> for PlainName {
    fn decode<D: bincode::de::Decoder<Context = C>>(
        decoder: &mut D,
    ) -> Result<Self, bincode::error::DecodeError> {
        let wrong = || bincode::error::DecodeError::Other("invalid name");
        let length = u64::decode(decoder)?;
        if !(1..=LONGEST as u64).contains(&length) {
            return Err(wrong());
        }
        let mut bytes = Vec::with_capacity(LONGEST);
        for _ in 0..length {
            bytes.push(u8::decode(decoder)?);
        }
        let text = String::from_utf8(bytes).map_err(|_| wrong())?;
        text.parse().map_err(|_| wrong())
    }
}

bincode::impl_borrow_decode!(PlainName);

/// Defines a type of names.
macro_rules! name {
    ($(#[$about:meta])* $type:ident) => {
        $(#[$about])*
        #[derive(
            Debug,
            Clone,
            PartialEq,
            Eq,
            PartialOrd,
            Ord,
            bincode::Encode,
            bincode::Decode,
            serde::Serialize,
            serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $type(PlainName);

        impl $type {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0.0
            }
        }

        impl FromStr for $type {
            type Err = InvalidName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

name! {
    /// The name that the operator of a peer gives the fast network that it is in. Peers of one stage that give the
    /// same name sum their gradients among themselves before they send them on.
    IslandName
}
name! {
    /// The name that the operator of a peer gives it. It tells people which machine it is, and decides nothing:
    /// several peers may have the same.
    PeerName
}

impl PeerName {
    /// The name that is nearest to a text: other characters become hyphens, and the end is cut off. `None` if no
    /// letter or digit is left.
    #[must_use]
    pub fn nearest(text: &str) -> Option<Self> {
        let plain = |letter: char| if is_plain(letter) { letter } else { '-' };
        let text: String = text.chars().map(plain).take(LONGEST).collect();
        let text = text.trim_matches(|letter: char| !letter.is_ascii_alphanumeric());
        (!text.is_empty()).then(|| Self(PlainName(text.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;

    #[test]
    fn names_are_short_and_plain() {
        for text in ["a", "us-east-1", "Rack_7.b", &"x".repeat(32)] {
            let name: PeerName = text.parse().expect("a name");
            assert_eq!(name.to_string(), text);
            let bytes = wire::encode(&name).expect("short");
            assert_eq!(wire::decode::<PeerName>(&bytes), Ok(name));
        }
        for text in ["", "two words", "é", "a/b", &"x".repeat(33)] {
            assert_eq!(text.parse::<PeerName>(), Err(InvalidName), "{text}");
            let bytes = wire::encode(&text.to_owned()).expect("short");
            assert!(wire::decode::<PeerName>(&bytes).is_err(), "{text}");
        }
    }

    #[test]
    fn the_nearest_name_is_plain() {
        let nearest = |text: &str| PeerName::nearest(text).map(|name| name.to_string());
        assert_eq!(nearest("gpu-7").as_deref(), Some("gpu-7"));
        assert_eq!(nearest("Ana's Laptop\u{1b}[2J").as_deref(), Some("Ana-s-Laptop--2J"));
        assert_eq!(nearest(&"x".repeat(80)), Some("x".repeat(32)));
        assert_eq!((nearest(""), nearest("\u{202e}//")), (None, None));
    }
}
