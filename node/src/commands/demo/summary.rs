//! What a demo prints at its end.

use std::fmt;
use std::path::Path;

use shoal_engine::{Device, DeviceChoice, Ending, Generator, Sampling};
use shoal_formats::words::{counted, with_prefix};
use shoal_protocol::manifest::Manifest;

use crate::event_text::currency;
use crate::report::Report;
use crate::text::TextCodec;

/// Tokens of the sample.
const SAMPLE: usize = 320;

/// Most tokens of the prompt.
const PROMPT: usize = 48;

/// What came of a demo.
#[derive(Debug)]
pub(super) struct Summary<'a> {
    pub(super) folder: &'a Path,
    pub(super) report: &'a Report,
    /// Of one process alone, where there was one.
    pub(super) reference: Option<&'a Report>,
    pub(super) unigram_entropy: f64,
    pub(super) sample: Sample,
}

/// A text that the model continued.
#[derive(Debug)]
pub(super) struct Sample {
    prompt: String,
    continuation: String,
}

/// Has the model continue a line of the text that it was never trained on.
///
/// # Errors
/// When the checkpoint cannot be read.
pub(super) fn sample(
    checkpoint: &Path,
    manifest: &Manifest,
    tokens: &[u32],
) -> anyhow::Result<Sample> {
    let held_out = &tokens[tokens.len() - manifest.held_out_tokens() as usize..];
    let plain = manifest.text().map(|tokens| tokens.tokenizer);
    let codec = TextCodec::of(plain, checkpoint)?;
    let prompt = first_line(&codec.decode(held_out)?);
    let mut generator = Generator::open(checkpoint, Device::open(DeviceChoice::Cpu, 1)?)?;
    let sampling = Sampling {
        tokens: generator.positions() / 2,
        seed: manifest.training.seed,
        temperature: 0.7,
        top_p: 1.0,
        vocabulary: codec.vocabulary(),
        ends: codec.ends(),
    };
    let continuation = continuation(&mut generator, codec.encode(&prompt)?, &sampling)?;
    let continuation = up_to_an_end(&codec.decode(&continuation)?).to_owned();
    Ok(Sample { prompt, continuation })
}

/// About `SAMPLE` tokens that follow a prompt. They may be more than the model has positions, so each
/// part follows only the end of what comes before.
fn continuation(
    generator: &mut Generator,
    prompt: Vec<u32>,
    sampling: &Sampling,
) -> anyhow::Result<Vec<u32>> {
    let room = generator.positions().saturating_sub(sampling.tokens).max(1);
    let mut text = prompt.clone();
    for part in 0..SAMPLE.div_ceil(sampling.tokens.max(1)) as u64 {
        let seed = sampling.seed.wrapping_add(part);
        let end = &text[text.len().saturating_sub(room)..];
        let mut next = generator.generate(end, Sampling { seed, ..sampling.clone() })?;
        text.extend(next.by_ref().collect::<Result<Vec<_>, _>>()?);
        if next.ending() != Some(Ending::Tokens) {
            break;
        }
    }
    Ok(text.split_off(prompt.len()))
}

/// A text up to its last line end, or up to its last word end where the last line end is in its first half.
fn up_to_an_end(text: &str) -> &str {
    let line_end = text.rfind('\n').filter(|end| *end >= text.len() / 2);
    line_end.or_else(|| text.rfind(char::is_whitespace)).map_or(text, |end| text[..end].trim_end())
}

/// The beginning of the first whole line that says something.
fn first_line(text: &str) -> String {
    let lines = text.lines().skip(1).map(str::trim_end);
    let line = lines.clone().find(|line| line.trim().len() >= PROMPT / 2);
    line.or_else(|| text.lines().next()).unwrap_or_default().chars().take(PROMPT).collect()
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        writeln!(f, "\nA sample, continuing a line of the held-out text:\n")?;
        let text = format!("{}⟶{}", self.sample.prompt, self.sample.continuation);
        for line in text.lines() {
            // A model that knows little writes what a terminal would obey.
            writeln!(f, "    {}", line.replace(char::is_control, "\u{fffd}"))?;
        }
        writeln!(f)?;
        if let (Some(first), Some(last)) = (report.steps.first(), report.steps.last()) {
            writeln!(
                f,
                "loss        {:.3} to {:.3} nats per token; knowing only how frequent each is: {:.3}",
                first.loss, last.loss, self.unigram_entropy
            )?;
        }
        writeln!(f, "loss curve  {}", self.folder.join("loss.svg").display())?;
        self.fmt_speed(f)?;
        self.fmt_cost(f)?;
        if report.kills > 0 {
            let numbers = &report.microbatches;
            writeln!(
                f,
                "killed      {}; {} microbatches were computed again, {} missing, {} returns to a \
                 checkpoint",
                counted(report.kills, "peer"),
                numbers.replayed,
                numbers.missing,
                report.rewinds
            )?;
        }
        writeln!(f, "folder      {}", self.folder.display())?;
        self.fmt_hashes(f)
    }
}

