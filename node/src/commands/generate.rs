//! `shoal generate`: continues a text with a saved model.

use std::num::NonZeroUsize;

use anyhow::anyhow;
use shoal_engine::{Device, DeviceChoice, EngineError, Generator, Sampling};

use crate::cli::GenerateArgs;
use crate::exit::{Exit, ExitWith};
use crate::text::TextCodec;

/// Prints the prompt and its continuation.
///
/// # Errors
/// If the checkpoint is damaged, or the temperature is out of range.
pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        let problem =
            anyhow!("--temperature {} is out of range: it must be 0 or more", args.temperature);
        return Err(problem).exit_with(Exit::Usage);
    }
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let device = Device::open(DeviceChoice::Auto, threads)?;
    let generator = match Generator::open(&args.directory, device) {
        Err(error @ EngineError::Checkpoint(_)) => Err(error).exit_with(Exit::Corrupt)?,
        other => other?,
    };
    let codec = TextCodec::of(generator.manifest(), &args.directory)?;
    let sampling = Sampling {
        tokens: args.tokens,
        seed: args.seed,
        temperature: args.temperature,
        vocabulary: codec.vocabulary(),
        ends: codec.ends(),
    };
    let tokens = generator.generate(&codec.encode(&args.prompt)?, &sampling)?;
    println!("{}{}", args.prompt, codec.decode(&tokens)?);
    Ok(())
}
