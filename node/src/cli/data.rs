//! The flags of the commands about training data: `shoal data`.

use std::num::NonZero;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use shoal_data::document::TrainOn;
use shoal_data::pack::Packing;
use shoal_data::source::{Format, Split};
use shoal_data::template::Date;
use shoal_engine::DeviceChoice;
use shoal_protocol::units::Bytes;

use super::model::DtypeArg;

/// `shoal data`
#[derive(Debug, Clone, Subcommand)]
pub enum DataCommand {
    /// Turn text, JSONL and Parquet into rows of tokens with masks, to train on; goes on where it was interrupted.
    Prepare(DataPrepareArgs),
    /// Print one microbatch: token ids and labels as JSON, or text with masks.
    Show(DataShowArgs),
    /// Print numbers of prepared data: rows, targets, padding, lengths of documents; of a run, by source.
    Stats(DataStatsArgs),
    /// Add a base's log-probabilities to prepared pairs, which dpo and ipo compare with.
    Reference(DataReferenceArgs),
}

/// `shoal data reference`
#[derive(Debug, Clone, Args)]
pub struct DataReferenceArgs {
    /// Folder of prepared pairs.
    #[arg(value_name = "DATA")]
    pub data: PathBuf,
    /// Folder of the base (`shoal import`) that the run starts from.
    #[arg(long, value_name = "BASE")]
    pub model: PathBuf,
    /// Folder for the pairs with their log-probabilities.
    #[arg(short, long, value_name = "OUT")]
    pub out: PathBuf,
    /// Number format of the passes, best that of the run: bf16 or f32.
    #[arg(long, value_name = "DTYPE", default_value = "bf16")]
    pub dtype: DtypeArg,
    /// Device: `auto`, `cpu` or `cuda:N`.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceChoice,
}

/// `shoal data prepare`
#[derive(Debug, Clone, Args)]
pub struct DataPrepareArgs {
    /// Files (.txt, .md, .json, .jsonl, .parquet; also .gz and .zst), folders, patterns, or hf:datasets/OWNER/NAME[:PATTERN].
    #[arg(value_name = "SRC", required = true)]
    pub sources: Vec<String>,
    /// Folder of the base (`shoal import`) whose tokenizer and chat template to use.
    #[arg(long, value_name = "BASE")]
    pub tokenizer: PathBuf,
    /// Folder for the data; an unfinished one is continued.
    #[arg(short, long, value_name = "DATA")]
    pub out: PathBuf,
    /// Tokens per sample.
    #[arg(long, value_name = "N")]
    pub context: u32,
    /// Split to take of folders that have several (train, validation, test), or all; default: train.
    #[arg(long, value_name = "SPLIT")]
    pub split: Option<Split>,
    /// Kind of the rows: auto, text (key `text`), chat (`messages`), prompt (`prompt` and `completion`), preference (`chosen` and `rejected`, perhaps `prompt`), sharegpt (`conversations` of `from` and `value`) or alpaca (`instruction`, `input` and `output`).
    #[arg(long, value_name = "FORMAT", default_value_t = Format::Auto)]
    pub format: Format,
    /// Packing of documents: concat (one stream, cut every N tokens) or best-fit (documents stay whole where they fit); default: concat. A pair has a row of its own.
    #[arg(long, value_name = "PACKING")]
    pub pack: Option<Packing>,
    /// Targets in chats and prompts: responses (of the assistant, or the completion) or all.
    #[arg(long, value_name = "WHAT", default_value_t = TrainOn::Responses)]
    pub train_on: TrainOn,
    /// Share of the documents that is never trained on; default: one in 100, of fewer than 1000 one in 20, of fewer than 20 none.
    #[arg(long, value_name = "F")]
    pub held_out: Option<f64>,
    /// Chat template to use instead of the base's.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// The day that a chat template sees as today, if it asks for the date.
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub date: Option<Date>,
    /// Threads that encode; default: as many as there are cores.
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZero<usize>>,
    /// Most bytes of a row.
    #[arg(long, value_name = "SIZE", default_value = "16MiB")]
    pub line_bytes: Bytes,
    /// Make no rows but those of the first file: a run makes the others while it reads them, of a file at a time, so that
    /// training begins at once and data may be larger than a disk.
    #[arg(long)]
    pub stream: bool,
    /// Size of a shard.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    pub shard_bytes: Bytes,
}

/// `shoal data show`
#[derive(Debug, Clone, Args)]
pub struct DataShowArgs {
    /// The run's configuration.
    #[arg(value_name = "run.toml")]
    pub config: PathBuf,
    /// Step (optimizer update).
    #[arg(long, value_name = "S")]
    pub step: u64,
    /// Microbatch of the step; held-out microbatches follow the training ones.
    #[arg(long, value_name = "M")]
    pub microbatch: u32,
    /// Print text instead: context in `[...]`, a document's first token in `<...>`, targets as they are.
    #[arg(long)]
    pub text: bool,
}

/// `shoal data stats`
#[derive(Debug, Clone, Args)]
pub struct DataStatsArgs {
    /// Folder of prepared data, or a run's configuration: each of its data sets, with its share and epochs.
    #[arg(value_name = "DATA")]
    pub data: PathBuf,
    /// Rows to read at most, for the lengths of documents.
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub rows: u64,
}
