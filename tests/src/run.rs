//! A run of a few seconds, in a folder of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::Value;
use tempfile::TempDir;

use crate::process::Process;
use crate::program::{root, shoal};

/// A folder with a run's configuration, text and results.
#[derive(Debug)]
pub struct Run {
    folder: Arc<TempDir>,
}

/// The results of a run in a folder: a checkpoint and a report.
#[derive(Debug)]
pub struct Trained {
    /// The folder.
    pub folder: PathBuf,
    /// `report.json`.
    pub report: Value,
    /// The checkpoint's hash, once it was compared with the files.
    pub(crate) verified: OnceLock<String>,
    /// Keeps the folder while any copy exists.
    pub(crate) _scratch: Option<Arc<TempDir>>,
}

impl Run {
    /// The run in `tiny.toml` with two stages, a number of steps, and a checkpoint every `checkpoint_every` steps.
    ///
    /// # Panics
    /// When no folder can be made.
    #[must_use]
    pub fn of_two_stages(steps: i64, checkpoint_every: i64) -> Self {
        Self::tiny(&[
            ("training.steps", toml::Value::from(steps)),
            ("training.stages", toml::Value::from(2)),
            ("checkpoint.every", toml::Value::from(checkpoint_every)),
        ])
    }

    /// A run of so many stages of one layer, with so many numbers in a hidden state, and a checkpoint at every step.
    ///
    /// # Panics
    /// When no folder can be made.
    #[must_use]
    pub fn of_stages(stages: i64, hidden: i64, steps: i64) -> Self {
        Self::of_sliced_stages(stages, hidden, steps, 1)
    }

    /// [`Self::of_stages`], whose layers are computed in so many slices.
    ///
    /// # Panics
    /// When no folder can be made.
    #[must_use]
    pub fn of_sliced_stages(stages: i64, hidden: i64, steps: i64, slices: i64) -> Self {
        Self::tiny(&[
            ("model.slices", toml::Value::from(slices)),
            ("model.hidden", toml::Value::from(hidden)),
            ("model.intermediate", toml::Value::from(4 * hidden)),
            ("model.layers", toml::Value::from(stages)),
            ("training.stages", toml::Value::from(stages)),
            ("training.steps", toml::Value::from(steps)),
            ("training.microbatches", toml::Value::from(3)),
            ("training.microbatch_size", toml::Value::from(1)),
            ("checkpoint.every", toml::Value::from(1)),
            // A debug build would take most of its time to pack the checkpoints of these large models.
            ("codec.chunks", toml::Value::from("none")),
        ])
    }

    /// The run in `tiny.toml` with values replaced or added. Their names are `section.key`.
    ///
    /// # Panics
    /// When `tiny.toml` has no such section.
    #[must_use]
    pub fn tiny(changes: &[(&str, toml::Value)]) -> Self {
        Self::changed(include_str!("tiny.toml").parse().expect("valid TOML"), changes)
    }

    /// [`Self::tiny`] with another optimizer: a section `[optimizer]` in TOML.
    ///
    /// # Panics
    /// When the section is no TOML, or as [`Self::tiny`].
    #[must_use]
    pub fn with_optimizer(section: &str, changes: &[(&str, toml::Value)]) -> Self {
        Self::with_section(("optimizer", section.parse().expect("valid TOML")), changes)
    }

    /// [`Self::tiny`] with a section added or replaced.
    ///
    /// # Panics
    /// As [`Self::tiny`].
    #[must_use]
    pub fn with_section(
        (name, section): (&str, toml::Table),
        changes: &[(&str, toml::Value)],
    ) -> Self {
        let mut config: toml::Table = include_str!("tiny.toml").parse().expect("valid TOML");
        config.insert(name.to_owned(), section.into());
        Self::changed(config, changes)
    }

    /// [`Self::tiny`] with boundaries of a kind and a width.
    ///
    /// # Panics
    /// As [`Self::tiny`].
    #[must_use]
    pub fn with_boundary(kind: &str, width: i64, changes: &[(&str, toml::Value)]) -> Self {
        let boundary = toml::Table::from_iter([
            ("kind".to_owned(), toml::Value::from(kind)),
            ("width".to_owned(), toml::Value::from(width)),
        ]);
        Self::tiny(&[changes, &[("model.boundary", boundary.into())]].concat())
    }

    fn changed(mut config: toml::Table, changes: &[(&str, toml::Value)]) -> Self {
        for (name, value) in changes {
            let (section, key) = name.split_once('.').expect("a name is section.key");
            let found = config.get_mut(section).and_then(toml::Value::as_table_mut);
            let section = found.unwrap_or_else(|| panic!("tiny.toml has no section of {name}"));
            section.insert(key.to_owned(), value.clone());
        }
        // A shorter run has a shorter warm-up.
        let steps = config["training"].get("steps").and_then(toml::Value::as_integer);
        let warmup = config["optimizer"].get("warmup_steps").and_then(toml::Value::as_integer);
        if let (Some(steps), Some(warmup)) = (steps, warmup)
            && let Some(optimizer) = config["optimizer"].as_table_mut()
        {
            optimizer.insert("warmup_steps".to_owned(), warmup.min(steps).into());
        }
        let run = Self { folder: Arc::new(tempfile::tempdir().expect("room for a folder")) };
        fs::write(run.config(), config.to_string()).expect("room for a file");
        fs::copy(text(), run.path("text.txt")).expect("room for the text");
        run
    }

