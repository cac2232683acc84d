//! The source of each sample of a run on several data sets.

use std::ops::Range;

use shoal_protocol::manifest::{Data, Manifest, Weight};

/// The source of each sample: a pure function of the run's seed, its weights and the number of the sample.
///
/// The draw is systematic: of any samples that follow one another, each source has its share to within one row for each
/// of the log2 halvings below. A range of sources is halved: of the first n samples of the range, its first half has
/// `floor((n · L + r) / W)`, where L and W are the weights of that half and of the range, and r below W is drawn from
/// the seed; and so on within each half. So the number of a source's samples before sample n follows from n alone, and
/// a source is read in its own order of rows, without a gap.
///
/// r is `(x · W) >> 64`, where x has the first 8 bytes of a BLAKE3 derivation (context `shoal draw of sources v1`) of the
/// seed, the phase and the two ends of the range, each as a little-endian u64; the phase of evaluations is `u64::MAX`.
#[derive(Debug, Clone)]
pub struct Draw {
    /// In the order of their samples; the first begins at sample 0.
    phases: Vec<Phase>,
    held_out: Shares,
}

/// Samples that are drawn by the same weights.
#[derive(Debug, Clone)]
struct Phase {
    /// Number of its first sample.
    first: u64,
    /// Samples of each source before it.
    before: Vec<u64>,
    shares: Shares,
}

/// A sample of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drawn {
    /// Position of the source among those of the run.
    pub source: usize,
    /// Number of the sample among those of the source.
    pub sample: u64,
}

impl Draw {
    /// The draw of a run.
    #[must_use]
    pub fn new(manifest: &Manifest) -> Self {
        let seed = manifest.training.seed;
        let Data::Mixture(mixture) = &manifest.data else {
            let alone = Shares::new(seed, 0, &[Weight(1)]);
            let phase = Phase { first: 0, before: vec![0], shares: alone.clone() };
            return Self { phases: vec![phase], held_out: alone };
        };
        let numbers = manifest.sample_numbers();
        let later = mixture
            .phases
            .iter()
            .map(|phase| (numbers.first_of_step(phase.from), phase.from.0, phase.weights.clone()));
        let mut phases: Vec<Phase> = Vec::new();
        for (first, step, weights) in [(0, 0, mixture.weights())].into_iter().chain(later) {
            let before = match phases.last() {
                None => vec![0; weights.len()],
                Some(phase) => phase.counts(first),
            };
            phases.push(Phase { first, before, shares: Shares::new(seed, step, &weights) });
        }
        Self { phases, held_out: Shares::new(seed, u64::MAX, &mixture.held_out_weights()) }
    }

    /// The source of sample number `sample` of the run.
    #[must_use]
    pub fn training(&self, sample: u64) -> Drawn {
        let phase = self.phase_of(sample);
        let Drawn { source, sample } = phase.shares.at(sample - phase.first);
        Drawn { source, sample: phase.before[source] + sample }
    }

    /// The source of held-out sample number `number`.
    #[must_use]
    pub fn held_out(&self, number: u64) -> Drawn {
        self.held_out.at(number)
    }

    /// Samples of each source before sample number `sample` of the run.
    #[must_use]
    pub fn counts(&self, sample: u64) -> Vec<u64> {
        self.phase_of(sample).counts(sample)
    }

    fn phase_of(&self, sample: u64) -> &Phase {
        let later = self.phases.partition_point(|phase| phase.first <= sample);
        // The first begins at sample 0.
        &self.phases[later.max(1) - 1]
    }
}

impl Phase {
    /// Samples of each source before sample number `sample` of the run.
    fn counts(&self, sample: u64) -> Vec<u64> {
        let mut counts = self.before.clone();
        let drawn = self.shares.counts(sample.saturating_sub(self.first));
        counts.iter_mut().zip(drawn).for_each(|(count, drawn)| *count += drawn);
        counts
    }
}

/// Samples by fixed weights.
#[derive(Debug, Clone)]
struct Shares {
    seed: u64,
    phase: u64,
    /// Sum of the weights of the sources before each, and of all.
    sums: Vec<u64>,
}

impl Shares {
    /// A manifest that was checked has few weights of at most 10^12.
    fn new(seed: u64, phase: u64, weights: &[Weight]) -> Self {
        let mut sums = vec![0u64];
        for weight in weights {
            sums.push(sums[sums.len() - 1].saturating_add(weight.0));
        }
        Self { seed, phase, sums }
    }

    fn at(&self, number: u64) -> Drawn {
        let (mut range, mut sample) = (0..self.sums.len() - 1, number);
        while range.len() > 1 {
            let middle = range.start + range.len() / 2;
            let half = Half::of(self, &range, middle);
            let before = half.count(sample);
            if half.count(sample.saturating_add(1)) > before {
                (range, sample) = (range.start..middle, before);
            } else {
                (range, sample) = (middle..range.end, sample - before);
            }
        }
        Drawn { source: range.start, sample }
    }

    /// Samples of each source among the first `number`.
    fn counts(&self, number: u64) -> Vec<u64> {
        let mut counts = vec![0; self.sums.len() - 1];
        let mut open = vec![(0..counts.len(), number)];
        while let Some((range, samples)) = open.pop() {
            if range.len() == 1 {
                counts[range.start] = samples;
                continue;
            }
            let middle = range.start + range.len() / 2;
            let first = Half::of(self, &range, middle).count(samples);
            open.push((range.start..middle, first));
            open.push((middle..range.end, samples - first));
        }
        counts
    }
}

/// The first half of a range of sources.
struct Half {
    weight: u64,
    /// The weight of the range.
    whole: u64,
    offset: u64,
}

