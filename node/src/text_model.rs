//! A model with its tokenizer: continues texts.

use std::io;
use std::num::NonZeroUsize;
use std::path::Path;

use shoal_engine::{Device, DeviceChoice, Ending, EngineError, Generator, Sampling};

use crate::exit::{Exit, ExitWith};
use crate::text::TextCodec;
use crate::text_stream::TextStream;

/// A model in a folder.
pub(crate) struct TextModel {
    generator: Generator,
    codec: TextCodec,
}

/// A text that a model wrote.
pub(crate) struct Written {
    pub(crate) text: String,
    pub(crate) ending: Ending,
}

/// Loads the model of a checkpoint or a base, with all cores. A checkpoint of adapters needs the `base` of its run.
///
/// # Errors
/// If the folder has no model, or a file is damaged.
pub(crate) fn generator(
    folder: &Path,
    base: Option<&Path>,
    device: DeviceChoice,
) -> anyhow::Result<Generator> {
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let device = Device::open(device, threads)?;
    Generator::open_with_base(folder, base, device).or_else(|error| {
        let exit = match &error {
            EngineError::Checkpoint(_) | EngineError::Base(_) => Exit::Corrupt,
            EngineError::NotAModel { .. }
            | EngineError::NeedsBase { .. }
            | EngineError::OtherBase { .. } => Exit::Usage,
            _ => Exit::Failed,
        };
        Err(error).exit_with(exit)
    })
}

impl TextModel {
    /// Loads the model of a checkpoint or a base, with all cores. A checkpoint of adapters needs the `base`
    /// of its run.
    ///
    /// # Errors
    /// If the folder has no model, or a file is damaged.
    pub(crate) fn open(folder: &Path, base: Option<&Path>) -> anyhow::Result<Self> {
        let generator = generator(folder, base, DeviceChoice::Auto)?;
        let codec = TextCodec::of(generator.tokenizer(), folder)?;
        Ok(Self { generator, codec })
    }

    /// The tokenizer.
    pub(crate) fn codec(&self) -> &TextCodec {
        &self.codec
    }

    /// The longest text that the model can read, in tokens.
    pub(crate) fn positions(&self) -> usize {
        self.generator.positions()
    }

    /// Continues the tokens of a prompt, at least one, and passes on each part of the text as soon as it
    /// is known.
    ///
    /// # Errors
    /// If the prompt is longer than the model's positions, or `show` fails.
    pub(crate) fn write(
        &mut self,
        prompt: &[u32],
        sampling: Sampling,
        mut show: impl FnMut(&str) -> io::Result<()>,
    ) -> anyhow::Result<Written> {
        let mut stream = TextStream::new(&self.codec);
        let mut text = String::new();
        let mut add = |piece: String| {
            text.push_str(&piece);
            show(&piece)
        };
        let mut generation = self.generator.generate(prompt, sampling)?;
        for token in generation.by_ref() {
            add(stream.push(token?)?)?;
        }
        let ending = generation.ending().expect("it ended without an error");
        add(stream.finish()?)?;
        Ok(Written { text, ending })
    }
}