    /// A path in the folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The path of the run's configuration.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.path("run.toml")
    }

    /// Trains the run in one process, into the folder's subfolder `name`.
    ///
    /// # Panics
    /// When the training fails.
    #[must_use]
    pub fn local(&self, name: &str) -> Trained {
        let trained = local(&self.config(), &self.path(name));
        Trained { _scratch: Some(self.folder.clone()), ..trained }
    }

    /// The results of the run in one process, which is trained once for all equal runs.
    ///
    /// # Panics
    /// When the training fails.
    #[must_use]
    pub fn alone(&self) -> Alone {
        let read = |name| fs::read(self.path(name)).expect("a file of the run");
        let config = String::from_utf8(read("run.toml")).expect("text");
        let mut references = REFERENCES.lock().unwrap_or_else(PoisonError::into_inner);
        let reference = references.entry((config, read("text.txt"))).or_default().clone();
        // Other runs need the lock while this one trains.
        drop(references);
        let train = || {
            let trained = self.local("reference");
            // Who compares it with a hash of files checks the reported one, too.
            Alone { hash: trained.reported_hash(), losses: trained.losses() }
        };
        reference.get_or_init(train).clone()
    }
}

/// The model and the losses of a run that one process trains.
#[derive(Debug, Clone)]
pub struct Alone {
    hash: String,
    losses: Vec<f64>,
}

impl Alone {
    /// The checkpoint's hash.
    #[must_use]
    pub fn hash(&self) -> String {
        self.hash.clone()
    }

    /// The training loss of each step.
    #[must_use]
    pub fn losses(&self) -> Vec<f64> {
        self.losses.clone()
    }
}

/// What one process makes of a configuration and a text, for all tests of this program that train it.
type References = BTreeMap<(String, Vec<u8>), Arc<OnceLock<Alone>>>;

static REFERENCES: Mutex<References> = Mutex::new(BTreeMap::new());

/// An English text of eleven thousand bytes.
#[must_use]
pub fn text() -> PathBuf {
    root().join("LICENSE-APACHE")
}

/// Trains a run in one process with one thread.
///
/// # Panics
/// When the training fails.
#[must_use]
pub fn local(config: &Path, out: &Path) -> Trained {
    trained_by(local_command(config, out), out)
}

/// `shoal local` with one thread and events on stdout.
#[must_use]
pub fn local_command(config: &Path, out: &Path) -> Command {
    let mut command =
        shoal(["local".as_ref(), config.as_os_str(), "--out".as_ref(), out.as_os_str()]);
    command.args(["--threads", "1", "--device", "cpu", "--events", "-"]);
    command
}

/// The results of a command that [`local_command`] made.
///
/// # Panics
/// When the training fails.
#[must_use]
pub fn trained_by(command: Command, out: &Path) -> Trained {
    let _ = Process::start("local", command).end().success();
    Trained::read(out)
}

impl Trained {
    /// Reads the results of a run in a folder.
    ///
    /// # Panics
    /// When the folder has no report.
    #[must_use]
    pub fn read(folder: &Path) -> Self {
        let path = folder.join("report.json");
        let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let report = serde_json::from_slice(&text).expect("a report is JSON");
        Self { folder: folder.to_owned(), report, verified: OnceLock::new(), _scratch: None }
    }

    /// The checkpoint's folder.
    #[must_use]
    pub fn checkpoint(&self) -> PathBuf {
        self.folder.join("checkpoint")
    }

    /// The checkpoint's hash in the report.
    ///
    /// # Panics
    /// When the files have another hash.
    #[must_use]
    pub fn hash(&self) -> String {
        let verify = || {
            let reported = self.reported_hash();
            assert_eq!(checkpoint_hash(&self.checkpoint()), reported);
            reported
        };
        self.verified.get_or_init(verify).clone()
    }

    fn reported_hash(&self) -> String {
        self.report["checkpoint_hash"].as_str().expect("a hash").to_owned()
    }

    /// The training loss of each step.
    ///
    /// # Panics
    /// When the report lacks one.
    #[must_use]
    pub fn losses(&self) -> Vec<f64> {
        let steps = self.report["steps"].as_array().expect("a list");
        steps.iter().map(|step| step["loss"].as_f64().expect("a number")).collect()
    }
}

/// The output of `shoal checkpoint hash`.
///
/// # Panics
/// When the command fails.
#[must_use]
pub fn checkpoint_hash(folder: &Path) -> String {
    let command = shoal(["checkpoint".as_ref(), "hash".as_ref(), folder.as_os_str()]);
    Process::start("checkpoint hash", command).end().success().trim().to_owned()
}
