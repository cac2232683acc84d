//! `shoal generate`: continues a text.

use shoal_engine::{Ending, EngineError, Sampling};

use super::bucket;
use crate::cli::{GenerateArgs, SamplingArgs};
use crate::exit::{Exit, ExitWith};
use crate::terminal::{print_line, print_model_text};
use crate::text::TextCodec;
use crate::text_model::TextModel;

/// Prints the prompt, and its continuation as it comes.
///
/// # Errors
/// If the folder has no model, a file is damaged, or the prompt is too long.
pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let mut model = TextModel::open(&bucket::model_folder(&args.model)?, args.base.as_deref())?;
    let prompt = model.codec().encode(&args.prompt)?;
    let (tokens, positions) = (prompt.len(), model.positions());
    if tokens > positions {
        return Err(EngineError::TextTooLong { tokens, positions }).exit_with(Exit::Usage);
    }
    print_model_text(&args.prompt)?;
    let sampling = sampling(args.tokens, args.sampling, model.codec());
    let written = model.write(&prompt, sampling, print_model_text)?;
    print_model_text("\n")?;
    if written.ending == Ending::Positions {
        print_line(&format!("the text ends where the model's {positions} positions end"));
    }
    Ok(())
}

/// The choice of at most `tokens` tokens.
pub(super) fn sampling(tokens: usize, args: SamplingArgs, codec: &TextCodec) -> Sampling {
    Sampling {
        tokens,
        seed: args.seed,
        temperature: args.temperature,
        top_p: args.top_p,
        vocabulary: codec.vocabulary(),
        ends: codec.ends(),
    }
}
