//! `--tensorboard`: the scalars of each committed step, as TensorBoard's event files.
//!
//! Each process writes a file of its own. Before its first step, and before a step that repeats an
//! earlier one after a rewind, it writes TensorBoard's mark of a restart: readers discard that step
//! and later ones of earlier records. So a reader has each step once, with the numbers of
//! `report.json`, and no earlier file need be read or trusted: its last record may be torn.

mod message;
mod record;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use prost::Message;
use shoal_formats::scores::Scores;

use self::message::Event;
use self::record::record;
use crate::events::{RunEvent, StepReport};

/// The names of the scalars.
const LOSS: &str = "train/loss";
const LEARNING_RATE: &str = "train/learning_rate";
const GRADIENT_NORM: &str = "train/gradient_norm";
const THROUGHPUT: &str = "throughput/tokens_per_second";
const HELD_OUT_LOSS: &str = "held_out/loss";
const ACCURACY: &str = "train/accuracy";
const MARGIN: &str = "train/margin";
const HELD_OUT_ACCURACY: &str = "held_out/accuracy";

/// The start of the names of scores.
const SCORES: &str = "score/";

/// The start of a file's name. A time in seconds since 1970 follows.
const PREFIX: &str = "events.out.tfevents.";

/// Digits of the time in a file's name. Readers take files in the order of their names.
const TIME_DIGITS: usize = 10;

/// Why TensorBoard gets no events.
#[derive(Debug, thiserror::Error)]
pub enum TensorBoardError {
    /// The folder cannot be made or read.
    #[error("--tensorboard: the folder {path} cannot be used: name another one")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// No file can be written there.
    #[error(
        "--tensorboard: {path} cannot be written: make room, or name a folder that is writable"
    )]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Writes the steps of a run to an event file.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    /// `None` after a write failed.
    file: Option<File>,
    /// The newest step in the file.
    newest: Option<u64>,
    /// Whether the peer serves. A newcomer receives many commits at once; their intervals say
    /// nothing about the steps' durations.
    serves: bool,
}

impl TensorBoard {
    /// Begins a file in a folder, which is made if it is missing. Readers take the file after all
    /// others there, even if the clock was set back.
    ///
    /// # Errors
    /// If folder or file cannot be made or written.
    pub fn open(folder: &Path) -> Result<Self, TensorBoardError> {
        let unusable = |source| TensorBoardError::Folder { path: folder.to_owned(), source };
        fs::create_dir_all(folder).map_err(unusable)?;
        let now = since_1970();
        let after = newest_time(folder).map_err(unusable)?.map_or(0, |newest| newest + 1);
        let time = after.max(now as u64);
        let path = folder.join(format!("{PREFIX}{time:0TIME_DIGITS$}.shoal"));
        let first = record(&Event::file_version(now).encode_to_vec());
        let file = File::create_new(&path)
            .and_then(|mut file| file.write_all(&first).map(|()| file))
            .map_err(|source| TensorBoardError::File { path: path.clone(), source })?;
        Ok(Self { path, file: Some(file), newest: None, serves: false })
    }

    /// Takes in the next event of the run.
    pub fn note(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Started { .. } => self.serves = false,
            RunEvent::Serving { .. } => self.serves = true,
            RunEvent::Committed(step) => self.step(step),
            RunEvent::Scored { version, scores, .. } => self.scored(*version, scores),
            _ => {}
        }
    }

    fn step(&mut self, step: &StepReport) {
        let now = since_1970();
        let mut bytes = Vec::new();
        if self.newest.is_none_or(|newest| newest >= step.step) {
            bytes = record(&Event::restart(now, step.step).encode_to_vec());
        }
        let scalars = self.scalars(step);
        bytes.extend(record(&Event::scalars(now, step.step, &scalars).encode_to_vec()));
        self.newest = Some(step.step);
        self.write(&bytes);
    }

    /// Scores have the version's number as their step: by then later steps are written.
    fn scored(&mut self, version: u64, scores: &Scores) {
        let named: Vec<(String, f64)> =
            scores.iter().map(|(name, score)| (format!("{SCORES}{name}"), *score)).collect();
        let named: Vec<(&str, f64)> = named.iter().map(|(tag, score)| (&**tag, *score)).collect();
        self.write(&record(&Event::scalars(since_1970(), version, &named).encode_to_vec()));
    }

    fn scalars(&self, step: &StepReport) -> Vec<(&'static str, f64)> {
        let mut scalars = vec![
            (LOSS, step.loss),
            (LEARNING_RATE, step.learning_rate),
            (GRADIENT_NORM, step.gradient_norm),
        ];
        if self.serves {
            scalars.push((THROUGHPUT, step.tokens_per_second()));
        }
        scalars.extend(step.held_out_loss.map(|loss| (HELD_OUT_LOSS, loss)));
        if let Some(found) = &step.preferences {
            scalars.extend([(ACCURACY, found.accuracy), (MARGIN, found.margin)]);
            scalars.extend(found.held_out_accuracy.map(|share| (HELD_OUT_ACCURACY, share)));
        }
        scalars
    }

    /// Writes records in one piece. The first failure is reported and ends the file; training is
    /// worth more than its curves.
    fn write(&mut self, records: &[u8]) {
        let Some(file) = &mut self.file else { return };
        if let Err(error) = file.write_all(records) {
            let path = self.path.display();
            tracing::warn!(
                %path, %error,
                "TensorBoard gets no more steps of this process, and training goes on: \
                 to see later steps, make room and start the peer again"
            );
            self.file = None;
        }
    }
}

/// Seconds since 1970.
fn since_1970() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The newest time in the names of a folder's event files.
fn newest_time(folder: &Path) -> io::Result<Option<u64>> {
    let mut newest = None;
    for entry in fs::read_dir(folder)? {
        newest = newest.max(entry?.file_name().to_str().and_then(time_of));
    }
    Ok(newest)
}

/// The time in the name of an event file; `None` for other names, and for a time so late that no
/// later one has as many digits.
fn time_of(name: &str) -> Option<u64> {
    let rest = name.strip_prefix(PREFIX)?;
    let time = rest.split('.').next().filter(|time| time.len() == TIME_DIGITS)?;
    time.parse().ok().filter(|time: &u64| *time < 10_u64.pow(TIME_DIGITS as u32) - 1)
}
