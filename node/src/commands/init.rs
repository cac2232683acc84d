//! `shoal init`: writes a run configuration to start from.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use shoal_data::prepared::{INDEX_FILE, Index};
use shoal_engine::BaseIndex;
use shoal_engine::base::BaseFile;
use shoal_formats::config::data_section::{SourceKeys, mix};
use shoal_formats::config::loss_section::LossName;
use shoal_formats::config::{RunConfig, TrainingEpochs, reads_bytes};
use shoal_protocol::codec::Codec;
use shoal_protocol::manifest::{
    Adam, Base, Data, Dtype, Lora, LoraTarget, Model, Pairs, Prepared, Quantisation, Rule, Schedule,
};

use crate::cli::InitArgs;
use crate::config_sources::OnDisk;
use crate::dataset;
use crate::exit::{Exit, ExitWith};
use crate::source_epochs;
use crate::terminal::outln;
use crate::whole_file;

/// Writes the default run configuration. Never overwrites a file.
///
/// # Errors
/// If the file exists or cannot be written, or a base is to train on data that is not prepared for it.
pub(super) fn run(args: &InitArgs) -> anyhow::Result<()> {
    let data = match &args.data[..] {
        [] => None,
        [alone] if weighted(alone)?.is_none() => Some(Path::new(alone)),
        several => return mixture(args, several),
    };
    let mut config = match &args.from {
        Some(folder) => {
            let config = fine_tuning(folder, (args.lora, args.nf4))?;
            check_prepared(&config, folder, data)?;
            config
        }
        None => RunConfig::default(),
    };
    if let Some(data) = data {
        choose_data(&mut config, &absolute(data)?, args.epochs)?;
    }
    choose_loss(&mut config, args.loss)?;
    write_and_count(&config, args)
}

/// Writes the configuration, and prints how often the run sees prepared data.
fn write_and_count(config: &RunConfig, args: &InitArgs) -> anyhow::Result<()> {
    let manifest = config.data.rows().map(|data| config.resolve(data).exit_with(Exit::Usage));
    let manifest = manifest.transpose()?;
    if args.force {
        write(config, &args.out)?;
    } else {
        write_new(config, &args.out)?;
    }
    if let Some(manifest) = manifest {
        let (numbers, warnings) = source_epochs::lines(&manifest);
        numbers.iter().for_each(|line| outln!("{line}"));
        warnings.iter().for_each(|warning| outln!("warning: {warning}"));
    }
    Ok(())
}

/// Writes the configuration of a run on several data sets.
fn mixture(args: &InitArgs, sources: &[String]) -> anyhow::Result<()> {
    let mut config = match &args.from {
        Some(folder) => fine_tuning(folder, (args.lora, args.nf4))?,
        None => RunConfig::default(),
    };
    let mut keys = Vec::new();
    for source in sources {
        let Some((folder, weight)) = weighted(source)? else {
            let problem = "of several data sets each has a weight: --data web=0.7 code=0.3";
            return Err(anyhow!("{source} has no weight: {problem}")).exit_with(Exit::Usage);
        };
        keys.push(SourceKeys { name: None, prepared: absolute(folder)?, weight });
    }
    let mixed = mix(keys, Vec::new(), Path::new(""), &OnDisk);
    config.data = mixed.map_err(|reason| anyhow!(reason)).exit_with(Exit::Usage)?;
    let Some(data) = config.data.rows() else { return Ok(()) };
    let prepared = data.prepared();
    let held_out = data.mixture().map_or_else(
        || prepared.iter().map(|data| data.held_out_rows).sum(),
        |mixture| {
            let drawn = prepared.iter().zip(mixture.held_out_weights());
            drawn.filter(|(_, weight)| weight.0 > 0).map(|(data, _)| data.held_out_rows).sum()
        },
    );
    if held_out == 0 {
        config.evaluation.every = 0;
    }
    prepared.iter().for_each(|data| fit(&mut config, data));
    let rows = prepared.iter().map(|data| data.rows).sum();
    train_for(&mut config, (rows, held_out), args.epochs.map_or(EPOCHS, f64::from));
    choose_loss(&mut config, args.loss)?;
    config.check().exit_with(Exit::Usage)?;
    write_and_count(&config, args)
}

/// The folder and the weight of `FOLDER=WEIGHT`. A path that exists as it is has no weight.
fn weighted(source: &str) -> anyhow::Result<Option<(&Path, f64)>> {
    if Path::new(source).exists() {
        return Ok(None);
    }
    let Some((folder, weight)) = source.rsplit_once('=') else { return Ok(None) };
    let parsed = weight.parse().ok();
    let problem = || anyhow!("--data {source}: {weight:?} is no weight; give a number such as 0.7");
    let weight = parsed.ok_or_else(problem).exit_with(Exit::Usage)?;
    Ok(Some((Path::new(folder), weight)))
}

