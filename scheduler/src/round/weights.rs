//! Computes the share of the vector that each member reduces, so that the round ends soonest.
//!
//! Let there be `n` members. Member `i` reduces the share `w` of the vector and has an uplink of
//! `up` and a downlink of `down`. A number takes `p` bytes as part of a sum and `r` bytes as a
//! result. For each number of the vector the member then sends `(1 - w) p + w (n - 1) r` bytes and
//! receives `w (n - 1) p + (1 - w) r`. The round ends when the last member has done both.
//!
//! A time is sufficient if there are shares with sum one for which every member meets it. Each
//! constraint is an interval for one share, so bisection finds the least such time. A member that
//! needs all of that time whatever its share gets the share that suits it best, and the same
//! problem is solved again for the others. Otherwise, of two members that are about equally slow,
//! the one that was measured a little faster would get work until it is the slowest, and in the
//! next round the other one.

use shoal_protocol::codec::SumCodec;
use shoal_protocol::frame::Element;
use shoal_protocol::units::Bytes;

/// Measured rates of a member's links, in bytes per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct MemberRates {
    /// To all other members at once.
    pub(crate) up: Option<f64>,
    /// From all other members at once.
    pub(crate) down: Option<f64>,
}

/// Bytes of a number on its way to its reducer, and back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NumberBytes {
    pub(crate) part: f64,
    pub(crate) result: f64,
}

/// Average bytes of a packed fixed-point sum.
const PACKED: f64 = 4.8;

/// The same of sums of numbers that were rounded to a few bits.
const PACKED_ROUNDED: f64 = 1.3;

impl NumberBytes {
    pub(crate) fn of(codec: SumCodec) -> Self {
        // Large enough for the scales of blocks to have their normal weight.
        let count = 1 << 12;
        let bytes =
            |element: Element| element.bytes_of(count).map_or(8.0, |all| all as f64 / count as f64);
        match codec {
            SumCodec::Exact => Self { part: PACKED, result: bytes(codec.result()) },
            SumCodec::Integers => Self { part: PACKED_ROUNDED, result: PACKED_ROUNDED },
            SumCodec::Rounded(_) => {
                Self { part: bytes(codec.part()), result: bytes(codec.result()) }
            }
        }
    }
}

/// The size on a link of a piece of sums with so many bytes in memory.
pub(crate) fn packed(piece: Bytes, codec: SumCodec) -> Bytes {
    match codec {
        SumCodec::Integers => {
            Bytes((piece.0 as f64 * PACKED_ROUNDED / size_of::<i64>() as f64).ceil() as u64)
        }
        SumCodec::Exact | SumCodec::Rounded(_) => piece,
    }
}

/// The sum of all weights.
const WHOLE: f64 = (1 << 16) as f64;

/// Relative accuracy of measurements: equal shares are kept unless they are worse by more than
/// this.
const WORTH_IT: f64 = 0.2;

/// Intervals of shares shorter than this count as a single share.
const SAME: f64 = 1e-6;

/// Maximum number of times that members which cannot be faster are set aside.
const ASIDE: usize = 16;

/// Bisections of the time: a precision of one part in 2^40.
const HALVINGS: u32 = 40;

/// Each member's weight. An unmeasured member is assumed to be as slow as the slowest measured one.
pub(crate) fn weights(rates: &[MemberRates], bytes: NumberBytes) -> Vec<u32> {
    let members = links(rates, bytes);
    let equal = time_of_equal(&members);
    if members.is_empty() || equal <= least(&members, 1.0, equal) * (1.0 + WORTH_IT) {
        return vec![1; rates.len()];
    }
    best_shares(&members, equal).into_iter().map(|share| (share * WHOLE).round() as u32).collect()
}

/// Seconds that the best shares need for each number of the vector; 0 without measurements.
pub(crate) fn least_time(rates: &[MemberRates], bytes: NumberBytes) -> f64 {
    let members = links(rates, bytes);
    least(&members, 1.0, time_of_equal(&members))
}

