//! Which packing makes a tensor's bytes arrive soonest.

use std::time::Duration;

use super::packing::Packing;

/// On links of as many bytes per second, and faster ones, no packing pays: bf16, which shrinks most,
/// gains up to about 1.5 Gb/s.
const FASTEST: f64 = 200e6;

/// Fewer bytes travel as they are.
const LEAST: usize = 4 << 10;

/// How much a measurement counts beside all before it.
const GAIN: f64 = 0.1;

/// Unpacking takes no longer than packing, and is not overlapped with it.
const BOTH_ENDS: f64 = 2.0;

/// One of so many tensors is packed although it does not seem to pay, to see whether that changed.
const LOOK_AGAIN: u32 = 256;

/// Chooses for tensors of one kind, from how fast they are packed and how much smaller that makes
/// them, whatever link they take.
#[derive(Debug, Default)]
pub struct PackingChoice {
    learnt: Option<Learnt>,
    unpacked: u32,
}

#[derive(Debug, Clone, Copy)]
struct Learnt {
    /// Of packing a byte.
    seconds: f64,
    /// Of a byte, on the link.
    left: f64,
}

impl PackingChoice {
    /// For a tensor of so many bytes on a link of so many bytes per second, if that is known.
    pub fn choose(&mut self, bytes: usize, rate: Option<f64>) -> Packing {
        let Some(rate) = rate.filter(|rate| *rate < FASTEST && bytes >= LEAST) else {
            return Packing::Raw;
        };
        let pays = match self.learnt {
            None => true,
            Some(Learnt { seconds, left }) => (1.0 - left) / rate > BOTH_ENDS * seconds,
        };
        if pays {
            self.unpacked = 0;
            return Packing::Zstd;
        }
        self.unpacked += 1;
        if self.unpacked.is_multiple_of(LOOK_AGAIN) { Packing::Zstd } else { Packing::Raw }
    }

    /// What packing came to: of `raw` bytes `packed` were left, after so long.
    pub fn learn(&mut self, raw: usize, packed: usize, took: Duration) {
        if raw == 0 {
            return;
        }
        let new =
            Learnt { seconds: took.as_secs_f64() / raw as f64, left: packed as f64 / raw as f64 };
        let mean = |old: f64, new: f64| old + GAIN * (new - old);
        self.learnt = Some(self.learnt.map_or(new, |old| Learnt {
            seconds: mean(old.seconds, new.seconds),
            left: mean(old.left, new.left),
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEGABYTE: usize = 1 << 20;

    /// Packs at 400 MB/s to this part.
    fn learnt(left: f64) -> PackingChoice {
        let mut choice = PackingChoice::default();
        let took = Duration::from_secs_f64(MEGABYTE as f64 / 400e6);
        choice.learn(MEGABYTE, (MEGABYTE as f64 * left) as usize, took);
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
        let mut choice = PackingChoice::default();
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
            choice.learn(MEGABYTE, MEGABYTE / 4, Duration::from_millis(1));
        }
        assert_eq!(choice.choose(MEGABYTE, Some(1e6)), Packing::Zstd);
    }
}
