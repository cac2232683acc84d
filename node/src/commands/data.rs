//! `shoal data`: shows the data of a run.

use anyhow::anyhow;
use serde::Serialize;
use shoal_engine::{Samples, TokenFile};
use shoal_protocol::ids::{Microbatch, Step};

use crate::cli::{DataCommand, DataShowArgs};
use crate::config::RunConfig;
use crate::dataset;
use crate::exit::{Exit, ExitWith};

/// A microbatch, as printed.
#[derive(Debug, Serialize)]
struct Shown {
    step: u64,
    microbatch: u32,
    /// Token ids, a list per sample.
    inputs: Vec<Vec<u32>>,
    /// The token that follows each input.
    labels: Vec<Vec<u32>>,
}

/// Prints a microbatch.
///
/// # Errors
/// If the run configuration or its text is invalid, or the run has no such microbatch.
pub(super) fn run(command: DataCommand) -> anyhow::Result<()> {
    let DataCommand::Show(args) = command;
    println!("{}", serde_json::to_string(&show(&args)?)?);
    Ok(())
}

fn show(args: &DataShowArgs) -> anyhow::Result<Shown> {
    let config = RunConfig::load(&args.config).exit_with(Exit::Usage)?;
    let scratch = tempfile::tempdir()?;
    let dataset::Dataset { manifest, token_file } = dataset::prepare(&config, scratch.path())?;
    let steps = manifest.training.steps;
    if args.step >= steps {
        let problem =
            anyhow!("there is no step {}: the run has {steps} steps, from 0 on", args.step);
        return Err(problem).exit_with(Exit::Usage);
    }
    let microbatches = manifest.microbatches_of(args.step);
    if args.microbatch >= microbatches {
        let (step, microbatch) = (args.step, args.microbatch);
        let problem = anyhow!(
            "there is no microbatch {microbatch}: step {step} has microbatches 0 to {}",
            microbatches - 1
        );
        return Err(problem).exit_with(Exit::Usage);
    }
    let file = TokenFile::open(&token_file, &manifest.tokens)?;
    let samples = Samples::new(&manifest, file);
    let batch = samples.batch(Step(args.step), Microbatch(args.microbatch));
    let context = manifest.model.context as usize;
    Ok(Shown {
        step: args.step,
        microbatch: args.microbatch,
        inputs: rows(&batch.inputs, context),
        labels: rows(&batch.labels, context),
    })
}

fn rows(tokens: &[u8], context: usize) -> Vec<Vec<u32>> {
    let (words, _) = tokens.as_chunks::<4>();
    let ids: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    ids.chunks(context).map(<[u32]>::to_vec).collect()
}
