//! Quantities whose unit is part of the type.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// An amount of memory, disk or traffic.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
    bincode::Decode,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// An amount of `count` MiB.
    #[must_use]
    pub const fn mebi(count: u64) -> Self {
        Self(count << 20)
    }
}

impl Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Self;

    /// # Panics
    /// If more is subtracted than there was, which is an accounting error in the program.
    fn sub(self, other: Self) -> Self {
        Self(self.0.checked_sub(other.0).expect("more bytes released than were held"))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self(0), Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let digits = usize::from(unit > 0);
        write!(f, "{value:.digits$} {}", UNITS[unit])
    }
}

impl FromStr for Bytes {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str =
            "an amount is a whole number, alone or with KiB, MiB, GiB, TiB, KB, MB, GB or TB";
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim();
        let power = |names: [&'static str; 5]| (0u32..).zip(names).find(|(_, name)| *name == unit);
        let size = if let Some((power, _)) = power(["", "KiB", "MiB", "GiB", "TiB"]) {
            1 << (10 * power)
        } else {
            1000u64.pow(power(["B", "KB", "MB", "GB", "TB"]).ok_or(EXPECTED)?.0)
        };
        let number: u64 = number.parse().map_err(|_| EXPECTED)?;
        number.checked_mul(size).map(Self).ok_or("an amount must be less than 16 EiB")
    }
}

/// Bytes per second.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    bincode::Encode,
    bincode::Decode,
)]
pub struct Rate(pub u64);

impl Rate {
    /// The time in which so many bytes pass; at most 584 years.
    #[must_use]
    pub fn time(self, size: Bytes) -> Duration {
        let nanoseconds = u128::from(size.0) * 1_000_000_000 / u128::from(self.0.max(1));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// The price of a machine for an hour, in the currency of the run's operators. It counts millionths
/// of a unit, so that it compares and encodes exactly.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Default,
    Serialize,
    Deserialize,
    bincode::Encode,
)]
#[serde(into = "f64", try_from = "f64")]
pub struct Price(u64);

impl Price {
    /// Parts of a unit of currency.
    const MILLION: u64 = 1_000_000;

    /// The highest price: a million units for an hour. Sums of all members' prices fit.
    pub const MAX: Self = Self(Self::MILLION * Self::MILLION);

    /// Why a text or number is no price.
    const EXPECTED: &str = "a price is a number from 0 to 1000000, for an hour";

    /// The price in millionths of a unit.
    #[must_use]
    pub const fn millionths(self) -> u64 {
        self.0
    }
}

impl From<Price> for f64 {
    /// Units of currency for an hour.
    fn from(price: Price) -> Self {
        price.0 as Self / Price::MILLION as Self
    }
}

impl TryFrom<f64> for Price {
    type Error = &'static str;

    fn try_from(units: f64) -> Result<Self, Self::Error> {
        let valid = (0.0..=f64::from(Self::MAX)).contains(&units);
        let price = Self((units * Self::MILLION as f64).round() as u64);
        valid.then_some(price).ok_or(Self::EXPECTED)
    }
}

impl FromStr for Price {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.trim().parse::<f64>().map_err(|_| Self::EXPECTED)?.try_into()
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f64::from(*self).fmt(f)
    }
}

/// Rejects prices above the highest one, so that sums of prices stay bounded.
impl<C> bincode::Decode<C> for Price {
    fn decode<D: bincode::de::Decoder<Context = C>>(
        decoder: &mut D,
    ) -> Result<Self, bincode::error::DecodeError> {
        let price = Self(u64::decode(decoder)?);
        let high = bincode::error::DecodeError::Other("invalid price");
        if price <= Self::MAX { Ok(price) } else { Err(high) }
    }
}

bincode::impl_borrow_decode!(Price);

/// A moment, as the time since a start that only the caller knows. The pure modules read no clock:
/// the caller passes the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(pub Duration);

impl Moment {
    /// Time since an earlier moment; zero if `earlier` is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(delay))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_in_the_largest_unit_that_fits() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes::mebi(3).to_string(), "3.0 MiB");
    }

    #[test]
    fn prices_are_read_and_bounded() {
        let price = |text: &str| text.parse::<Price>();
        assert_eq!(price(" 0.35 ").map(Price::millionths), Ok(350_000));
        assert_eq!(price("0.0000014").map(|price| price.to_string()), Ok("0.000001".to_owned()));
        assert_eq!(price("1e6"), Ok(Price::MAX));
        assert_eq!(price("-0"), Ok(Price(0)));
        for wrong in ["", "free", "-0.1", "1000001", "inf", "nan"] {
            assert_eq!(price(wrong), Err(Price::EXPECTED), "{wrong}");
        }
    }

    #[test]
    fn no_decoded_price_is_above_the_highest() {
        let bytes = |price: u64| crate::wire::encode(&price).expect("small");
        assert_eq!(crate::wire::decode(&bytes(Price::MAX.0)), Ok(Price::MAX));
        assert!(crate::wire::decode::<Price>(&bytes(Price::MAX.0 + 1)).is_err());
    }

    #[test]
    fn amounts_are_read_with_their_unit() {
        assert_eq!("17".parse(), Ok(Bytes(17)));
        assert_eq!("2 KiB".parse(), Ok(Bytes(2048)));
        assert_eq!("3MiB".parse(), Ok(Bytes::mebi(3)));
        assert_eq!("5 GB".parse(), Ok(Bytes(5_000_000_000)));
        assert_eq!("7B".parse(), Ok(Bytes(7)));
        for wrong in ["", "MiB", "-1", "1.5GiB", "1 Gb", "99999999999 TiB", "99999999 TB"] {
            wrong.parse::<Bytes>().expect_err(wrong);
        }
    }
}