/// Refuses to train a base on text whose bytes would pass for its tokens.
fn check_prepared(config: &RunConfig, base: &Path, data: Option<&Path>) -> anyhow::Result<()> {
    let is_prepared = data.is_some_and(|data| data.join(INDEX_FILE).exists());
    let is_missing = data.is_some_and(|data| !data.exists());
    if is_prepared || is_missing || reads_bytes(&config.model) {
        return Ok(());
    }
    let base = base.display();
    let why = match data {
        Some(data) => {
            format!("{} is no prepared data, and {base} does not read bytes", data.display())
        }
        None => format!("{base} needs data in its own tokens"),
    };
    let source = data.unwrap_or(Path::new("SRC")).display();
    let context = config.model.context;
    Err(anyhow!(
        "{why}: run `shoal data prepare {source} --tokenizer {base} --context {context} -o data`, then \
         `shoal init --from {base} --data data -o run.toml`"
    ))
    .exit_with(Exit::Usage)
}

/// Writes a configuration to a file that does not exist, and prints how to train it.
pub(super) fn write_new(config: &RunConfig, out: &Path) -> anyhow::Result<()> {
    let path = out.display();
    let created = OpenOptions::new().write(true).create_new(true).open(out);
    let mut file = match created {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            Err(anyhow!("{path} exists: choose another name with -o, or have `shoal init` write over it with --force"))
        }
        other => other.with_context(|| path.to_string()),
    }
    .exit_with(Exit::Usage)?;
    file.write_all(config.to_toml().as_bytes()).with_context(|| path.to_string())?;
    say_written(out);
    Ok(())
}

/// Writes a configuration to a file in place of what it has, and prints how to train it.
fn write(config: &RunConfig, out: &Path) -> anyhow::Result<()> {
    whole_file::write(out, config.to_toml().as_bytes())
        .with_context(|| out.display().to_string())?;
    say_written(out);
    Ok(())
}

fn say_written(run: &Path) {
    let path = run.display();
    outln!("wrote {path}; train it with `shoal start {path}` or `shoal local {path} --out DIR`");
}

/// Tokens of a sample, unless the model has fewer positions.
pub(super) const CONTEXT: u32 = 1024;

/// Fewest steps of an epoch that are worth larger steps.
const STEPS: u64 = 8;

/// Evaluations of a run, at most, one of them before the first step and one before the last.
const EVALUATIONS: u64 = 10;

/// Passes over prepared data, as most recipes of fine-tuning take.
const EPOCHS: f64 = 3.0;

/// Bytes of weights in one stage at most: with gradients and moments a stage then takes about 16 GiB.
const STAGE_BYTES: u64 = 2 << 30;

/// The same where the weights are frozen, in bf16 and without gradients and moments.
const FROZEN_STAGE_BYTES: u64 = 16 << 30;

/// How many times lower the rate on pairs is than that on texts, as most recipes have it.
const RATE_OF_PAIRS: f64 = 10.0;

/// Adapters learn at higher rates than all weights (arXiv 2106.09685, tables 9 to 12).
const LORA_RATE: f64 = 2e-4;

/// Sets the data: prepared data if the folder has an index, for these passes over it, else a text.
fn choose_data(config: &mut RunConfig, data: &Path, epochs: Option<u32>) -> anyhow::Result<()> {
    if !data.exists() {
        let problem = anyhow!("{} does not exist: prepare it first", data.display());
        return Err(problem).exit_with(Exit::Usage);
    }
    if !data.join(INDEX_FILE).exists() {
        if epochs.is_some() {
            let problem = "--epochs counts rows of prepared data: run `shoal data prepare` first";
            return Err(anyhow!(problem)).exit_with(Exit::Usage);
        }
        config.data.path = Some(data.to_owned());
        return Ok(());
    }
    let index = Index::read(data).exit_with(Exit::Usage)?;
    if index.held_out.is_empty() {
        config.evaluation.every = 0;
    }
    let prepared = index.prepared();
    fit(config, &prepared);
    let rows = (prepared.rows, prepared.held_out_rows);
    train_for(config, rows, epochs.map_or(EPOCHS, f64::from));
    config.data.prepared = Some((data.to_owned(), prepared));
    Ok(())
}

