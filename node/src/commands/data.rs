//! `shoal data`: prepares and shows training data.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::anyhow;
use serde::Serialize;
use shoal_data::batch::{BatchRow, Batches, SourceShard};
use shoal_data::pack::{Packing, Row};
use shoal_data::prepare::{default_held_out, prepare_noting};
use shoal_data::prepared::{Index, Shard};
use shoal_data::source::{self, Format, ReadOptions, RowKind, Split};
use shoal_data::stats::{Stats, spans};
use shoal_data::tokenizer::TextTokenizer;
use shoal_data::{PrepareError, PrepareOptions};
use shoal_engine::{Batch, Samples, TokenFile};
use shoal_formats::config::RunConfig;
use shoal_formats::epochs::Epochs;
use shoal_protocol::ids::{Microbatch, Step};
use shoal_protocol::label::Label;
use shoal_protocol::manifest::Manifest;

use super::{data_notes, hub, reference, stream};
use crate::cli::{DataCommand, DataPrepareArgs, DataShowArgs, DataStatsArgs};
use crate::config_sources::OnDisk;
use crate::dataset::{self, Dataset};
use crate::exit::{Exit, ExitWith};
use crate::progress;
use crate::source_epochs::SourceEpochs;
use crate::terminal::outln;

/// The label of a token that does not count, as in PyTorch.
const IGNORED: i64 = -100;

/// A microbatch, as printed.
#[derive(Debug, Serialize)]
struct Shown {
    step: u64,
    microbatch: u32,
    /// Token ids, a list per sample.
    inputs: Vec<Vec<u32>>,
    /// The token that follows each input, or -100 where it does not count.
    labels: Vec<Vec<i64>>,
    /// Number of each input's document in its sample.
    documents: Vec<Vec<u32>>,
}

/// Runs a subcommand.
///
/// # Errors
/// If a configuration, a source or the data is invalid, or the run has no such microbatch.
pub(super) fn run(command: DataCommand) -> anyhow::Result<()> {
    match command {
        DataCommand::Prepare(args) => prepare_data(args),
        DataCommand::Show(args) => show(&args),
        DataCommand::Stats(args) => stats(&args),
        DataCommand::Reference(args) => reference::run(&args),
    }
}

