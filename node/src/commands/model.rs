//! `shoal import`, `shoal export` and `shoal push`: models in Hugging Face's format, in and out.

use std::fs;
use std::path::Path;

use shoal_data::template::ChatTemplate;
use shoal_engine::base::{self, BaseError, ExportDtype, ImportOptions, Imported};
use shoal_engine::{BaseFiles, Checkpoint};
use shoal_formats::config::reads_bytes;
use shoal_protocol::manifest::Quantisation;

use super::hub;
use super::init::CONTEXT;
use crate::cli::{ExportArgs, ImportArgs, PushArgs};
use crate::exit::{Exit, ExitWith};
use crate::model_check;
use crate::terminal::outln;

/// Imports a model as a base, or compares one with transformers.
///
/// # Errors
/// If the model is incomplete or of no known family, the disk is full, or the comparison finds a difference.
pub(super) fn import(args: &ImportArgs) -> anyhow::Result<()> {
    hub::check_model(&args.model).exit_with(Exit::Usage)?;
    let (folder, name) = (hub::local_model(&args.model)?, hub::name(&args.model));
    match &args.out {
        Some(out) if args.check && out.join(base::INDEX).exists() => {}
        Some(out) => {
            let pack = args.nf4.then_some(Quantisation::Nf4);
            let options = ImportOptions { untie: args.untie, name: name.as_deref(), pack };
            let imported = checked(base::import_with(&folder, out, options))?;
            print_imported(out, &imported);
        }
        None => {}
    }
    match args.check {
        true => check(args, &folder),
        false => Ok(()),
    }
}

/// Compares a base with its model as transformers computes it. Without a base on the disk, it is a temporary one.
fn check(args: &ImportArgs, model: &Path) -> anyhow::Result<()> {
    let temporary = tempfile::Builder::new().prefix("shoal-check-").tempdir()?;
    let other = temporary.path().join("model");
    let (base, model) = match &args.out {
        Some(out) => (out.as_path(), model),
        // transformers reads no base, but what is exported from one.
        None if model.join(base::INDEX).exists() => {
            let files = checked(BaseFiles::in_folder(model))?;
            checked(files.verify())?;
            checked(base::export_base(&files, &other, ExportDtype::F32))?;
            (model, other.as_path())
        }
        None => {
            checked(base::import(model, &other, args.untie))?;
            (other.as_path(), model)
        }
    };
    let name =
        args.out.as_ref().map_or_else(|| args.model.clone(), |out| out.display().to_string());
    model_check::run(&name, base, model, args.python.as_deref())
}

fn print_imported(out: &Path, imported: &Imported) {
    let out = out.display();
    let (index, millions) = (&imported.index, imported.parameters as f64 / 1e6);
    outln!(
        "{out}: {} with {millions:.1} million weights in {} layers, base {}",
        index.family,
        index.model.layers,
        imported.base.index
    );
    if reads_bytes(&index.model) {
        outln!("start a run from it: shoal init --from {out} -o run.toml");
    } else {
        let context = CONTEXT.min(index.model.context);
        outln!(
            "prepare data for it: shoal data prepare SRC --tokenizer {out} --context {context} -o data"
        );
        outln!("start a run from it: shoal init --from {out} --data data -o run.toml");
    }
}

/// Writes the model of a checkpoint in the format of its family.
///
/// # Errors
/// If the checkpoint is damaged or its run started from no base, or the disk is full.
pub(super) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(&args.checkpoint).exit_with(Exit::Corrupt)?;
    let folder = &args.checkpoint;
    let base = BaseFiles::in_folder(folder).map_err(|error| match error {
        BaseError::NotABase { path } => anyhow::anyhow!(
            "{} started from no base: transformers loads the checkpoint as it is",
            path.display()
        ),
        other => other.into(),
    });
    let base = base.exit_with(Exit::Usage)?;
    let has_adapters = checkpoint.manifest().lora.is_some();
    let (out, dtype) = (&args.out, args.dtype.into());
    let template = match args.chat_template.as_deref() {
        Some(file) => ChatTemplate::find(folder, Some(file)).map(Some),
        None => ChatTemplate::trained(folder),
    };
    let template = template.exit_with(Exit::Usage)?;
    let what = match &args.merge {
        None if has_adapters => {
            let name = args.base_model.as_deref();
            checked(base::export_adapter(&checkpoint, &base, out, dtype, name))?;
            "adapters for "
        }
        None => {
            checked(base::export(&checkpoint, &base, out, dtype))?;
            ""
        }
        Some(_) if !has_adapters => {
            let problem = anyhow::anyhow!(
                "{} has all weights and no adapters: leave --merge out",
                args.checkpoint.display()
            );
            return Err(problem).exit_with(Exit::Usage);
        }
        Some(folder) => {
            let whole = checked(BaseFiles::in_folder(folder))?;
            checked(base::export(&checkpoint, &whole, out, dtype))?;
            ""
        }
    };
    if let Some(template) = template {
        fs::write(out.join("chat_template.jinja"), template)?;
    }
    let (out, family) = (out.display(), &base.index.family);
    outln!("{out}: {what}{family}, version {} of the weights", checkpoint.step());
    Ok(())
}

/// Uploads an exported model.
///
/// # Errors
/// If the folder has no model, or the Hub refuses it.
pub(super) fn push(args: &PushArgs) -> anyhow::Result<()> {
    let has = |name: &str| args.folder.join(name).exists();
    if !has("config.json") && !has("adapter_config.json") {
        let folder = args.folder.display();
        let problem = anyhow::anyhow!(
            "{folder} has no config.json and no adapter_config.json: `shoal export` writes a model"
        );
        return Err(problem).exit_with(Exit::Usage);
    }
    outln!("{}", hub::push(&args.folder, &args.repository, args.private, &args.message)?);
    Ok(())
}

/// Attaches the exit code: a damaged file is one thing, a model that is not supported another.
fn checked<T>(result: Result<T, BaseError>) -> anyhow::Result<T> {
    result.or_else(|error| {
        let exit = match &error {
            BaseError::Damaged { .. } | BaseError::MissingTensor { .. } => Exit::Corrupt,
            BaseError::Io { .. } => Exit::Failed,
            _ => Exit::Usage,
        };
        Err(error).exit_with(exit)
    })
}
