//! The folder of a fine-tuning, and the command of each step.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shoal_data::prepared::INDEX_FILE;
use shoal_formats::config::loss_section::LossName;

use super::super::init::{CONTEXT, absolute};
use crate::cli::FinetuneArgs;

/// Share of the documents that measures the loss.
const HELD_OUT: &str = "0.05";

/// What a fine-tuning was asked for, apart from flags that a later process may change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    pub(super) model: String,
    pub(super) data: Vec<String>,
    pub(super) lora: Option<u32>,
    #[serde(default)]
    pub(super) nf4: bool,
    pub(super) epochs: u32,
    pub(super) context: Option<u32>,
    #[serde(default)]
    pub(super) loss: LossName,
}

impl Asked {
    /// What a plan was made for.
    pub(super) fn of(Plan { args }: &Plan) -> Self {
        let FinetuneArgs { model, data, lora, nf4, epochs, context, loss, .. } = args.clone();
        Self { model, data, lora, nf4, epochs, context, loss }
    }

    /// Whether both have one run.toml.
    pub(super) fn has_config_of(&self, other: &Self) -> bool {
        let keys = |asked: &Self| (asked.lora, asked.nf4, asked.epochs, asked.loss);
        keys(self) == keys(other)
    }

    /// The command that asks for it in a folder.
    pub(super) fn words(&self, folder: &Path) -> Vec<OsString> {
        let mut words = command(&["finetune", &self.model]);
        words.extend(self.data.iter().map(OsString::from));
        words.extend(["--out".into(), folder.into()]);
        for (flag, value) in
            [("--lora", self.lora), ("--epochs", Some(self.epochs)), ("--context", self.context)]
        {
            words.extend(value.iter().flat_map(|value| [flag.into(), value.to_string().into()]));
        }
        words.extend(self.nf4.then(|| "--nf4".into()));
        if self.loss.is_of_pairs() {
            words.extend(command(&["--loss", &self.loss.to_string()]));
        }
        words
    }
}

/// The paths and commands of a fine-tuning.
#[derive(Debug)]
pub(super) struct Plan {
    args: FinetuneArgs,
}

impl Plan {
    pub(super) fn new(args: FinetuneArgs) -> Self {
        Self { args }
    }

    /// The folder with everything.
    pub(super) fn folder(&self) -> &Path {
        &self.args.out
    }

    /// The model that is fine-tuned, as it was named.
    pub(super) fn name(&self) -> &str {
        &self.args.model
    }

    /// Passes over the data.
    pub(super) fn epochs(&self) -> u32 {
        self.args.epochs
    }

    /// Whether adapters are trained.
    pub(super) fn has_adapters(&self) -> bool {
        self.args.lora.is_some()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.args.out.join(name)
    }

    /// The record of what was asked for.
    pub(super) fn asked(&self) -> PathBuf {
        self.path("finetune.json")
    }

    /// The imported model.
    pub(super) fn base(&self) -> PathBuf {
        self.path("base")
    }

    /// The prepared data.
    pub(super) fn data(&self) -> PathBuf {
        self.path("data")
    }

    /// The index of the prepared data, once it is complete.
    pub(super) fn index(&self) -> PathBuf {
        self.data().join(INDEX_FILE)
    }

    /// The prepared pairs with the base's log-probabilities, if the loss compares with them.
    pub(super) fn reference(&self) -> Option<PathBuf> {
        self.args.loss.needs_reference().then(|| self.path("reference"))
    }

    /// Number of steps.
    pub(super) fn steps(&self) -> usize {
        if self.args.loss.needs_reference() { 6 } else { 5 }
    }

    /// The run's configuration.
    pub(super) fn config(&self) -> PathBuf {
        self.path("run.toml")
    }

    /// The results of the run.
    pub(super) fn results(&self) -> PathBuf {
        self.path("out")
    }

    /// The last checkpoint.
    pub(super) fn checkpoint(&self) -> PathBuf {
        self.results().join("checkpoint")
    }

