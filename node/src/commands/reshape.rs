//! `shoal checkpoint reshape`: goes on from a checkpoint in another shape.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use serde_json::{Map, Value};
use shoal_engine::Checkpoint;
use shoal_formats::config::{RunConfig, Sources as _, TrainingEpochs};
use shoal_protocol::manifest::{Manifest, Start};

use super::init::{absolute, write_new};
use crate::cli::ReshapeArgs;
use crate::config_sources::OnDisk;
use crate::dataset;
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;

/// Settings that do not change what is trained, or that the summary has anyway.
const UNMENTIONED: [&str; 2] = ["admission", "start"];

/// Writes the configuration of a run that goes on from a checkpoint, and prints what stays and what
/// differs.
///
/// # Errors
/// If the checkpoint is damaged or of another model, the configuration is invalid or has no steps left,
/// or the output exists.
pub(super) fn run(args: &ReshapeArgs) -> anyhow::Result<()> {
    if args.out.exists() {
        let problem = anyhow!("{} exists: give another name with -o", args.out.display());
        return Err(problem).exit_with(Exit::Usage);
    }
    let mut config = RunConfig::load(&args.config, &OnDisk).exit_with(Exit::Usage)?;
    let checkpoint = Checkpoint::open(&args.checkpoint).exit_with(Exit::Corrupt)?;
    reshape(&mut config, args)?;
    // The text is tokenized for the manifest alone.
    let scratch = tempfile::tempdir().context("no temporary folder")?;
    let manifest = dataset::prepare(&config, scratch.path())?.manifest;
    let hash = checkpoint.hash().exit_with(Exit::Corrupt)?;
    outln!("from version {} of run {}", checkpoint.step(), checkpoint.run());
    outln!("kept: weights {hash}, and the optimizer's state of each");
    for line in changes(checkpoint.manifest(), &manifest) {
        outln!("{line}");
    }
    if let Some(Start { step, samples, .. }) = manifest.start {
        outln!("steps {step} to {}, from sample {samples} on", manifest.training.steps - 1);
    }
    write_new(&config, &args.out)
}

/// Applies the flags, and makes all paths absolute: a path in run.toml starts at the file's folder.
fn reshape(config: &mut RunConfig, args: &ReshapeArgs) -> anyhow::Result<()> {
    let training = &mut config.training;
    training.stages = args.stages.unwrap_or(training.stages);
    training.microbatches = args.microbatches.unwrap_or(training.microbatches);
    training.microbatch_size = args.microbatch_size.unwrap_or(training.microbatch_size);
    if let Some(steps) = args.steps {
        (training.steps, config.epochs) = (steps, TrainingEpochs::None);
    }
    let folder = absolute(&args.checkpoint)?;
    let source = OnDisk.checkpoint(&folder);
    config.start = Some(source.map_err(|reason| anyhow!(reason)).exit_with(Exit::Corrupt)?);
    for path in config.data.folders_mut() {
        *path = absolute(path)?;
    }
    let paths: [Option<&mut PathBuf>; 2] = [config.base.as_mut(), config.data.path.as_mut()];
    for path in paths.into_iter().flatten() {
        *path = absolute(path)?;
    }
    config.check().exit_with(Exit::Usage)
}

/// A line for each setting that differs.
fn changes(earlier: &Manifest, here: &Manifest) -> Vec<String> {
    let [earlier, here] = [earlier, here].map(|manifest| {
        let value = serde_json::to_value(manifest).expect("it has only string keys");
        let mut leaves = Map::new();
        flatten(String::new(), value, &mut leaves);
        leaves
    });
    let keys = earlier.keys().chain(here.keys().filter(|key| !earlier.contains_key(*key)));
    let differs = |key: &&String| earlier.get(*key) != here.get(*key);
    let shown = |value: Option<&Value>| value.map_or("none".to_owned(), Value::to_string);
    let line = |key: &String| {
        format!("{key}: {} before, {} now", shown(earlier.get(key)), shown(here.get(key)))
    };
    keys.filter(differs).map(line).collect()
}

/// The leaves of a JSON object under their paths.
fn flatten(path: String, value: Value, leaves: &mut Map<String, Value>) {
    if UNMENTIONED.contains(&path.as_str()) {
        return;
    }
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let path = if path.is_empty() { key } else { format!("{path}.{key}") };
                flatten(path, value, leaves);
            }
        }
        leaf => {
            leaves.insert(path, leaf);
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_protocol::manifest::example::small;
    use shoal_protocol::manifest::{Adam, Rule};

    use super::*;

    #[test]
    fn changed_settings_are_listed_by_key() {
        let mut other = small();
        assert!(changes(&small(), &other).is_empty());
        other.training.stages = 5;
        other.optimizer.rule = Rule::Adamw(Adam { beta2: 0.99, ..Adam::DEFAULT });
        assert_eq!(
            changes(&small(), &other),
            ["optimizer.beta2: 0.95 before, 0.99 now", "training.stages: 2 before, 5 now"]
        );
    }
}
