//! Chooses the packing with which a tensor arrives earliest.

use std::time::Duration;

use super::packing::Packing;
use crate::frame::Element;

/// Links of at least this rate, in bytes per second, gain only from the fastest packing: bf16, which zstd
/// shrinks most, gains up to about 1.5 Gb/s.
const FASTEST: f64 = 200e6;

/// The assumed rate of a link before the first measurement, in bytes per second: the limit of
/// encryption.
const UNMEASURED: f64 = 3e9;

/// Smaller tensors are not packed.
const LEAST: usize = 4 << 10;

/// The weight of a new measurement against the mean of earlier ones.
const GAIN: f64 = 0.1;

/// The time of packing is the shortest of the last measurements. Each measurement grows by this
/// factor with every later one. Longer times were mostly spent waiting for a processor.
const SLOWER: f64 = 1.02;

/// Factor of the packing time for both ends: unpacking takes no longer than packing, and does not
/// overlap with it.
const BOTH_ENDS: f64 = 2.0;

/// A packing that seems not to pay is tried once for this many tensors, to notice changes.
const RETRY_EVERY: u32 = 256;

/// Chooses the packing for tensors of one kind from the measured speed and compression of each
/// packing, and the rate of the link.
#[derive(Debug)]
pub struct PackingChoice {
    candidates: Vec<Candidate>,
}

#[derive(Debug)]
struct Candidate {
    packing: Packing,
    measured: Option<Measured>,
    /// Number of tensors since its last use.
    unused: u32,
}

#[derive(Debug, Clone, Copy)]
struct Measured {
    /// Seconds to pack one byte.
    seconds: f64,
    /// Packed bytes per raw byte.
    ratio: f64,
}

impl Candidate {
    /// Seconds saved per byte on a link of `rate` bytes per second; infinite if unknown.
    fn savings(&self, rate: f64) -> f64 {
        match self.measured {
            None => f64::INFINITY,
            Some(Measured { seconds, ratio }) => (1.0 - ratio) / rate - BOTH_ENDS * seconds,
        }
    }

    /// Whether the packing can pay on such a link.
    fn is_for(&self, rate: f64) -> bool {
        self.packing == Packing::Integers || rate < FASTEST
    }
}

impl PackingChoice {
    /// A choice for tensors of these elements.
    #[must_use]
    pub fn of(element: Element) -> Self {
        let packings: &[Packing] = match element {
            Element::I64 => &[Packing::Integers, Packing::Bits, Packing::Zstd],
            Element::Number(_) | Element::U32 | Element::U8 => &[Packing::Zstd],
        };
        let candidate =
            |packing: &Packing| Candidate { packing: *packing, measured: None, unused: 0 };
        Self { candidates: packings.iter().map(candidate).collect() }
    }

    /// The packing for a tensor of zeros, whatever the link: it leaves next to nothing of them at the speed of memory.
    #[must_use]
    pub fn of_zeros(element: Element) -> Packing {
        match element {
            Element::I64 => Packing::Integers,
            Element::Number(_) | Element::U32 | Element::U8 => Packing::Zstd,
        }
    }

    /// Chooses the packing for a tensor of `bytes` bytes on a link of `rate` bytes per second, if
    /// known.
    pub fn choose(&mut self, bytes: usize, rate: Option<f64>) -> Packing {
        if bytes < LEAST {
            return Packing::Raw;
        }
        let rate = rate.unwrap_or(UNMEASURED);
        let (mut best, mut most) = (None, 0.0);
        for candidate in self.candidates.iter_mut().filter(|candidate| candidate.is_for(rate)) {
            candidate.unused += 1;
            let again = candidate.unused.is_multiple_of(RETRY_EVERY);
            let savings = if again { f64::INFINITY } else { candidate.savings(rate) };
            if savings > most {
                (best, most) = (Some(candidate), savings);
            }
        }
        best.map_or(Packing::Raw, |candidate| {
            candidate.unused = 0;
            candidate.packing
        })
    }