    /// The events of the run, a file for each process that started it.
    pub(super) fn events(&self) -> PathBuf {
        self.path("events")
    }

    /// The file of a process in [`Plan::events`].
    pub(super) fn events_of(&self, life: usize) -> PathBuf {
        self.events().join(format!("{life:04}.jsonl"))
    }

    /// The exported model.
    pub(super) fn model(&self) -> PathBuf {
        self.path("model")
    }

    pub(super) fn import(&self) -> Vec<OsString> {
        let mut words = command(&["import", &self.args.model]);
        words.extend(self.args.nf4.then(|| "--nf4".into()));
        words.extend(["-o".into(), self.base().into()]);
        words
    }

    /// `longest` is the longest position of the base.
    pub(super) fn prepare(&self, longest: u32) -> Vec<OsString> {
        let context = self.args.context.unwrap_or(CONTEXT.min(longest));
        let mut words = command(&["data", "prepare"]);
        words.extend(self.args.data.iter().map(OsString::from));
        words.extend(["--tokenizer".into(), self.base().into()]);
        words.extend(["--context".into(), context.to_string().into()]);
        // Each pair has a row of its own.
        if !self.args.loss.is_of_pairs() {
            words.extend(command(&["--pack", "best-fit"]));
        }
        words.extend(command(&["--held-out", HELD_OUT, "-o"]));
        words.push(self.data().into());
        words
    }

    /// `out` gets the pairs with their log-probabilities.
    pub(super) fn refer(&self, out: &Path) -> Vec<OsString> {
        let mut words = command(&["data", "reference"]);
        words.extend([self.data().into(), "--model".into(), self.base().into()]);
        words.extend(["-o".into(), out.into()]);
        words
    }

    pub(super) fn init(&self) -> Vec<OsString> {
        let mut words = command(&["init", "--from"]);
        let data = self.reference().unwrap_or_else(|| self.data());
        words.extend([self.base().into(), "--data".into(), data.into()]);
        if self.args.loss.is_of_pairs() {
            words.extend(command(&["--loss", &self.args.loss.to_string()]));
        }
        if let Some(rank) = self.args.lora {
            words.extend(["--lora".into(), rank.to_string().into()]);
        }
        words.extend(self.args.nf4.then(|| "--nf4".into()));
        words.extend(["--epochs".into(), self.args.epochs.to_string().into()]);
        words.extend(["-o".into(), self.config().into()]);
        words
    }

    /// `life` counts the processes that started the run before.
    pub(super) fn start(&self, life: usize) -> Vec<OsString> {
        let mut words = vec!["start".into(), self.config().into()];
        words.extend(["--out".into(), self.results().into()]);
        words.extend(["--events".into(), self.events_of(life).into()]);
        words.extend(self.args.start.iter().cloned());
        words
    }

    /// Adapters are merged into the base where PEFT has no such ones.
    ///
    /// # Errors
    /// If the current folder is unknown.
    pub(super) fn export(&self, is_in_peft: bool) -> anyhow::Result<Vec<OsString>> {
        let mut words = vec!["export".into(), self.checkpoint().into()];
        if self.has_adapters() && !is_in_peft {
            words.extend(["--merge".into(), self.base().into()]);
        } else if self.has_adapters() && !self.args.model.starts_with("hf:") {
            // PEFT looks for the model by this name.
            words.extend(["--base-model".into(), absolute(Path::new(&self.args.model))?.into()]);
        }
        words.extend(["--dtype".into(), "bf16".into()]);
        words.extend(["-o".into(), self.model().into()]);
        Ok(words)
    }

    pub(super) fn chat(&self) -> Vec<OsString> {
        let mut words = vec!["chat".into(), self.checkpoint().into()];
        if self.has_adapters() {
            words.extend(["--base".into(), self.base().into()]);
        }
        words
    }

