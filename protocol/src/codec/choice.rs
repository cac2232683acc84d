//! Which packing makes a tensor's bytes arrive soonest.

use std::time::Duration;

use super::packing::Packing;
use crate::frame::Element;

/// On links of as many bytes per second, and faster ones, zstd never pays: bf16, which shrinks most,
/// gains up to about 1.5 Gb/s.
const FASTEST: f64 = 200e6;

/// What a link is taken to carry, in bytes per second, until it was measured: what encryption lets
/// through at most.
const UNMEASURED: f64 = 3e9;

/// Fewer bytes travel as they are.
const LEAST: usize = 4 << 10;

/// How much a measurement counts beside all before it.
const GAIN: f64 = 0.1;

/// Packing takes as long as the shortest of the last measurements, each of which counts for so much
/// more with every one after it: what is longer was mostly kept waiting for a processor.
const SLOWER: f64 = 1.02;

/// Unpacking takes no longer than packing, and is not overlapped with it.
const BOTH_ENDS: f64 = 2.0;

/// A packing that does not seem to pay is used for one of so many tensors, to see whether that changed.
const LOOK_AGAIN: u32 = 256;

/// Chooses for tensors of one kind, from how fast they are packed and how much smaller that makes
/// them, whatever link they take.
#[derive(Debug)]
pub struct PackingChoice {
    candidates: Vec<Candidate>,
}

#[derive(Debug)]
struct Candidate {
    packing: Packing,
    learnt: Option<Learnt>,
    /// Tensors since it was last used.
    unused: u32,
}

#[derive(Debug, Clone, Copy)]
struct Learnt {
    /// Of packing a byte.
    seconds: f64,
    /// Of a byte, on the link.
    left: f64,
}

impl Candidate {
    /// What it spares of a byte's time on a link of so many bytes per second, as far as is known.
    fn spares(&self, rate: f64) -> f64 {
        match self.learnt {
            None => f64::INFINITY,
            Some(Learnt { seconds, left }) => (1.0 - left) / rate - BOTH_ENDS * seconds,
        }
    }

    /// Whether it could pay on such a link.
    fn is_for(&self, rate: f64) -> bool {
        self.packing != Packing::Zstd || rate < FASTEST
    }
}

impl PackingChoice {
    /// For tensors of such elements.
    #[must_use]
    pub fn of(element: Element) -> Self {
        let packings: &[Packing] = match element {
            Element::I64 => &[Packing::Integers, Packing::Zstd],
            Element::Number(_) | Element::U32 | Element::U8 => &[Packing::Zstd],
        };
        let candidate =
            |packing: &Packing| Candidate { packing: *packing, learnt: None, unused: 0 };
        Self { candidates: packings.iter().map(candidate).collect() }
    }

    /// For a tensor of so many bytes on a link of so many bytes per second, if that is known.
    pub fn choose(&mut self, bytes: usize, rate: Option<f64>) -> Packing {
        if bytes < LEAST {
            return Packing::Raw;
        }
        let rate = rate.unwrap_or(UNMEASURED);
        let (mut best, mut most) = (None, 0.0);
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_for(rate)) {
            candidate.unused += 1;
            let again = candidate.unused.is_multiple_of(LOOK_AGAIN);
            let spares = if again { f64::INFINITY } else { candidate.spares(rate) };
            if spares > most {
                (best, most) = (Some(candidate), spares);
            }
        }
        best.map_or(Packing::Raw, |candidate| {
            candidate.unused = 0;
            candidate.packing
        })
    }

    /// What a packing came to: of `raw` bytes `packed` were left, after so long.
    pub fn learn(&mut self, packing: Packing, raw: usize, packed: usize, took: Duration) {
        let known = self.candidates.iter_mut().find(|candidate| candidate.packing == packing);
        let Some(candidate) = known.filter(|_| raw > 0) else { return };
        let new =
            Learnt { seconds: took.as_secs_f64() / raw as f64, left: packed as f64 / raw as f64 };
        candidate.learnt = Some(candidate.learnt.map_or(new, |old| Learnt {
            seconds: new.seconds.min(old.seconds * SLOWER),
            left: old.left + GAIN * (new.left - old.left),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;

    const MEGABYTE: usize = 1 << 20;

    /// Packs at 400 MB/s to this part.
    fn learnt(left: f64) -> PackingChoice {
        let mut choice = PackingChoice::of(Element::Number(Codec::Bf16));
        let took = Duration::from_secs_f64(MEGABYTE as f64 / 400e6);
        choice.learn(Packing::Zstd, MEGABYTE, (MEGABYTE as f64 * left) as usize, took);
        choice
    }

    #[test]
    fn packing_pays_where_the_link_is_slower_than_it() {
        // bf16 shrinks by 1.46: a byte costs 5 ns at both ends and spares 0.315 of one on the link.
        for (rate, packing) in
            [(6e6, Packing::Zstd), (50e6, Packing::Zstd), (70e6, Packing::Raw), (1e9, Packing::Raw)]
        {
            assert_eq!(learnt(1.0 / 1.46).choose(MEGABYTE, Some(rate)), packing, "{rate}");
        }
        // int8 hardly does.
        assert_eq!(learnt(0.95).choose(MEGABYTE, Some(6e6)), Packing::Zstd);
        assert_eq!(learnt(0.95).choose(MEGABYTE, Some(20e6)), Packing::Raw);
    }

    #[test]
    fn a_link_that_was_not_measured_takes_bytes_as_they_are_and_so_do_small_tensors() {
        let mut choice = PackingChoice::of(Element::F32);
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Raw);
        assert_eq!(choice.choose(100, Some(1e6)), Packing::Raw);
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd, "to learn what it gains");
    }

    #[test]
    fn what_does_not_pay_is_tried_again_now_and_then() {
        let mut choice = learnt(1.0);
        let tried = (0..1024).filter(|_| choice.choose(MEGABYTE, Some(1e6)) == Packing::Zstd);
        assert_eq!(tried.count(), 4);
        // The tensors have come to shrink.
        for _ in 0..60 {
            choice.learn(Packing::Zstd, MEGABYTE, MEGABYTE / 4, Duration::from_millis(1));
        }
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd);
    }

    #[test]
    fn integers_are_packed_on_any_link_that_gains_by_it() {
        let mut choice = PackingChoice::of(Element::I64);
        let took = |rate: f64| Duration::from_secs_f64(MEGABYTE as f64 / rate);
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Integers);
        choice.learn(Packing::Integers, MEGABYTE, MEGABYTE * 5 / 8, took(20e9));
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Integers);
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd, "to learn what it gains");
        choice.learn(Packing::Zstd, MEGABYTE, MEGABYTE * 9 / 16, took(400e6));
        assert_eq!(choice.choose(MEGABYTE, Some(6e6)), Packing::Zstd);
        assert_eq!(choice.choose(MEGABYTE, Some(25e6)), Packing::Integers);
        // A machine that packs slowly.
        let mut choice = PackingChoice::of(Element::I64);
        choice.learn(Packing::Integers, MEGABYTE, MEGABYTE * 5 / 8, took(1e9));
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Raw);
    }
}
