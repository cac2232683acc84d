//! `shoal init`: writes a run configuration to start from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use shoal_data::prepared::{INDEX_FILE, Index};
use shoal_engine::BaseIndex;
use shoal_protocol::manifest::{Adam, Base, Dtype, Lora, LoraTarget, Model, Rule, Schedule};

use crate::cli::InitArgs;
use crate::config::RunConfig;
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Writes the default run configuration. Never overwrites a file.
///
/// # Errors
/// If the file exists or cannot be written.
pub(super) fn run(args: &InitArgs) -> anyhow::Result<()> {
    let mut config = match &args.from {
        Some(folder) => fine_tuning(folder, args.lora)?,
        None => RunConfig::default(),
    };
    if let Some(data) = &args.data {
        choose_data(&mut config, &absolute(data)?)?;
    }
    if let Some(epochs) = args.epochs {
        train_for(&mut config, epochs).exit_with(Exit::Usage)?;
    }
    write_new(&config, &args.output)
}

/// Writes a configuration to a file that does not exist, and prints how to train it.
pub(super) fn write_new(config: &RunConfig, output: &Path) -> anyhow::Result<()> {
    let path = output.display();
    let created = OpenOptions::new().write(true).create_new(true).open(output);
    let mut file = match created {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            Err(anyhow!("{path} exists: remove it, or choose another name with -o"))
        }
        other => other.with_context(|| path.to_string()),
    }
    .exit_with(Exit::Usage)?;
    file.write_all(config.to_toml().as_bytes()).with_context(|| path.to_string())?;
    outln!("wrote {path}; train it with `shoal start {path}` or `shoal local {path} --out DIR`");
    Ok(())
}

/// Tokens of a sample, unless the model has fewer positions.
pub(super) const CONTEXT: u32 = 1024;

/// Bytes of weights in one stage at most: with gradients and moments a stage then takes about 16 GiB.
const STAGE_BYTES: u64 = 2 << 30;

/// The same where the weights are frozen, in bf16 and without gradients and moments.
const FROZEN_STAGE_BYTES: u64 = 16 << 30;

/// Adapters learn at higher rates than all weights (arXiv 2106.09685, tables 9 to 12).
const LORA_RATE: f64 = 2e-4;

/// Sets the data: prepared data if the folder has an index, else a text.
fn choose_data(config: &mut RunConfig, data: &Path) -> anyhow::Result<()> {
    if !data.exists() {
        let problem = anyhow!("{} does not exist: prepare it first", data.display());
        return Err(problem).exit_with(Exit::Usage);
    }
    if !data.join(INDEX_FILE).exists() {
        config.data.path = Some(data.to_owned());
        return Ok(());
    }
    let index = Index::read(data).exit_with(Exit::Usage)?;
    config.model.context = index.context;
    if index.held_out.is_empty() {
        config.evaluation.every = 0;
    }
    config.data.prepared = Some((data.to_owned(), index.prepared()));
    Ok(())
}

/// Steps of one pass over the data, at least, where there are rows for as many.
const STEPS_OF_EPOCH: u64 = 8;

/// Evaluations of a run, at most, one of them before the first step and one before the last.
const EVALUATIONS: u64 = 10;

/// Sets the steps of so many passes over prepared data, and what depends on them: a small amount of data gets smaller
/// steps, a short run a shorter warm-up.
fn train_for(config: &mut RunConfig, epochs: u32) -> anyhow::Result<()> {
    let Some((_, prepared)) = &config.data.prepared else {
        return Err(anyhow!(
            "--epochs counts rows of prepared data: run `shoal data prepare` first"
        ));
    };
    let training = &mut config.training;
    let samples = u64::from(training.microbatch_size);
    let microbatches = (prepared.rows / (samples * STEPS_OF_EPOCH)).max(1);
    training.microbatches =
        training.microbatches.min(u32::try_from(microbatches).unwrap_or(u32::MAX));
    let rows = prepared.rows * u64::from(epochs);
    training.steps = rows.div_ceil(u64::from(training.microbatches) * samples);
    config.optimizer.warmup_steps = config.optimizer.warmup_steps.min(training.steps / 10);
    let evaluation = &mut config.evaluation;
    if evaluation.every > 0 {
        let last = training.steps.saturating_sub(1).max(1);
        let parts = (1..EVALUATIONS).rev().find(|parts| last.is_multiple_of(*parts)).unwrap_or(1);
        evaluation.every = last / parts;
        let held_out = prepared.held_out_rows.div_ceil(samples);
        evaluation.microbatches = u64::from(evaluation.microbatches).min(held_out) as u32;
    }
    Ok(())
}