    /// Writes the whole model where adapters were trained, else one with all 32 bits.
    pub(super) fn export_otherwise(&self) -> Vec<OsString> {
        let mut words = vec!["export".into(), self.checkpoint().into()];
        let other = if self.has_adapters() {
            words.extend(["--merge".into(), self.base().into()]);
            "merged"
        } else {
            "model-f32"
        };
        words.extend(["-o".into(), self.path(other).into()]);
        words
    }

    pub(super) fn push(&self) -> Vec<OsString> {
        vec!["push".into(), self.model().into(), "hf:OWNER/NAME".into()]
    }

    pub(super) fn verify(&self) -> Vec<OsString> {
        let mut words = command(&["checkpoint", "verify"]);
        words.push(self.checkpoint().into());
        words
    }

    /// The same run in one process, whose checkpoint has the same hash.
    pub(super) fn local(&self) -> Vec<OsString> {
        vec!["local".into(), self.config().into(), "--out".into(), self.path("alone").into()]
    }
}

fn command(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// The command line as a shell reads it.
pub(super) fn line(words: &[OsString]) -> String {
    let words = words.iter().map(|word| quoted(word));
    ["shoal".to_owned()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// A word as a shell reads it.
fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=@,+%".contains(letter);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.into_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn plan(text: &str) -> Plan {
        match Cli::try_parse_from(text.split(' ')).expect("a command line").command {
            Command::Finetune(args) => Plan::new(args),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn each_step_is_a_command_that_a_user_can_type() {
        let whole = plan("shoal finetune hf:a/b chats.jsonl --out run -- --wait-for 2");
        let adapters =
            plan("shoal finetune model a.jsonl b.jsonl --out run --lora 16 --nf4 --epochs 2");
        let pairs = plan("shoal finetune model p.jsonl --out run --loss dpo");
        for plan in [&whole, &adapters, &pairs] {
            for words in [
                plan.refer(Path::new("run/reference")),
                plan.import(),
                plan.prepare(4096),
                plan.init(),
                plan.start(0),
                plan.export(true).expect("a current folder"),
                plan.export(false).expect("a current folder"),
                plan.chat(),
                plan.export_otherwise(),
                plan.push(),
                plan.verify(),
                plan.local(),
                Asked::of(plan).words(plan.folder()),
            ] {
                let line = line(&words);
                let read = Cli::try_parse_from(line.split(' '));
                assert!(
                    read.is_ok(),
                    "{line}: {}",
                    read.err().map_or_else(String::new, |e| e.to_string())
                );
            }
        }
        assert!(line(&whole.start(3)).ends_with("--events run/events/0003.jsonl --wait-for 2"));
        assert!(line(&whole.prepare(128)).contains("--context 128"));
        assert!(line(&whole.prepare(4096)).contains("--context 1024"));
        assert!(line(&adapters.init()).contains("--lora 16 --nf4 --epochs 2"));
        assert!(!line(&pairs.prepare(64)).contains("--pack"));
        assert!(line(&pairs.init()).contains("--data run/reference --loss dpo"));
        assert_eq!((whole.steps(), pairs.steps()), (5, 6));
        assert!(line(&adapters.chat()).ends_with("--base run/base"));
        let export = |plan: &Plan, llama| line(&plan.export(llama).expect("a current folder"));
        assert!(export(&adapters, true).contains("--base-model /"));
        assert!(export(&adapters, false).contains("--merge run/base"));
        assert!(!export(&whole, false).contains("--merge"));
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(
            line(&command(&["import", "my model", "it's", ""])),
            "shoal import 'my model' 'it'\\''s' ''"
        );
    }

    #[test]
    fn what_was_asked_for_is_compared() {
        let asked = |text| Asked::of(&plan(text));
        let first = asked("shoal finetune m d --out run");
        assert_eq!(first, asked("shoal finetune m d --epochs 3 --out run -- --device cpu"));
        assert_ne!(first, asked("shoal finetune m d --lora 4 --out run"));
        assert_ne!(first, asked("shoal finetune m e --out run"));
        let whole = asked("shoal finetune m d --lora 4 --out run");
        assert_ne!(whole, asked("shoal finetune m d --lora 4 --nf4 --out run"));
    }
}