/// Each member's links; empty if none was measured or there is only one member.
fn links(rates: &[MemberRates], bytes: NumberBytes) -> Vec<Links> {
    let measured = rates.iter().flat_map(|member| [member.up, member.down]).flatten();
    let slowest = measured.reduce(f64::min).filter(|_| rates.len() > 1);
    let Some(slowest) = slowest else { return Vec::new() };
    let of = |member: &MemberRates| Links {
        up: member.up.unwrap_or(slowest),
        down: member.down.unwrap_or(slowest),
        others: (rates.len() - 1) as f64,
        bytes,
    };
    rates.iter().map(of).collect()
}

fn time_of_equal(members: &[Links]) -> f64 {
    let even = 1.0 / members.len() as f64;
    members.iter().map(|links| links.time(even)).fold(0.0, f64::max)
}

/// The shares that make the slowest member as fast as possible, then the slowest of the others, and
/// so on. `equal` is the time with equal shares.
fn best_shares(members: &[Links], equal: f64) -> Vec<f64> {
    let mut shares = vec![0.0; members.len()];
    let mut open: Vec<usize> = (0..members.len()).collect();
    let (mut left, mut time) = (1.0, equal);
    for _ in 0..ASIDE {
        let of: Vec<Links> = open.iter().map(|place| members[*place]).collect();
        time = least(&of, left, time);
        let Some(bounds) = bounds_within(&of, left, time) else { break };
        let chosen = shares_of(&bounds, left);
        for (place, share) in open.iter().zip(chosen) {
            shares[*place] = share;
        }
        let (aside, others): (Vec<_>, Vec<_>) =
            open.iter().zip(bounds).partition(|(_, (least, most))| most - least < SAME);
        left -= aside.iter().map(|(place, _)| shares[**place]).sum::<f64>();
        if aside.is_empty() || others.is_empty() {
            break;
        }
        open = others.into_iter().map(|(place, _)| *place).collect();
    }
    shares
}

/// The least time, at most `known`, in which these members can reduce the share `whole` of the
/// vector.
fn least(members: &[Links], whole: f64, known: f64) -> f64 {
    let (mut short, mut long) = (0.0, known);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(short, long);
        if bounds_within(members, whole, middle).is_some() {
            long = middle;
        } else {
            short = middle;
        }
    }
    long
}

/// One member's links.
#[derive(Debug, Clone, Copy)]
struct Links {
    up: f64,
    down: f64,
    others: f64,
    bytes: NumberBytes,
}

impl Links {
    /// Seconds for each number of the vector, with this share.
    fn time(&self, share: f64) -> f64 {
        let NumberBytes { part, result } = self.bytes;
        let sends = (1.0 - share) * part + share * self.others * result;
        let receives = share * self.others * part + (1.0 - share) * result;
        (sends / self.up).max(receives / self.down)
    }

    /// The interval of shares with which it takes at most `time`; `None` if it is empty.
    fn within(&self, time: f64) -> Option<(f64, f64)> {
        let NumberBytes { part, result } = self.bytes;
        let sends = (part, self.others * result - part, self.up);
        let receives = (result, self.others * part - result, self.down);
        let (mut least, mut most) = (0.0f64, 1.0f64);
        for (fixed, slope, rate) in [sends, receives] {
            let bound = (time * rate - fixed) / slope;
            if slope > 0.0 {
                most = most.min(bound);
            } else if slope < 0.0 {
                least = least.max(bound);
            } else if time * rate < fixed {
                return None;
            }
        }
        (least <= most).then_some((least, most))
    }
}

/// The bounds of each member's share with which these members reduce the share `whole` of the
/// vector in at most `time`; `None` if that is impossible.
fn bounds_within(members: &[Links], whole: f64, time: f64) -> Option<Vec<(f64, f64)>> {
    let bounds: Vec<(f64, f64)> =
        members.iter().map(|links| links.within(time)).collect::<Option<_>>()?;
    let (least, most) = sums(&bounds);
    (least <= whole && whole <= most).then_some(bounds)
}