impl Half {
    fn of(shares: &Shares, range: &Range<usize>, middle: usize) -> Self {
        let sum = |place: usize| shares.sums[place];
        let whole = sum(range.end) - sum(range.start);
        let mut hasher = blake3::Hasher::new_derive_key("shoal draw of sources v1");
        for number in [shares.seed, shares.phase, range.start as u64, range.end as u64] {
            hasher.update(&number.to_le_bytes());
        }
        let hash = hasher.finalize();
        let drawn = hash.as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let offset = ((u128::from(drawn) * u128::from(whole)) >> 64) as u64;
        Self { weight: sum(middle) - sum(range.start), whole, offset }
    }

    /// Samples of the half among the first `number` of the range.
    fn count(&self, number: u64) -> u64 {
        let samples = u128::from(number) * u128::from(self.weight) + u128::from(self.offset);
        // At most `number`. A range without weight has no samples.
        (samples / u128::from(self.whole.max(1))) as u64
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::{ContentHash, Step};
    use shoal_protocol::manifest::example::{mixture, small};
    use shoal_protocol::manifest::{Mixture, Phase, Start};

    use super::*;

    /// A run on sources with these weights, and its draw.
    fn drawn(weights: &[u64], phases: Vec<Phase>) -> (Manifest, Draw) {
        let mut sources = vec![mixture().sources[0].clone(); weights.len()];
        for (source, weight) in sources.iter_mut().zip(weights) {
            source.weight = Weight(*weight);
        }
        let mut manifest = Manifest { data: Data::Mixture(Mixture { sources, phases }), ..small() };
        manifest.training.steps = 10_000;
        let draw = Draw::new(&manifest);
        (manifest, draw)
    }

    fn counts_of(draw: &Draw, samples: Range<u64>, sources: usize) -> Vec<u64> {
        let mut counts = vec![0; sources];
        samples.for_each(|sample| counts[draw.training(sample).source] += 1);
        counts
    }

    #[test]
    fn draws_are_within_one_percent_of_the_weights() {
        for weights in [&[700_000, 300_000][..], &[1, 1, 1], &[9, 0, 5, 3, 2, 1, 80]] {
            let (manifest, draw) = drawn(weights, Vec::new());
            let counts = counts_of(&draw, 0..10_000, weights.len());
            let sum: u64 = weights.iter().sum();
            for (count, weight) in counts.iter().zip(weights) {
                let share = *weight as f64 / sum as f64;
                let off = (*count as f64 / 10_000.0 - share).abs();
                assert!(off <= 0.01 * share, "{count} of 10000 for {share}");
            }
            // Each step of 16 samples has its shares too.
            for first in (0..10_000).step_by(16) {
                let counts = counts_of(&draw, first..first + 16, weights.len());
                for (count, weight) in counts.iter().zip(weights) {
                    let share = 16.0 * *weight as f64 / sum as f64;
                    assert!((*count as f64 - share).abs() < 4.0, "{counts:?}");
                }
            }
            let mut other = manifest;
            other.training.seed += 1;
            let other = Draw::new(&other);
            assert!((0..1000).any(|at| other.training(at) != draw.training(at)), "{weights:?}");
        }
    }

    #[test]
    fn each_source_is_read_in_order_without_a_gap() {
        let phase = |from: u64, weights: [u64; 3]| Phase {
            from: Step(from),
            weights: weights.map(Weight).to_vec(),
        };
        let phases = vec![phase(3, [0, 1, 1]), phase(4, [7, 2, 0]), phase(90, [1, 1, 1])];
        let (_, draw) = drawn(&[5, 3, 2], phases);
        let mut next = vec![0; 3];
        for sample in 0..3000 {
            assert_eq!(draw.counts(sample), next, "before {sample}");
            let drawn = draw.training(sample);
            assert_eq!(drawn.sample, next[drawn.source]);
            next[drawn.source] += 1;
        }
    }

    #[test]
    fn a_phase_begins_with_the_first_sample_of_its_step() {
        let phases = vec![Phase { from: Step(6), weights: vec![Weight(0), Weight(1)] }];
        let (manifest, draw) = drawn(&[1, 0], phases);
        // A step has 8 microbatches of 2 samples.
        assert_eq!(counts_of(&draw, 0..96, 2), [96, 0]);
        assert_eq!(counts_of(&draw, 96..200, 2), [0, 104]);
        // A run that goes on within the second phase draws the same.
        let start = Start {
            checkpoint: ContentHash([3; 32]),
            bytes: 900,
            step: Step(9),
            samples: manifest.sample_numbers().first_of(Step(9), 0),
        };
        let later = Draw::new(&Manifest { start: Some(start), ..manifest });
        assert!((0..500).all(|sample| later.training(sample) == draw.training(sample)));
    }

    #[test]
    fn evaluations_draw_from_sources_that_hold_rows_out() {
        let (mut manifest, _) = drawn(&[1, 1, 2], Vec::new());
        let Data::Mixture(mixture) = &mut manifest.data else { unreachable!("it is one") };
        mixture.sources[0].data.held_out_rows = 0;
        let draw = Draw::new(&manifest);
        let mut counts = [0; 3];
        (0..30).for_each(|number| counts[draw.held_out(number).source] += 1);
        assert_eq!((counts[0], counts[1] + counts[2]), (0, 30));
        assert!((9..=11).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn one_source_has_every_sample() {
        let draw = Draw::new(&small());
        for sample in [0, 1, 77, u64::MAX] {
            assert_eq!(draw.training(sample), Drawn { source: 0, sample });
        }
    }
}