/// Values for fine-tuning a base, all of it or adapters of a rank.
fn fine_tuning(folder: &Path, rank: Option<u32>) -> anyhow::Result<RunConfig> {
    let (index, base) = BaseIndex::read(folder).exit_with(Exit::Usage)?;
    let bytes: u64 = index.weights.iter().map(|file| file.bytes).sum();
    let mut config = RunConfig::default();
    let context = CONTEXT.min(index.model.context);
    let base = Some(Base { loads_weights: true, ..base });
    let layers = index.model.layers;
    config.model = Model { context, base, ..index.model };
    config.base = Some(absolute(folder)?);
    let training = &mut config.training;
    let stage_bytes = if rank.is_some() { FROZEN_STAGE_BYTES } else { STAGE_BYTES };
    training.stages = bytes.div_ceil(stage_bytes).clamp(2, 64).min(u64::from(layers)) as u16;
    training.dtype = Dtype::Bf16;
    training.recompute = true;
    training.microbatch_size = 1;
    training.microbatches = 16;
    // Large models diverge at rates at which small ones learn little.
    let rate = match rank {
        Some(_) => LORA_RATE,
        None if bytes > 2 << 30 => 1e-5,
        None => 5e-5,
    };
    let ungated = config.model.block.ungated;
    let exists = |target: &LoraTarget| !(ungated && *target == LoraTarget::GateProj);
    let targets = LoraTarget::ALL.into_iter().filter(exists).collect();
    // A scale of twice the rank is what most recipes take.
    config.lora = rank.map(|rank| Lora { rank, alpha: 2.0 * f64::from(rank), targets });
    config.optimizer.learning_rate = rate;
    config.optimizer.schedule = Schedule::Cosine { final_learning_rate: rate / 10.0 };
    config.optimizer.rule = Rule::Adamw(Adam::DEFAULT);
    config.optimizer.weight_decay = 0.01;
    config.evaluation.held_out = 0.05;
    Ok(config)
}

/// The path from the root, since a path in run.toml starts at the file's folder.
pub(super) fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::ContentHash;
    use shoal_protocol::manifest::Prepared;

    use super::*;
    use shoal_protocol::manifest::Evaluation;

    /// A configuration for data with these rows.
    fn with_rows(rows: u64, held_out_rows: u64) -> RunConfig {
        let mut config = RunConfig::default();
        config.training.microbatch_size = 1;
        config.training.microbatches = 16;
        let (index, context) = (ContentHash([0; 32]), config.model.context);
        let vocabulary = config.model.vocabulary;
        let prepared = Prepared { index, bytes: 1, rows, held_out_rows, context, vocabulary };
        config.data.prepared = Some((PathBuf::from("data"), prepared));
        config
    }

    #[test]
    fn epochs_decide_the_steps() {
        let mut config = with_rows(1601, 100);
        train_for(&mut config, 3).expect("prepared data");
        assert_eq!((config.training.steps, config.training.microbatches), (301, 16));
        assert_eq!(config.optimizer.warmup_steps, 20);
        let Evaluation { every, microbatches, .. } = config.evaluation;
        assert_eq!((300 % every, microbatches), (0, 8), "the last step is evaluated");
    }

    #[test]
    fn little_data_gets_small_steps() {
        let mut config = with_rows(20, 2);
        train_for(&mut config, 3).expect("prepared data");
        assert_eq!((config.training.steps, config.training.microbatches), (30, 2));
        assert_eq!((config.evaluation.every, config.evaluation.microbatches), (29, 2));
        assert_eq!(config.optimizer.warmup_steps, 3);
        let mut one = with_rows(1, 1);
        train_for(&mut one, 1).expect("prepared data");
        assert_eq!((one.training.steps, one.evaluation.every), (1, 1));
    }

    #[test]
    fn epochs_need_prepared_data() {
        let problem = train_for(&mut RunConfig::default(), 1).expect_err("plain text");
        assert!(problem.to_string().contains("shoal data prepare"));
    }
}
