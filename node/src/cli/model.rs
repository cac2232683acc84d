//! The flags of the commands about models: `shoal import` and `shoal export`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use shoal_engine::base::ExportDtype;

/// `shoal import`
#[derive(Debug, Clone, Args)]
pub struct ImportArgs {
    /// Folder of a model in Hugging Face's format: config.json and safetensors files.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Folder for the base; must not exist.
    #[arg(short, long, value_name = "BASE")]
    pub out: PathBuf,
    /// Give a model whose head is tied to its embedding a head of its own, so that it can be cut into stages.
    #[arg(long)]
    pub untie: bool,
}

/// `shoal export`
#[derive(Debug, Clone, Args)]
pub struct ExportArgs {
    /// Folder of a checkpoint of a run that started from a base.
    #[arg(value_name = "CHECKPOINT")]
    pub checkpoint: PathBuf,
    /// Folder for the model; must not exist.
    #[arg(short, long, value_name = "DIR")]
    pub out: PathBuf,
    /// Number format of the weights.
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub dtype: DtypeArg,
}

/// `--dtype`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// 32-bit, as trained.
    F32,
    /// Rounded to bfloat16.
    Bf16,
}

impl From<DtypeArg> for ExportDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}
