//! Rates of members' links to all others at once, from rates measured between pairs.
//!
//! In a round a member's links to the others are in use together and share its uplink, so their
//! rates add up to that of the uplink. With `n` members of which `i` reduces the share `w_i`,
//! member `i` sends `w_j p + w_i r` bytes to `j` for each number of the vector, with `p` bytes for
//! a number of a part and `r` for one of a result. Between two members that reduce little, almost
//! nothing is sent, and the rate measured there belongs to another time, or to a moment in which
//! the others left the link idle: it is excluded from the sum. If it were included, a member that
//! reduces nothing would look fast, be given a part, look slow in the next round, and so on in
//! turns.

use shoal_protocol::units::Rate;

use super::weights::{MemberRates, NumberBytes};

/// Links that carry less than this fraction of the member's busiest link are excluded.
const LITTLE: f64 = 0.25;

/// A link's rate from the known rate and a new measurement: the mean of the times per byte. A
/// moment in which the others left a link idle therefore counts little.
pub(crate) fn averaged(known: Rate, measured: Rate) -> Rate {
    let time = |rate: Rate| 1.0 / rate.0.max(1) as f64;
    Rate((2.0 / (time(known) + time(measured))) as u64)
}

/// Each member's rates, from the rates measured between pairs while members had these weights
/// (`None` for absent members). A link without a measurement is assumed to be as fast as the
/// member's other links.
pub(crate) fn member_rates(
    weights: &[Option<u32>],
    bytes: NumberBytes,
    rate: impl Fn(usize, usize) -> Option<f64>,
) -> Vec<MemberRates> {
    let carried = |from: usize, to: usize| match (weights[from], weights[to]) {
        (Some(own), Some(other)) => f64::from(other) * bytes.part + f64::from(own) * bytes.result,
        _ => f64::INFINITY,
    };
    let all = 0..weights.len();
    let sum = |me: usize, path: &dyn Fn(usize) -> (usize, usize)| {
        let pairs = || all.clone().filter(|other| *other != me).map(path);
        let known =
            pairs().map(|(from, to)| carried(from, to)).filter(|carried| carried.is_finite());
        let most = known.fold(0.0, f64::max);
        let (mut used, mut measured, mut sum) = (0.0, 0.0, 0.0);
        for (from, to) in pairs().filter(|(from, to)| carried(*from, *to) >= LITTLE * most) {
            used += 1.0;
            if let Some(rate) = rate(from, to) {
                measured += 1.0;
                sum += rate;
            }
        }
        (measured > 0.0).then_some(sum * used / measured)
    };
    let rates =
        |me| MemberRates { up: sum(me, &|other| (me, other)), down: sum(me, &|other| (other, me)) };
    all.clone().map(rates).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: NumberBytes = NumberBytes { part: 4.0, result: 4.0 };

    #[test]
    fn link_rates_add_up_and_unmeasured_links_are_like_the_others() {
        let rate = |from: usize, to: usize| (from != 2 || to != 0).then_some((1 + from) as f64);
        for weights in [[None; 3], [Some(1); 3], [Some(0); 3], [Some(5), Some(5), None]] {
            let found = member_rates(&weights, BYTES, rate);
            let both = |up, down| MemberRates { up: Some(up), down: Some(down) };
            assert_eq!(found, [both(2.0, 4.0), both(4.0, 4.0), both(6.0, 3.0)]);
        }
        assert_eq!(member_rates(&[None], BYTES, rate), [MemberRates::default()]);
        let unknown = member_rates(&[None; 2], BYTES, |_, _| None);
        assert_eq!(unknown, [MemberRates::default(); 2]);
    }

    #[test]
    fn times_are_averaged() {
        assert_eq!(averaged(Rate(100), Rate(100)), Rate(100));
        assert_eq!(averaged(Rate(100), Rate(300)), Rate(150));
        assert_eq!(averaged(Rate(0), Rate(u64::MAX)), Rate(2));
    }

    #[test]
    fn a_link_between_two_members_that_reduce_nothing_is_excluded() {
        // Members 0 and 1 exchanged data once; in this round they only exchange data with the other
        // two.
        let weights = [Some(0), Some(1), Some(44), Some(55)];
        let found = member_rates(&weights, BYTES, |_, _| Some(25.0));
        assert_eq!((found[0].up, found[1].down), (Some(50.0), Some(50.0)));
        assert_eq!((found[2].up, found[3].down), (Some(75.0), Some(75.0)));
    }
}
