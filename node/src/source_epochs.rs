//! How often a run sees each source of a mixture.

use shoal_data::draw::Draw;
use shoal_formats::epochs::{Epochs, MANY};
use shoal_protocol::ids::Step;
use shoal_protocol::manifest::Manifest;

/// How often a run sees one source of a mixture.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceEpochs {
    /// The source.
    pub name: String,
    /// Samples of the run from this source.
    pub samples: u64,
    /// Samples of the run.
    of: u64,
    /// Rows of the source.
    rows: u64,
}

impl SourceEpochs {
    /// Those of each source of a run's mixture; none of a run without one.
    #[must_use]
    pub fn of(manifest: &Manifest) -> Vec<Self> {
        let Some(mixture) = manifest.data.mixture() else { return Vec::new() };
        let draw = Draw::new(manifest);
        let numbers = manifest.sample_numbers();
        let [first, end] = [manifest.first_version(), Step(manifest.training.steps)]
            .map(|step| numbers.first_of(step, 0));
        let counts = draw.counts(first).into_iter().zip(draw.counts(end));
        let of = end.saturating_sub(first);
        let sources = mixture.sources.iter().zip(counts);
        let epochs = sources.map(|(source, (first, end))| Self {
            name: source.name.clone(),
            samples: end.saturating_sub(first),
            of,
            rows: source.data.rows,
        });
        epochs.collect()
    }

    /// Passes over the source.
    fn count(&self) -> f64 {
        self.samples as f64 / self.rows.max(1) as f64
    }

    /// A line with the numbers.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { name, samples, of, rows } = self;
        let share = 100.0 * *samples as f64 / (*of).max(1) as f64;
        let count = self.count();
        format!(
            "source {name}: {share:.1} % of the samples; {samples} samples of {rows} rows are {count:.2} epochs"
        )
    }

    /// What is likely not meant, if anything.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let (name, count) = (&self.name, self.count());
        (count >= MANY).then(|| {
            format!(
                "the run sees source {name} {count:.0} times, so a model learns it by heart: give it less weight, or \
                 prepare more data"
            )
        })
    }
}

/// The lines about how often a run sees its data, by source if there are several: numbers, then warnings.
#[must_use]
pub fn lines(manifest: &Manifest) -> (Vec<String>, Vec<String>) {
    let (epochs, sources) = (Epochs::of(manifest), SourceEpochs::of(manifest));
    let numbers = [epochs.line()].into_iter().chain(sources.iter().map(SourceEpochs::line));
    let warnings = sources.iter().filter_map(SourceEpochs::warning);
    (numbers.collect(), epochs.warning().into_iter().chain(warnings).collect())
}

#[cfg(test)]
mod tests {
    use shoal_formats::epochs::samples;
    use shoal_protocol::manifest::Data;
    use shoal_protocol::manifest::example::{mixture, small};

    use super::*;

    #[test]
    fn each_source_of_a_mixture_has_its_epochs() {
        let mut manifest = Manifest { data: Data::Mixture(mixture()), ..small() };
        assert_eq!(samples(&manifest), 2000);
        manifest.training.steps = 2006;
        let sources = SourceEpochs::of(&manifest);
        // 96 samples at 7 : 3, then 32000 at 1 : 3.
        assert!((8066..=8069).contains(&sources[0].samples), "{sources:?}");
        assert_eq!(sources[0].samples + sources[1].samples, 2006 * 16);
        let line = sources[0].line();
        assert!(line.starts_with("source web: 25.1 % of the samples; 806"), "{line}");
        let (numbers, warnings) = lines(&manifest);
        assert_eq!((numbers.len(), warnings.len()), (3, 1));
        assert!(warnings[0].contains("source code 24 times"), "{warnings:?}");
        assert!(SourceEpochs::of(&small()).is_empty());
    }
}