fn prepare_data(args: DataPrepareArgs) -> anyhow::Result<()> {
    hub::check_base(&args.tokenizer).exit_with(Exit::Usage)?;
    let mut sources = Vec::new();
    for source in args.sources.iter().filter(|_| !args.stream) {
        sources.extend(hub::local_sources(source.clone())?);
    }
    let mut options = PrepareOptions {
        format: args.format,
        train_on: args.train_on,
        pack: args.pack.unwrap_or(Packing::Concat),
        shard_bytes: args.shard_bytes.0,
        line_bytes: usize::try_from(args.line_bytes.0).unwrap_or(usize::MAX),
        split: args.split,
        threads: args.threads,
        chat_template: args.chat_template.clone(),
        date: args.date,
        ..PrepareOptions::new(sources, args.tokenizer.clone(), args.context)
    };
    if args.stream {
        return stream::run(&args, options);
    }
    let kind = say_sources(&options)?;
    if let (RowKind::Pair, Some(pack)) = (kind, args.pack) {
        let problem = anyhow!(
            "--pack {pack} is for texts and chats, and these rows are pairs, each of which has a row of its own: leave \
             --pack out"
        );
        return Err(problem).exit_with(Exit::Usage);
    }
    options.held_out = match args.held_out {
        Some(share) => share,
        None => default_held_out(&options).exit_with(Exit::Usage)?,
    };
    let bar = progress::byte_bar("preparing");
    let prepared = prepare_noting(&options, &args.out, |progress| {
        bar.set_length(progress.bytes_total);
        bar.set_position(progress.bytes_read);
        bar.set_message(format!("{} documents, {} tokens", progress.documents, progress.tokens));
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    let (index, notes) = prepared.or_else(|error| {
        let exit = match &error {
            PrepareError::Write(_) => Exit::Failed,
            _ => Exit::Usage,
        };
        Err(error).exit_with(exit)
    })?;
    let (train, held_out) = (index.train_totals, index.held_out_totals);
    let out = args.out.display();
    outln!(
        "{out}: {} documents; {} rows of {} tokens to train on, {} held out; {} targets, {} masked, {} padded",
        index.documents.train + index.documents.held_out,
        train.rows,
        index.context,
        held_out.rows,
        train.targets,
        train.masked,
        train.padded
    );
    data_notes::say(&index, &notes, &options, kind);
    let base = options.base.display();
    if kind == RowKind::Pair {
        outln!("for dpo and ipo: shoal data reference {out} --model {base} -o {out}-reference");
        outln!("without one: shoal init --loss orpo --from {base} --data {out} -o run.toml");
        return Ok(());
    }
    outln!("train on it: shoal init --from {base} --data {out} -o run.toml");
    Ok(())
}

/// Says what is taken of the sources, and as what, where that is a choice. Returns the kind of their rows.
fn say_sources(options: &PrepareOptions) -> anyhow::Result<RowKind> {
    let found = source::find(&options.sources, options.split.as_ref()).exit_with(Exit::Usage)?;
    if !found.left_out.is_empty() {
        let names = found.left_out.iter().map(|(split, files)| format!("{split} ({files} files)"));
        outln!(
            "{} of the sources is taken, {} left out: --split takes another, --split all all of them",
            found.split.map_or("what is in no split", Split::name),
            names.collect::<Vec<_>>().join(", ")
        );
    }
    let read = ReadOptions { line_bytes: options.line_bytes, ..ReadOptions::default() };
    let kind = source::detect(&found.files, options.format, &read).exit_with(Exit::Usage)?;
    let foreign = matches!(kind, RowKind::Conversations | RowKind::Instruction | RowKind::Pair);
    if options.format == Format::Auto && foreign {
        let (format, keys) = (kind.format(), kind.keys().join(", "));
        outln!("rows are read as {format} ({keys}): --format takes another");
    }
    Ok(kind)
}

fn show(args: &DataShowArgs) -> anyhow::Result<()> {
    let config = RunConfig::load(&args.config, &OnDisk).exit_with(Exit::Usage)?;
    let scratch = tempfile::tempdir()?;
    let dataset = dataset::prepare(&config, scratch.path())?;
    check_place(args, &dataset.manifest)?;
    if args.text {
        return show_text(args, &config, &dataset.manifest);
    }
    let batch = batch(args, &config, &dataset)?;
    let context = dataset.manifest.model.context as usize;
    let row_words = dataset.manifest.words_of_row() as usize;
    let labels: Vec<u32> = words(&batch.labels).collect();
    let labels = labels.chunks(row_words).flat_map(|row| &row[..context]);
    let labels: Vec<Label> = labels.map(|word| Label::from_word(*word)).collect();
    let targets: Vec<i64> =
        labels.iter().map(|label| label.target.map_or(IGNORED, i64::from)).collect();
    let inputs: Vec<u32> = words(&batch.inputs).collect();
    let shown = Shown {
        step: args.step,
        microbatch: args.microbatch,
        inputs: inputs.chunks(context).map(<[u32]>::to_vec).collect(),
        labels: targets.chunks(context).map(<[i64]>::to_vec).collect(),
        documents: labels.chunks(context).map(documents).collect(),
    };
    outln!("{}", serde_json::to_string(&shown)?);
    Ok(())
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

/// The number of each token's document in a sample.
fn documents(labels: &[Label]) -> Vec<u32> {
    let mut number = 0;
    let next = |(place, label): (usize, &Label)| {
        number += u32::from(label.starts_document && place > 0);
        number
    };
    labels.iter().enumerate().map(next).collect()
}

fn check_place(args: &DataShowArgs, manifest: &Manifest) -> anyhow::Result<()> {
    let (first, steps) = (manifest.first_version(), manifest.training.steps);
    let (step, microbatch) = (args.step, args.microbatch);
    if step >= steps || step < first.0 {
        let problem = anyhow!("there is no step {step}: the run has steps {first} to {steps} - 1");
        return Err(problem).exit_with(Exit::Usage);
    }
    let microbatches = manifest.microbatches_of(step);
    if microbatch >= microbatches {
        let problem = anyhow!(
            "there is no microbatch {microbatch}: step {step} has microbatches 0 to {}",
            microbatches - 1
        );
        return Err(problem).exit_with(Exit::Usage);
    }
    Ok(())
}

fn batch(args: &DataShowArgs, config: &RunConfig, dataset: &Dataset) -> anyhow::Result<Batch> {
    let manifest = &dataset.manifest;
    if let (Some(tokens), Some(path)) = (manifest.text(), dataset.token_file()) {
        let samples = Samples::new(manifest, TokenFile::open(path, tokens)?);
        return Ok(samples.batch(Step(args.step), Microbatch(args.microbatch)));
    }
    let (rows, batches) = rows(args, config, manifest)?;
    let encoded = batches.encode(&rows);
    Ok(Batch { inputs: encoded.inputs.into(), labels: encoded.labels.into() })
}

/// The rows of a microbatch of prepared data.
fn rows(
    args: &DataShowArgs,
    config: &RunConfig,
    manifest: &Manifest,
) -> anyhow::Result<(Vec<Row>, Batches)> {
    let folders = config.data.folders();
    if folders.is_empty() {
        let problem = anyhow!("the run trains on plain text: show it without --text");
        return Err(problem).exit_with(Exit::Usage);
    }
    let indexes = folders.iter().map(|folder| Index::read(folder)).collect::<Result<_, _>>();
    let indexes: Vec<Index> = indexes.exit_with(Exit::Usage)?;
    if indexes.iter().any(|index| index.stream.is_some()) {
        let problem = anyhow!("the data is streamed: its rows are made while a run reads them");
        return Err(problem).exit_with(Exit::Usage);
    }
    let batches = Batches::new(manifest, indexes);
    let mut rows = Vec::new();
    for BatchRow { shard, row } in batches.rows(Step(args.step), Microbatch(args.microbatch)) {
        let SourceShard { source, entry } = shard;
        let path = Shard::path_in(folders[source], entry);
        let shard = Shard::open(&path, batches.index_of(source), entry);
        rows.push(shard.and_then(|shard| shard.row(row)).exit_with(Exit::Corrupt)?);
    }
    Ok((rows, batches))
}

fn show_text(args: &DataShowArgs, config: &RunConfig, manifest: &Manifest) -> anyhow::Result<()> {
    let (rows, _) = rows(args, config, manifest)?;
    let problem = || anyhow!("run.toml names no base, whose tokenizer could show the text");
    let base = config.base.as_ref().ok_or_else(problem).exit_with(Exit::Usage)?;
    let tokenizer = TextTokenizer::load(base).exit_with(Exit::Usage)?;
    for row in &rows {
        let spans = spans(row, &tokenizer)?;
        outln!("{}", spans.iter().map(ToString::to_string).collect::<String>());
    }
    Ok(())
}

/// Prints the numbers of prepared data, or of all that a run draws from.
fn stats(args: &DataStatsArgs) -> anyhow::Result<()> {
    if !args.data.is_file() {
        return folder_stats(&args.data, args.rows);
    }
    let config = RunConfig::load(&args.data, &OnDisk).exit_with(Exit::Usage)?;
    let problem = || anyhow!("{} names no prepared data", args.data.display());
    let data = config.data.rows().ok_or_else(problem).exit_with(Exit::Usage)?;
    let manifest = config.resolve(data).exit_with(Exit::Usage)?;
    let mut lines = SourceEpochs::of(&manifest).into_iter();
    for folder in config.data.folders() {
        match lines.next() {
            Some(source) => outln!("{}: {}", folder.display(), source.line()),
            None => outln!("{}: {}", folder.display(), Epochs::of(&manifest).line()),
        }
        folder_stats(folder, args.rows)?;
    }
    Ok(())
}

fn folder_stats(folder: &Path, rows: u64) -> anyhow::Result<()> {
    let index = Index::read(folder).exit_with(Exit::Usage)?;
    outln!(
        "{} rows of {} tokens, packed {}; vocabulary {}",
        index.train_totals.rows,
        index.context,
        index.packing,
        index.vocabulary
    );
    let documents = index.documents;
    outln!(
        "{} documents, {} held out, {} empty, {} without a target",
        documents.train,
        documents.held_out,
        documents.empty,
        documents.without_target
    );
    for (name, shards, totals) in [
        ("training", &index.train, index.train_totals),
        ("held out", &index.held_out, index.held_out_totals),
    ] {
        outln!(
            "{name}: {} rows in {} shards; {} targets, {} masked, {} padded",
            totals.rows,
            shards.len(),
            totals.targets,
            totals.masked,
            totals.padded
        );
    }
    let stats = read_stats(folder, &index, rows)?;
    let lengths = &stats.documents;
    outln!(
        "of {} rows: documents of {:.0} tokens on average, {} at most; {} rows without a target",
        stats.rows,
        lengths.mean(),
        lengths.longest(),
        stats.without_targets
    );
    for (from, to, count) in lengths.ranges() {
        outln!("  {from:>8} to {to:<8} {count:>10}");
    }
    Ok(())
}

fn read_stats(folder: &Path, index: &Index, rows: u64) -> anyhow::Result<Stats> {
    // Of streamed data only the rows that are held out are here.
    let shards = if index.stream.is_some() { &index.held_out } else { &index.train };
    Stats::of(folder, index, shards, rows).exit_with(Exit::Corrupt)
}