/// Sets the loss: that which is asked for, or one that the data has all for.
fn choose_loss(config: &mut RunConfig, asked: Option<LossName>) -> anyhow::Result<()> {
    let data = config.data.rows();
    let pairs = data.iter().flat_map(Data::prepared).find_map(|prepared| prepared.pairs);
    let name = match (asked, pairs) {
        (Some(name), _) => name,
        (None, None) => return Ok(()),
        (None, Some(Pairs { reference: Some(_) })) => LossName::Dpo,
        (None, Some(Pairs { reference: None })) => {
            return Err(anyhow!(
                "the data holds pairs without the log-probabilities of a base: add them with `shoal data reference`, or \
                 choose a loss that needs none by --loss orpo or --loss simpo"
            ))
            .exit_with(Exit::Usage);
        }
    };
    config.training.loss = name.usual();
    if config.training.loss.preference().is_some() && config.base.is_some() {
        let optimizer = &mut config.optimizer;
        let final_learning_rate = optimizer.learning_rate / (10.0 * RATE_OF_PAIRS);
        optimizer.learning_rate /= RATE_OF_PAIRS;
        optimizer.schedule = Schedule::Cosine { final_learning_rate };
    }
    Ok(())
}

/// Gives the model the samples of prepared data, and a new one its tokens.
fn fit(config: &mut RunConfig, data: &Prepared) {
    config.model.context = data.context;
    if config.base.is_none() {
        config.model.vocabulary = data.vocabulary;
    }
}

/// Sets the passes over prepared data with these rows to train on and held-out rows, and what depends on their steps.
fn train_for(config: &mut RunConfig, (rows, held_out_rows): (u64, u64), epochs: f64) {
    let training = &mut config.training;
    // Of few samples, smaller steps: a step that takes all of them learns little in an epoch.
    let size = u64::from(training.microbatch_size);
    while training.microbatches > 2 && u64::from(training.microbatches) * size * STEPS > rows {
        training.microbatches /= 2;
    }
    let per_step = u64::from(training.microbatches) * size;
    let steps = (epochs * rows as f64 / per_step as f64).ceil() as u64;
    config.epochs = TrainingEpochs::Of(epochs);
    training.steps = 0;
    // A short run warms up within its steps.
    config.optimizer.warmup_steps = config.optimizer.warmup_steps.min(steps / 10);
    let evaluation = &mut config.evaluation;
    if evaluation.every > 0 {
        let last = steps.saturating_sub(1).max(1);
        let parts = (1..EVALUATIONS).rev().find(|parts| last.is_multiple_of(*parts)).unwrap_or(1);
        evaluation.every = last / parts;
        let held_out = held_out_rows.div_ceil(size);
        evaluation.microbatches = u64::from(evaluation.microbatches).min(held_out) as u32;
    }
}

/// Values for fine-tuning a base, all of it or adapters of a rank, perhaps beside matrices in 4 bits.
fn fine_tuning(folder: &Path, (rank, is_packed): (Option<u32>, bool)) -> anyhow::Result<RunConfig> {
    let (index, base) = BaseIndex::read(folder).exit_with(Exit::Usage)?;
    let packs = is_packed || index.packed.is_some();
    dataset::check_packed(&index, rank.is_some(), folder)?;
    let bytes = held_bytes(&index, packs);
    let context = CONTEXT.min(index.model.context);
    let base = Some(Base { loads_weights: true, ..base });
    let model = Model { context, base, ..index.model };
    let mut config = fine_tuned(model, bytes, (rank, packs));
    config.base = Some(absolute(folder)?);
    Ok(config)
}

/// The same for a model of so many bytes.
pub(super) fn fine_tuned(
    model: Model,
    bytes: u64,
    (rank, packs): (Option<u32>, bool),
) -> RunConfig {
    let mut config = RunConfig::default();
    let layers = model.layers;
    config.model = model;
    let training = &mut config.training;
    let stage_bytes = if rank.is_some() { FROZEN_STAGE_BYTES } else { STAGE_BYTES };
    training.stages = bytes.div_ceil(stage_bytes).clamp(2, 64).min(u64::from(layers)) as u16;
    training.dtype = Dtype::Bf16;
    // What passes round to 16 bits crosses links in 16 without a loss.
    config.codec.activations = Codec::Bf16;
    config.codec.activation_gradients = Codec::Bf16;
    training.recompute = true;
    training.microbatch_size = 1;
    training.microbatches = 16;
    // Large models diverge at rates at which small ones learn little.
    let rate = match rank {
        Some(_) => LORA_RATE,
        None if bytes > 2 << 30 => 1e-5,
        None => 5e-5,
    };
    // Adapters of all experts are many more weights than most want: a run may name them.
    let exists = |target: &LoraTarget| {
        !target.is_of_experts(&config.model) && config.model.why_no_adapters(*target).is_none()
    };
    let targets = LoraTarget::ALL.into_iter().filter(exists).collect();
    // A scale of twice the rank is what most recipes take.
    let base = packs.then_some(Quantisation::Nf4);
    config.lora = rank.map(|rank| Lora { rank, alpha: 2.0 * f64::from(rank), targets, base });
    config.optimizer.learning_rate = rate;
    config.optimizer.schedule = Schedule::Cosine { final_learning_rate: rate / 10.0 };
    config.optimizer.rule = Rule::Adamw(Adam::DEFAULT);
    config.optimizer.weight_decay = 0.01;
    config.evaluation.held_out = 0.05;
    config
}