/// Shares within these bounds that sum to `whole`.
fn shares_of(bounds: &[(f64, f64)], whole: f64) -> Vec<f64> {
    let (least, most) = sums(bounds);
    let part = if most > least { (whole - least) / (most - least) } else { 0.0 };
    bounds.iter().map(|(least, most)| least + part * (most - least)).collect()
}

fn sums(bounds: &[(f64, f64)]) -> (f64, f64) {
    bounds.iter().fold((0.0, 0.0), |sums, bound| (sums.0 + bound.0, sums.1 + bound.1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALIKE: NumberBytes = NumberBytes { part: 4.0, result: 4.0 };

    fn both(rate: f64) -> MemberRates {
        MemberRates { up: Some(rate), down: Some(rate) }
    }

    /// Time for each number of the vector with these weights.
    fn time(rates: &[MemberRates], weights: &[u32], bytes: NumberBytes) -> f64 {
        let whole: f64 = weights.iter().copied().map(f64::from).sum();
        let times = rates.iter().zip(weights).map(|(member, weight)| {
            let (up, down) = (member.up.expect("known"), member.down.expect("known"));
            let others = (rates.len() - 1) as f64;
            Links { up, down, others, bytes }.time(f64::from(*weight) / whole)
        });
        times.fold(0.0, f64::max)
    }

    #[test]
    fn equal_or_unknown_links_get_equal_parts() {
        assert_eq!(weights(&[], ALIKE), []);
        assert_eq!(weights(&[both(1e6)], ALIKE), [1]);
        assert_eq!(weights(&[MemberRates::default(); 3], ALIKE), [1, 1, 1]);
        assert_eq!(weights(&[both(1e6), both(1.05e6), both(1e6)], ALIKE), [1, 1, 1]);
        assert_eq!(weights(&[both(1e6), MemberRates::default()], ALIKE), [1, 1]);
    }

    #[test]
    fn faster_links_reduce_more() {
        // 1 : 2 : 4 : 4. The slow member only sends its numbers and receives the result: no share
        // makes that faster.
        let rates = [both(1.0), both(2.0), both(4.0), both(4.0)];
        let found = weights(&rates, ALIKE);
        assert_eq!(found[0], 0);
        assert!(found[1] < found[2] && found[2] == found[3], "{found:?}");
        assert!((time(&rates, &found, ALIKE) - 4.0).abs() < 1e-3);
        assert!(time(&rates, &[1; 4], ALIKE) > 5.9);
    }

    #[test]
    fn of_two_members_with_larger_parts_than_results_the_slow_sender_reduces() {
        let bytes = NumberBytes { part: 8.0, result: 4.0 };
        let slow = MemberRates { up: Some(1.0), down: Some(10.0) };
        let found = weights(&[slow, both(10.0)], bytes);
        assert!(found[0] > 30 * found[1], "{found:?}");
    }

    #[test]
    fn of_two_slow_members_a_slightly_faster_measurement_earns_no_work() {
        // 100 and 200, and two of 50 of which either one is measured faster.
        let bytes = NumberBytes { part: PACKED, result: 4.0 };
        for slow in [(55.0, 75.0), (75.0, 55.0), (50.0, 50.0)] {
            let found = weights(&[both(slow.0), both(slow.1), both(100.0), both(200.0)], bytes);
            assert_eq!(found[..2], [0, 0], "{slow:?}");
            assert!(found[2] > 0 && found[2] < found[3], "{found:?}");
        }
    }

    proptest! {
        #[test]
        fn no_other_shares_are_faster(
            rates in prop::collection::vec((1f64..100.0, 1f64..100.0), 2..6),
            other in prop::collection::vec(0u32..100, 6),
            part in 1f64..8.0,
        ) {
            let rates: Vec<MemberRates> = rates
                .into_iter()
                .map(|(up, down)| MemberRates { up: Some(up), down: Some(down) })
                .collect();
            let bytes = NumberBytes { part, result: 4.0 };
            let other = &other[..rates.len()];
            prop_assume!(other.iter().any(|weight| *weight > 0));
            let found = time(&rates, &weights(&rates, bytes), bytes);
            prop_assert!(found <= time(&rates, other, bytes) * (1.0 + WORTH_IT + 0.01));
        }
    }
}
