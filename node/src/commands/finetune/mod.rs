//! `shoal finetune`: import, prepare, init, start and export, in one folder. Each step is a command that a user could
//! type: it is printed, then carried out unless its result is there.

mod card;
mod plan;

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use anyhow::{Context, anyhow};
use clap::Parser;
use shoal_data::prepared::INDEX_FILE;
use shoal_engine::{BaseIndex, Checkpoint};

use self::card::Card;
use self::plan::{Asked, Plan, line};
use super::start;
use crate::cli::{Cli, Command, FinetuneArgs, LogFormat, StartArgs};
use crate::exit::{Exit, ExitWith};
use crate::terminal::outln;
use crate::whole_file;

/// Fine-tunes a model, or goes on where an earlier process was interrupted.
///
/// # Errors
/// If the folder has another fine-tuning, or a step fails.
pub(super) fn run(args: FinetuneArgs) -> anyhow::Result<()> {
    let plan = Plan::new(args);
    // A mistake in the flags for `shoal start` shows before the long steps.
    let _ = start_options(&plan.start(0))?;
    enter(&plan)?;
    let mut steps = Steps { done: 0, all: plan.steps() };
    steps.carry_out(&plan.import(), &plan.base())?;
    let (base, _) = BaseIndex::read(&plan.base()).exit_with(Exit::Usage)?;
    let prepare = plan.prepare(base.model.context);
    steps.carry_out(&prepare, &plan.index())?;
    if let Some(reference) = plan.reference() {
        steps.carry_out(&plan.refer(&reference), &reference.join(INDEX_FILE))?;
    }
    steps.carry_out(&plan.init(), &plan.config())?;
    if !steps.train(&plan)? {
        outln!("the run is not complete: the same `shoal finetune` goes on with it");
        return Ok(());
    }
    let checkpoint = Checkpoint::open(&plan.checkpoint()).exit_with(Exit::Corrupt)?;
    let lora = checkpoint.manifest().lora.as_ref();
    let is_in_peft = lora.is_none_or(|lora| base.why_not_in_peft(&lora.targets).is_none());
    steps.carry_out(&plan.export(is_in_peft)?, &plan.model())?;
    let hash = checkpoint.hash().exit_with(Exit::Corrupt)?;
    let report = card::report(&plan).context("the events of the run cannot be read")?;
    outln!("\n{}", Card { plan: &plan, report: &report, hash });
    Ok(())
}

/// Makes the folder of the run, and remembers what was asked for.
fn enter(plan: &Plan) -> anyhow::Result<()> {
    let (folder, path, asked) = (plan.folder(), plan.asked(), Asked::of(plan));
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    match fs::read(&path) {
        Ok(text) => {
            let before: Asked =
                serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
            refuse_another(plan, &before, &asked).exit_with(Exit::Usage)?;
        }
        Err(_) if folder.read_dir().is_ok_and(|mut entries| entries.next().is_some()) => {
            let problem =
                anyhow!("{} has other files: choose another folder with --out", folder.display());
            return Err(problem).exit_with(Exit::Usage);
        }
        Err(_) => {}
    }
    let text = serde_json::to_vec_pretty(&asked).expect("it is plain data");
    whole_file::write(&path, &text).with_context(|| path.display().to_string())
}

/// Refuses arguments whose step was carried out with others. A mistake in those of a later step can be mended.
fn refuse_another(plan: &Plan, before: &Asked, asked: &Asked) -> anyhow::Result<()> {
    let steps = [
        (plan.base(), before.model == asked.model),
        (plan.index(), has_data(before, asked)),
        (plan.config(), before.has_config_of(asked)),
    ];
    let Some((made, _)) = steps.iter().find(|(made, is_same)| made.exists() && !is_same) else {
        return Ok(());
    };
    Err(anyhow!(
        "{} was made by `{}`: go on with that, or choose another folder with --out",
        made.display(),
        line(&before.words(plan.folder()))
    ))
}

/// Whether both prepare the same rows.
fn has_data(one: &Asked, other: &Asked) -> bool {
    let of_pairs = |asked: &Asked| asked.loss.is_of_pairs();
    one.data == other.data && one.context == other.context && of_pairs(one) == of_pairs(other)
}

/// The steps of a fine-tuning, as they are counted.
struct Steps {
    done: usize,
    all: usize,
}

impl Steps {
    /// Prints the next step.
    fn say(&mut self, before: &str, words: &[OsString]) {
        self.done += 1;
        outln!("[{}/{}] {before}{}", self.done, self.all, line(words));
    }

    /// Carries out a step unless its result is there.
    fn carry_out(&mut self, words: &[OsString], result: &Path) -> anyhow::Result<()> {
        if result.exists() {
            self.say("done before: ", words);
            return Ok(());
        }
        self.say("", words);
        super::run(parse(words)?, LogFormat::Text)
    }

    /// Trains, with others that join; returns whether the run is complete.
    fn train(&mut self, plan: &Plan) -> anyhow::Result<bool> {
        if plan.checkpoint().exists() {
            self.say("done before: ", &plan.start(0));
            return Ok(true);
        }
        let events = plan.events();
        fs::create_dir_all(&events).with_context(|| events.display().to_string())?;
        let life = fs::read_dir(&events).with_context(|| events.display().to_string())?.count();
        let words = plan.start(life);
        self.say("", &words);
        start::is_complete_after(start_options(&words)?)
    }
}

fn start_options(words: &[OsString]) -> anyhow::Result<StartArgs> {
    match parse(words)? {
        Command::Start(args) => Ok(args),
        _ => unreachable!("the words begin with the command"),
    }
}

/// Reads a command line as a user types it, without the program.
fn parse(words: &[OsString]) -> anyhow::Result<Command> {
    let program = OsString::from("shoal");
    let cli = Cli::try_parse_from([&program].into_iter().chain(words)).map_err(|error| {
        let text = error.to_string();
        let reason = text.lines().next().unwrap_or_default();
        anyhow!("`{}`: {}", line(words), reason.trim_start_matches("error: "))
    });
    Ok(cli.exit_with(Exit::Usage)?.command)
}