/// Bytes of a base's weights in memory, where the matrices of its layers may be packed.
fn held_bytes(index: &BaseIndex, packs: bool) -> u64 {
    let bytes = |files: &[BaseFile]| files.iter().map(|file| file.bytes).sum::<u64>();
    let all = bytes(&index.weights);
    if !packs || index.packed.is_some() {
        return all;
    }
    // 33 of 64 bytes for a weight, of which files have two bytes. The first and the last file are not packed.
    let layers = bytes(&index.weights[1..index.weights.len() - 1]);
    all - layers + layers * 33 / 128
}

/// The path from the root, since a path in run.toml starts at the file's folder.
///
/// # Errors
/// If the file could not hold it: TOML is text in UTF-8.
pub(super) fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    let path = std::path::absolute(path).with_context(|| path.display().to_string())?;
    if path.to_str().is_none() {
        let reason = anyhow!(
            "run.toml cannot hold the path {}, which is not UTF-8: rename it, or use a link to it",
            path.display()
        );
        return Err(reason).exit_with(Exit::Usage);
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use shoal_protocol::ids::ContentHash;
    use shoal_protocol::manifest::{Data, Evaluation};

    use super::*;

    /// A configuration for some passes over data with these rows, and its steps.
    fn trained_for(epochs: f64, rows: u64, held_out_rows: u64) -> (RunConfig, u64) {
        let mut config = RunConfig::default();
        config.training.microbatch_size = 1;
        config.training.microbatches = 16;
        let (index, context) = (ContentHash([0; 32]), config.model.context);
        let vocabulary = config.model.vocabulary;
        let prepared =
            Prepared { index, bytes: 1, rows, held_out_rows, context, vocabulary, pairs: None };
        train_for(&mut config, (rows, held_out_rows), epochs);
        let manifest = config.resolve(Data::Prepared(prepared)).expect("a valid run");
        (config, manifest.training.steps)
    }

    #[test]
    fn a_path_that_is_no_text_is_refused_and_not_written_otherwise() {
        use std::os::unix::ffi::OsStrExt;
        let path = Path::new(std::ffi::OsStr::from_bytes(b"a\xffb"));
        let error = absolute(path).expect_err("no text").to_string();
        assert!(error.contains("not UTF-8"), "{error}");
        assert_eq!(absolute(Path::new("/a")).expect("text"), Path::new("/a"));
    }

    #[test]
    fn epochs_decide_the_steps() {
        let (config, steps) = trained_for(3.0, 1601, 100);
        assert_eq!((steps, config.training.microbatches), (301, 16));
        assert_eq!(config.optimizer.warmup_steps, 20);
        let Evaluation { every, microbatches, .. } = config.evaluation;
        assert_eq!((300 % every, microbatches), (0, 8), "the last step is evaluated");
    }

    #[test]
    fn adapters_are_beside_matrices_that_the_model_has() {
        let targets = |keys: serde_json::Value| {
            let mut config = serde_json::json!({
                "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4,
                "max_position_embeddings": 128, "intermediate_size": 128, "vocab_size": 300,
                "num_experts_per_tok": 2, "q_lora_rank": null,
            });
            config.as_object_mut().expect("keys").extend(keys.as_object().expect("keys").clone());
            let model = shoal_engine::family::describe(&config).expect("a model").model;
            let lora = fine_tuned(model, 1 << 20, (Some(8), false)).lora.expect("adapters");
            let names = lora.targets.iter().map(|target| target.matrix().trim_end_matches("_proj"));
            names.collect::<Vec<_>>().join(" ")
        };
        let of = |family: &str| targets(serde_json::json!({ "model_type": family }));
        assert_eq!(of("llama"), "q k v o gate up down");
        assert_eq!(of("gpt_neox"), "q k v o up down");
        assert_eq!(of("mixtral"), "q k v o");
        assert_eq!(of("deepseek_v2"), "q o");
        let keys = serde_json::json!({ "model_type": "deepseek_v2", "q_lora_rank": 16 });
        assert_eq!(targets(keys), "o");
    }

    #[test]
    fn little_data_gets_small_steps() {
        let (config, steps) = trained_for(3.0, 20, 2);
        assert_eq!((steps, config.training.microbatches), (30, 2));
        assert_eq!((config.evaluation.every, config.evaluation.microbatches), (29, 2));
        assert_eq!(config.optimizer.warmup_steps, 3);
    }
}