impl Summary<'_> {
    fn fmt_speed(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        if report.steps.is_empty() {
            return Ok(());
        }
        let speed = with_prefix(report.tokens_per_second);
        let (peers, stages) = (report.peers, report.stages);
        write!(f, "speed       {speed} tokens/s with {peers} peers in {stages} stages")?;
        if let Some(alone) = self.reference {
            let speed = with_prefix(alone.tokens_per_second);
            write!(f, "; {speed} tokens/s with one alone, one thread each")?;
        }
        writeln!(f)
    }

    fn fmt_cost(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        let Some(cost) = report.cost else { return Ok(()) };
        write!(f, "cost        {} units of currency", currency(cost))?;
        if let Some(tokens) = report.tokens_per_currency_unit {
            write!(f, ", {} tokens for each", with_prefix(tokens))?;
        }
        writeln!(f)
    }

    fn fmt_hashes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |hash: Option<_>| hash.map_or("none".to_owned(), |hash| format!("{hash:.16}"));
        let swarm = self.report.checkpoint_hash;
        let Some(reference) = self.reference else {
            return writeln!(f, "checkpoint  {} (not compared)", name(swarm));
        };
        let alone = reference.checkpoint_hash;
        let verdict = if alone == swarm { "identical" } else { "DIFFERENT" };
        let hashes = format!("swarm {}, one process alone {}", name(swarm), name(alone));
        writeln!(f, "checkpoint  {verdict}: {hashes}")?;
        let before = self.report.checkpoints.len().saturating_sub(1);
        if before > 0 {
            let unlike = self.report.checkpoints_unlike(reference).len();
            writeln!(f, "            {before} before it, {unlike} of all different")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::ContentHash;

    use super::*;

    #[test]
    fn a_prompt_is_the_beginning_of_a_whole_line() {
        let text =
            "of a line\n\nshort\n    a line that is long enough to be continued by a model\n";
        assert_eq!(first_line(text), "    a line that is long enough to be continued b");
        assert_eq!(first_line("only this"), "only this");
        assert_eq!(first_line(""), "");
    }

    #[test]
    fn a_sample_ends_with_a_line_or_else_a_word() {
        assert_eq!(up_to_an_end("to be\nor not\nto b"), "to be\nor not");
        assert_eq!(up_to_an_end("a\nto be or not to b"), "a\nto be or not to");
        assert_eq!(up_to_an_end("to be\n\n\n"), "to be");
        assert_eq!(up_to_an_end("wörd"), "wörd");
        assert_eq!(up_to_an_end(""), "");
    }

    fn summary(reference: Option<&Report>, report: &Report) -> String {
        let sample = Sample { prompt: "To be".into(), continuation: " or not\nto \u{1b}be".into() };
        let folder = Path::new("demo");
        Summary { folder, report, reference, unigram_entropy: 3.3, sample }.to_string()
    }

    #[test]
    fn hashes_are_compared_in_one_line() {
        let report = |byte| {
            let mut report = Report::new();
            report.checkpoint_hash = Some(ContentHash([byte; 32]));
            report
        };
        let text = summary(Some(&report(1)), &report(1));
        assert!(text.ends_with(
            "checkpoint  identical: swarm 0101010101010101, one process alone 0101010101010101\n"
        ), "{text}");
        assert!(summary(Some(&report(2)), &report(1)).contains("checkpoint  DIFFERENT: "));
        assert!(summary(None, &report(1)).contains("(not compared)"));
        assert!(text.contains("    To be⟶ or not\n    to \u{fffd}be\n"), "{text}");
    }
}