    /// Records a measurement: packing `raw` bytes to `packed` bytes took `took`.
    pub fn learn(&mut self, packing: Packing, raw: usize, packed: usize, took: Duration) {
        let known = self.candidates.iter_mut().find(|candidate| candidate.packing == packing);
        let Some(candidate) = known.filter(|_| raw > 0) else { return };
        let new = Measured {
            seconds: took.as_secs_f64() / raw as f64,
            ratio: packed as f64 / raw as f64,
        };
        candidate.measured = Some(candidate.measured.map_or(new, |old| Measured {
            seconds: new.seconds.min(old.seconds * SLOWER),
            ratio: old.ratio + GAIN * (new.ratio - old.ratio),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;

    const MEGABYTE: usize = 1 << 20;

    /// A choice that has measured 400 MB/s and this ratio.
    fn measured(ratio: f64) -> PackingChoice {
        let mut choice = PackingChoice::of(Element::Number(Codec::Bf16));
        let took = Duration::from_secs_f64(MEGABYTE as f64 / 400e6);
        choice.learn(Packing::Zstd, MEGABYTE, (MEGABYTE as f64 * ratio) as usize, took);
        choice
    }

    #[test]
    fn packing_is_chosen_for_links_that_are_slower_than_packing() {
        // bf16 shrinks by 1.46: a byte costs 5 ns at both ends, and saves the time of 0.315 bytes
        // on the link.
        for (rate, packing) in
            [(6e6, Packing::Zstd), (50e6, Packing::Zstd), (70e6, Packing::Raw), (1e9, Packing::Raw)]
        {
            assert_eq!(measured(1.0 / 1.46).choose(MEGABYTE, Some(rate)), packing, "{rate}");
        }
        // int8 hardly shrinks.
        assert_eq!(measured(0.95).choose(MEGABYTE, Some(6e6)), Packing::Zstd);
        assert_eq!(measured(0.95).choose(MEGABYTE, Some(20e6)), Packing::Raw);
    }

    #[test]
    fn unmeasured_links_and_small_tensors_are_not_packed() {
        let mut choice = PackingChoice::of(Element::F32);
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Raw);
        assert_eq!(choice.choose(100, Some(1e6)), Packing::Raw);
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd, "to measure it");
    }

    #[test]
    fn an_unprofitable_packing_is_retried_at_intervals() {
        let mut choice = measured(1.0);
        let tried = (0..1024).filter(|_| choice.choose(MEGABYTE, Some(1e6)) == Packing::Zstd);
        assert_eq!(tried.count(), 4);
        // Later tensors do shrink.
        for _ in 0..60 {
            choice.learn(Packing::Zstd, MEGABYTE, MEGABYTE / 4, Duration::from_millis(1));
        }
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd);
    }

    #[test]
    fn integers_are_packed_on_every_link_that_gains() {
        let mut choice = PackingChoice::of(Element::I64);
        let took = |rate: f64| Duration::from_secs_f64(MEGABYTE as f64 / rate);
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Integers);
        choice.learn(Packing::Integers, MEGABYTE, MEGABYTE * 5 / 8, took(20e9));
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Integers);
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Bits, "to measure it");
        choice.learn(Packing::Bits, MEGABYTE, MEGABYTE * 19 / 32, took(1e9));
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd, "to measure it");
        choice.learn(Packing::Zstd, MEGABYTE, MEGABYTE * 9 / 16, took(400e6));
        assert_eq!(choice.choose(MEGABYTE, Some(6e6)), Packing::Zstd);
        assert_eq!(choice.choose(MEGABYTE, Some(12e6)), Packing::Bits);
        assert_eq!(choice.choose(MEGABYTE, Some(25e6)), Packing::Integers);
        // A machine that packs slowly.
        let mut choice = PackingChoice::of(Element::I64);
        choice.learn(Packing::Integers, MEGABYTE, MEGABYTE * 5 / 8, took(1e9));
        assert_eq!(choice.choose(MEGABYTE, None), Packing::Raw);
    }
}
