//! The name of an island: peers with fast links to each other.

use std::fmt;
use std::str::FromStr;

/// The name that the operator of a peer gives the fast network that it is in. Peers of one stage that give the same
/// name sum their gradients among themselves before they send them on.
///
/// It has 1 to [`IslandName::LONGEST`] characters: ASCII letters, digits, `.`, `_` and `-`.
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
pub struct IslandName(String);

impl IslandName {
    /// The most characters of a name.
    pub const LONGEST: usize = 32;

    /// Why a text is no name.
    const EXPECTED: &str = "the name of an island has 1 to 32 letters (a-z, A-Z), digits, dots, hyphens or underscores";

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for IslandName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let valid = (1..=Self::LONGEST).contains(&text.len()) && text.bytes().all(plain);
        valid.then(|| Self(text.to_owned())).ok_or(Self::EXPECTED)
    }
}

impl TryFrom<String> for IslandName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<IslandName> for String {
    fn from(name: IslandName) -> Self {
        name.0
    }
}

impl fmt::Display for IslandName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Rejects texts that are no names. A longer one is refused before it is read.
impl<C> bincode::Decode<C> for IslandName {
    fn decode<D: bincode::de::Decoder<Context = C>>(
        decoder: &mut D,
    ) -> Result<Self, bincode::error::DecodeError> {
        let wrong = || bincode::error::DecodeError::Other("invalid name of an island");
        let length = u64::decode(decoder)?;
        if !(1..=Self::LONGEST as u64).contains(&length) {
            return Err(wrong());
        }
        let mut bytes = Vec::with_capacity(Self::LONGEST);
        for _ in 0..length {
            bytes.push(u8::decode(decoder)?);
        }
        let text = String::from_utf8(bytes).map_err(|_| wrong())?;
        text.parse().map_err(|_| wrong())
    }
}

bincode::impl_borrow_decode!(IslandName);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;

    #[test]
    fn names_are_short_and_plain() {
        for text in ["a", "us-east-1", "Rack_7.b", &"x".repeat(32)] {
            let name: IslandName = text.parse().expect("a name");
            assert_eq!(name.to_string(), text);
            let bytes = wire::encode(&name).expect("short");
            assert_eq!(wire::decode::<IslandName>(&bytes), Ok(name));
        }
        for text in ["", "two words", "é", "a/b", &"x".repeat(33)] {
            assert_eq!(text.parse::<IslandName>(), Err(IslandName::EXPECTED), "{text}");
            let bytes = wire::encode(&text.to_owned()).expect("short");
            assert!(wire::decode::<IslandName>(&bytes).is_err(), "{text}");
        }
    }
}
