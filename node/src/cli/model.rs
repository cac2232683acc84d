//! The flags of the commands about models: `shoal import`, `shoal export` and `shoal push`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use shoal_engine::base::ExportDtype;
use shoal_protocol::manifest::Dtype;

/// `shoal import`
#[derive(Debug, Clone, Args)]
pub struct ImportArgs {
    /// Folder of a model in Hugging Face's format (config.json and safetensors files), or hf:OWNER/NAME[@REVISION].
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Folder for the base; must not exist, except with --check.
    #[arg(short, long, value_name = "BASE", required_unless_present = "check")]
    pub out: Option<PathBuf>,
    /// Give a model whose head is tied to its embedding a head of its own, which trains apart from it.
    #[arg(long)]
    pub untie: bool,
    /// Pack the matrices of layers in 4 bits (NF4) for runs that train adapters beside them: a quarter of the bytes. A model
    /// that bitsandbytes has quantised so is imported as it is.
    #[arg(long)]
    pub nf4: bool,
    /// Compare the base with MODEL as transformers computes it: the logits of 64 tokens and the token ids of some texts.
    /// A base in BASE is compared as it is; without BASE, nothing is kept. MODEL may be a base itself.
    #[arg(long)]
    pub check: bool,
    /// Python with torch and transformers 5 to compare with; default: that of the variable `SHOAL_PYTHON`, otherwise
    /// the one whose libtorch this program uses, otherwise python3.
    #[arg(long, value_name = "PATH", requires = "check")]
    pub python: Option<PathBuf>,
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
    /// Write the whole model of a run that trained adapters: they are added to the weights of this base. Without
    /// it only the adapters are written, as PEFT has them.
    #[arg(long, value_name = "BASE")]
    pub merge: Option<PathBuf>,
    /// Repository or folder of the model that adapters were trained beside, for PEFT; default: the hf: name that
    /// it was imported by.
    #[arg(long, value_name = "NAME", conflicts_with = "merge")]
    pub base_model: Option<String>,
    /// Chat template to write instead of the base's, such as the one that the data was prepared with.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Number format of the weights.
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub dtype: DtypeArg,
}

/// `shoal push`
#[derive(Debug, Clone, Args)]
pub struct PushArgs {
    /// Folder of the exported model.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// The repository, hf:OWNER/NAME[@BRANCH]; made if it does not exist.
    #[arg(value_name = "REPOSITORY")]
    pub repository: String,
    /// Make a new repository private.
    #[arg(long)]
    pub private: bool,
    /// First line of the commit's message.
    #[arg(long, short, value_name = "TEXT", default_value = "Upload a model trained with Shoal")]
    pub message: String,
}

/// `--dtype`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// 32-bit, as trained.
    F32,
    /// Rounded to bfloat16.
    Bf16,
}

impl From<DtypeArg> for Dtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}

impl From<DtypeArg> for ExportDtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Self::F32,
            DtypeArg::Bf16 => Self::Bf16,
        }
    }
}
